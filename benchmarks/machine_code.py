"""The machine code of every Triton kernel, compiled without a GPU for compute capabilities 8.0, 8.9, 9.0 and 10.0: registers, what
did not fit into them, shared memory, how many programs a multiprocessor holds at once, how wide loads are, how many bytes it has on
their way, how long the inner loop is and, of attention, how many instructions of it there are for a byte of KV. The last result is
compared with this one, and what changed is printed.

A kernel that takes more shared memory than the GPU has ends it with exit code 1, and so does one that is worse than in that result:
spills more, has fewer bytes on their way, narrower loads, or more instructions for a byte of KV. JSON lines, then a table.
usage: python -m benchmarks.machine_code [--capability 90]… [--against FILE] [--out FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPILLS = ("_cos_sin_kernel",)  # angles of any size are reduced on the stack
REGISTERS, GRANULE = 65536, 256  # of a multiprocessor; a warp's are given out in steps of so many
SYSTEM_BYTES = 1024  # of shared memory, that a program takes besides its own
SLACK = 0.02  # share by which a figure may be worse than before: another release of the assembler moves single instructions
COMPARED = ("registers", "stack_bytes", "shared_bytes", "instructions", "loop_instructions", "programs", "widest_load_bytes")
# What tells one form of a kernel from another, besides its number.
FORM = ("head_dim", "item_bytes", "fp8", "mxfp4", "int4", "int8", "nvfp4", "zeros")


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


def in_flight_bytes(line: dict[str, Any]) -> int:
    """Returns the bytes that a multiprocessor has on their way from memory at a time: those of the asynchronous copies of all the
    programs that it holds, or of one load of each of their threads."""
    return int(line["copies_in_flight_bytes"] or 32 * line["warps_held"] * line["widest_load_bytes"])


def instructions_per_kv_byte(line: dict[str, Any]) -> float | None:
    """Returns how many instructions the warps of a program issue for each byte of KV in the loop of an attention kernel; None for
    others, and for lines of results that do not tell the bytes."""
    kv_bytes = line.get("kv_bytes", 0)
    return round(line["loop_instructions"] * line["warps"] / kv_bytes, 4) if kv_bytes else None


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["capability"], line["kernel"], line["variant"], *(line.get(key) for key in FORM)


def faults(lines: Iterable[dict[str, Any]], before: Iterable[dict[str, Any]]) -> list[str]:
    """Returns what is worse than in an earlier run, or impossible, in words."""
    old = {key_of(line): line for line in before}
    found = []
    for line in lines:
        where = f"{line['kernel']} ({line['variant']}) for {line['capability']}"
        was = old.get(key_of(line))
        stack_bytes = 0 if was is None else was["stack_bytes"]
        if line["stack_bytes"] > stack_bytes and line["kernel"] not in SPILLS:
            found.append(f"{where} spills: {line['stack_bytes']} bytes of stack, before {stack_bytes}")
        if line["shared_bytes"] > LIMITS[line["capability"]].program_shared_bytes:
            found.append(f"{where} takes {line['shared_bytes']} bytes of shared memory, more than there are")
        if was is None:
            continue
        if in_flight_bytes(line) < in_flight_bytes(was) * (1 - SLACK):
            found.append(f"{where} has {in_flight_bytes(line)} bytes on their way, before {in_flight_bytes(was)}")
        if line["widest_load_bytes"] < was["widest_load_bytes"]:
            found.append(f"{where} loads {line['widest_load_bytes']} bytes at a time, before {was['widest_load_bytes']}")
        now, then = instructions_per_kv_byte(line), instructions_per_kv_byte(was)
        if now is not None and then is not None and now > then * (1 + SLACK):
            found.append(f"{where} has {now} instructions for a byte of KV, before {then}")
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
    header = (
        "CAP",
        "KERNEL",
        "REGS",
        "STACK",
        "SHARED",
        "PROGRAMS",
        "WARPS",
        "LOAD",
        "FLYING",
        "MATRIX",
        "CODE",
        "LOOP",
        "A KV BYTE",
    )
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
            f"{in_flight_bytes(line) // 1024}K",
            next((name for name in ("tcgen05", "wgmma", "mma") if line[name]), "-"),
            str(line["instructions"]),
            str(line["loop_instructions"] or "-"),
            str(instructions_per_kv_byte(line) or "-"),
        )
        for line in lines
    ]
    widths = [max(len(row[at]) for row in (header, *rows)) for at in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows))


def last_lines(files: Iterable[Path], capabilities: Collection[int]) -> dict[str, list[dict[str, Any]]]:
    """Returns the lines of these capabilities, by file: of each capability those of the first file that has some."""
    missing, found = set(capabilities), dict[str, list[dict[str, Any]]]()
    for file in files:
        lines = [line for line in map(json.loads, file.read_text().splitlines()) if line["capability"] in missing]
        if lines:
            found[file.name] = lines
            missing -= {line["capability"] for line in lines}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n", 1)[0])
    parser.add_argument("--capability", type=int, action="append", choices=sorted(LIMITS), default=None)
    whose = "an earlier result (default: of each capability the newest of benchmarks/results)"
    parser.add_argument("--against", metavar="FILE", default="", help=whose)
    parser.add_argument("--out", metavar="FILE", default="", help="also write the lines there, a capability at a time")
    options = parser.parse_args()
    capabilities, lines = options.capability or sorted(LIMITS), list[dict[str, Any]]()
    files = [Path(options.against)] if options.against else sorted(RESULTS.glob("*-machine-code.jsonl"), reverse=True)
    earlier = last_lines(files, capabilities)
    for capability in capabilities:
        lines += measured(capability)
        text = "\n".join(map(json.dumps, lines))
        if options.out:
            Path(options.out).write_text(text + "\n")
    print(f"{text}\n\n{table(lines)}")
    for name, before in earlier.items():
        compared = {line["capability"] for line in before}
        told = changes((line for line in lines if line["capability"] in compared), before)
        print(f"\nagainst {name}: {'nothing changed' if not told else ''}", *told, sep="\n")
    found = faults(lines, itertools.chain.from_iterable(earlier.values()))
    print(*found, sep="\n", end="\n" if found else "", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
