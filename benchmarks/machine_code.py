"""The machine code of every Triton kernel, compiled without a GPU for compute capabilities 8.0, 8.9, 9.0 and 10.0: registers, what
did not fit into them, shared memory, how many programs a multiprocessor holds at once, how wide loads are, how long the inner loop
is. The last result is compared with this one, and what changed is printed.

A kernel that spills more than in that result, or takes more shared memory than the GPU has, ends it with exit code 1. JSON lines,
then a table.
usage: python -m benchmarks.machine_code [--capability 90]… [--against FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPILLS = ("_cos_sin_kernel",)  # angles of any size are reduced on the stack
REGISTERS, GRANULE = 65536, 256  # of a multiprocessor; a warp's are given out in steps of so many
SYSTEM_BYTES = 1024  # of shared memory, that a program takes besides its own
COMPARED = ("registers", "stack_bytes", "shared_bytes", "instructions", "loop_instructions", "programs", "widest_load_bytes")


@dataclass(slots=True, frozen=True)
class Limits:
    """The resources of one multiprocessor, and the shared memory that one program may take of them. Source: NVIDIA, "CUDA C++
    Programming Guide", technical specifications by compute capability."""

    shared_bytes: int
    program_shared_bytes: int
    warps: int
    programs: int


LIMITS = {
    80: Limits(164 << 10, 163 << 10, 64, 32),
    89: Limits(100 << 10, 99 << 10, 48, 24),
    90: Limits(228 << 10, 227 << 10, 64, 32),
    100: Limits(228 << 10, 227 << 10, 64, 32),
}


def programs(line: dict[str, Any], limits: Limits) -> int:
    """Returns how many programs of a kernel one multiprocessor holds at once."""
    of_warp = -(-line["registers"] * 32 // GRANULE) * GRANULE
    by_registers = REGISTERS // (of_warp * line["warps"])
    by_memory = limits.shared_bytes // (line["shared_bytes"] + SYSTEM_BYTES)
    return min(by_registers, by_memory, limits.warps // line["warps"], limits.programs)


def compiled(capability: int) -> list[dict[str, Any]]:
    """Compiles all kernels for a capability. Raises SystemExit with the compiler's message."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {
            "TRITON_CACHE_DIR": folder
        }
        command = [sys.executable, "-m", "tests.engine.kernels.compile_for_hopper", str(capability)]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"capability {capability}: {done.stderr[-4000:]}")
    return [json.loads(text) for text in done.stdout.splitlines()]


def measured(capability: int) -> list[dict[str, Any]]:
    """Returns a line for each compiled kernel. variant: its number among those of the same name, in the order of their launches."""
    seen: Counter[str] = Counter()
    lines = []
    for line in compiled(capability):
        seen[line["kernel"]] += 1
        count = programs(line, LIMITS[capability])
        lines.append(
            {
                "capability": capability,
                "variant": seen[line["kernel"]],
                **line,
                "programs": count,
                "warps_held": count * line["warps"],
                "copies_in_flight_bytes": count * line["shared_bytes"] if line["async_copies_of_16_bytes"] else 0,
            }
        )
    return lines


def key_of(line: dict[str, Any]) -> tuple[int, str, int]:
    return line["capability"], line["kernel"], line["variant"]


def faults(lines: Iterable[dict[str, Any]], before: Iterable[dict[str, Any]]) -> list[str]:
    """Returns what is worse than in an earlier run, or impossible, in words."""
    old = {key_of(line): line["stack_bytes"] for line in before}
    found = []
    for line in lines:
        where = f"{line['kernel']} ({line['variant']}) for {line['capability']}"
        if line["stack_bytes"] > old.get(key_of(line), 0) and line["kernel"] not in SPILLS:
            found.append(f"{where} spills: {line['stack_bytes']} bytes of stack, before {old.get(key_of(line), 0)}")
        if line["shared_bytes"] > LIMITS[line["capability"]].program_shared_bytes:
            found.append(f"{where} takes {line['shared_bytes']} bytes of shared memory, more than there are")
    return found


def changes(lines: Iterable[dict[str, Any]], before: Iterable[dict[str, Any]]) -> list[str]:
    """Returns what differs from an earlier run, in words."""
    old = {key_of(line): line for line in before}
    told = []
    for line in lines:
        was = old.get(key_of(line))
        name = f"{line['capability'] / 10:.1f} {line['kernel']} ({line['variant']})"
        if was is None:
            told.append(f"{name}: new")
            continue
        differing = [f"{key} {was[key]} -> {line[key]}" for key in COMPARED if was.get(key) != line[key]]
        told += [f"{name}: {', '.join(differing)}"] if differing else []
    return told


def table(lines: Iterable[dict[str, Any]]) -> str:
    header = ("CAP", "KERNEL", "REGS", "STACK", "SHARED", "PROGRAMS", "WARPS", "LOAD", "COPIES", "MATRIX", "CODE", "LOOP")
    rows = [
        (
            f"{line['capability'] / 10:.1f}",
            f"{line['kernel'].strip('_').removesuffix('_kernel')} {line['variant']}{' fp8' if line['fp8'] else ''}",
            str(line["registers"]),
            str(line["stack_bytes"]),
            f"{line['shared_bytes'] / 1024:.1f}K",
            str(line["programs"]),
            str(line["warps_held"]),
            f"{line['widest_load_bytes']} B",
            f"{line['copies_in_flight_bytes'] // 1024}K" if line["copies_in_flight_bytes"] else "-",
            next((name for name in ("tcgen05", "wgmma", "mma") if line[name]), "-"),
            str(line["instructions"]),
            str(line["loop_instructions"] or "-"),
        )
        for line in lines
    ]
    widths = [max(len(row[at]) for row in (header, *rows)) for at in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--capability", type=int, action="append", choices=sorted(LIMITS), default=None)
    parser.add_argument(
        "--against", metavar="FILE", default="", help="an earlier result (default: the newest of benchmarks/results)"
    )
    parser.add_argument("--out", metavar="FILE", default="", help="also write the lines there")
    options = parser.parse_args()
    lines = [line for capability in options.capability or sorted(LIMITS) for line in measured(capability)]
    text = "\n".join(map(json.dumps, lines))
    print(f"{text}\n\n{table(lines)}")
    newest = sorted(RESULTS.glob("*-machine-code.jsonl"))
    against = Path(options.against) if options.against else newest[-1] if newest else None
    before = [json.loads(line) for line in against.read_text().splitlines()] if against is not None else []
    if against is not None:
        told = changes(lines, before)
        print(f"\nagainst {against.name}: {'nothing changed' if not told else ''}", *told, sep="\n")
    if options.out:
        Path(options.out).write_text(text + "\n")
    found = faults(lines, before)
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
