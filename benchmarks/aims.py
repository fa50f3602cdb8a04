"""Compares the project's aims with each machine's newest run, in the first table of docs/performance.md, and those of models over
several devices with their newest result files, in the second one. usage: python -m benchmarks.aims prints both."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.server import ROOT

Line = dict[str, Any]
RESULTS = ROOT / "benchmarks" / "results"


@dataclass(frozen=True, slots=True)
class Aim:
    """value: the key of a line that is held to `least` or `most`, bounds of the values in their order (one: of all). wanted: what a
    line says of itself. beside: a key that is shown with the value, and what it is."""

    what: str
    benchmark: str
    value: str
    wanted: Line
    least: tuple[float, ...] = ()
    most: tuple[float, ...] = ()
    beside: tuple[str, str] = ("", "")

    def aim(self) -> str:
        if self.most == (0,):
            return "0"
        bounds = [("≥", self.least), ("≤", self.most)]
        return ", ".join(f"{sign} {' / '.join(f'{one:g}' for one in values)}" for sign, values in bounds if values)

    def of(self, lines: Iterable[Line]) -> str:
        """Values of all lines that are meant, ✗ beside those out of bounds; "-" if there is none."""
        found = [line for line in lines if line.get("benchmark") == self.benchmark and self._meant(line)]
        return " / ".join(self._shown(line, at) for at, line in enumerate(found)) or "-"

    def _meant(self, line: Line) -> bool:
        return all(
            key in line and line[key] in (value if isinstance(value, tuple) else (value,)) for key, value in self.wanted.items()
        )

    def _shown(self, line: Line, at: int) -> str:
        value = line[self.value]
        missed = any(value < one for one in _bound(self.least, at)) or any(value > one for one in _bound(self.most, at))
        key, unit = self.beside
        return f"{value}{f' ({line[key]:g} {unit})' if key else ''}{' ✗' if missed else ''}"


def _bound(values: tuple[float, ...], at: int) -> tuple[float, ...]:
    """Returns the bound of the value at that place, as a tuple of one number; () if there is none."""
    return values[:1] if len(values) == 1 else values[at : at + 1]


AIMS = (
    Aim("tokens/s over llama.cpp's server, mid, 1 / 8 / 32 streams", "cpu", "ours_over_it",
        {"model": "mid", "peer": "llama-server", "streams": (1, 8, 32)}, least=(0.8, 1.1, 1.3)),
    Aim("the same, one-b, 8 streams", "cpu", "ours_over_it",
        {"model": "one-b", "peer": "llama-server", "streams": 8}, least=(1.2,)),
    Aim("one-b, one stream: weights read a second, over the bandwidth of the one-row kernel", "cpu", "share_of_bandwidth",
        {"model": "one-b", "peer": "hearthd", "streams": 1}, least=(0.8,)),
    Aim("one-b, a prompt of 128 tokens: rate of its products' operations over that of `F.linear` at 128 rows", "roofline",
        "bound_share", {"model": "one-b", "kind": "prefill", "size": 128}, least=(0.75,)),
    Aim("attention to 4,096 positions, 1 / 8 / 32 rows of mid: time over reading keys and values as the one-row kernel reads",
        "kernels", "of_reading", {"model": "mid", "kind": "attention"}, most=(1.5,)),
    Aim("the same, one-b", "kernels", "of_reading", {"model": "one-b", "kind": "attention"}, most=(1.5,)),
    Aim("one-b not loaded, its file in the page cache, memory prepared: request to first token, s", "cpu",
        "first_token_prepared_memory_s", {"model": "one-b", "kind": "swap-in"}, most=(0.6,)),
    Aim("a step of 32 rows of mid: all but products and attention, %, greedy / sampled", "roofline",
        "all_but_products_and_attention_percent", {"model": "mid", "kind": ("decode", "sampled"), "size": 32}, most=(10,)),
    Aim("8 streams beside a prompt of 2,000 tokens: p99 gap over the undisturbed p50", "latency", "p99_over_quiet_p50",
        {"kind": "prompt"}, most=(3,)),
    Aim("three busy models: p99 gap over 1.3 × (own step + two turns), a stream each / two flooded", "latency", "p99_over_bar",
        {"kind": "models"}, most=(1,)),
    Aim("CPU µs a token, whole tree, feather, 64 / 200 streams", "serve", "cpu_us_per_out_token",
        {"kind": "feather", "streams": (64, 200)}, most=(85,)),
    Aim("of these, serving", "serve", "serving_cpu_us", {"kind": "feather", "streams": (64, 200)}, most=(20,)),
    Aim("CPU µs a token without a model, 64 / 200 streams", "serve", "cpu_us_per_out_token",
        {"kind": "null", "streams": (64, 200)}, most=(15,)),
    Aim("longest hold of the event loop, ms", "stall", "stall_max_ms", {}, most=(5,)),
    Aim("engine killed under streams: requests lost", "crash", "failed", {}, most=(0,), beside=("running_when_killed", "running")),
    Aim("the same, three models in host memory", "crash_host_tier", "failed", {}, most=(0,),
        beside=("running_when_killed", "running")),
    Aim("there: bytes that loads read", "crash_host_tier", "bytes_read_by_loads", {}, most=(0,)),
    Aim("cold load, memory prepared, over a raw read of the drive into as much memory", "loading", "ratio",
        {"kind": "cold", "read by": "ours, memory prepared"}, least=(0.9,)),
    Aim("its CPU seconds a GB", "loading", "cpu_s_per_gb", {"kind": "cold", "read by": "ours, memory prepared"}, most=(0.05,)),
    Aim("load from the page cache, memory prepared, over buffered reads with as many threads", "loading", "ratio",
        {"kind": "warm", "read by": "ours, memory prepared"}, least=(0.8,), beside=("gb_per_s", "GB/s")),
    Aim("cold request, 16 tokens, to first token: over 1.15 × raw read + 0.3 s", "first_token", "of_raw_bar",
        {"prompt_tokens": 16}, most=(1,)),
    Aim("cold request, 256 tokens: saved of the shorter of load and prefill", "first_token", "saved_of_shorter",
        {"prompt_tokens": 256}, least=(0.6,)),
    Aim("back to an evicted conversation of 1,000 tokens: first token over what copying its bytes allows", "returning",
        "ratio_to_bar", {}, most=(1,)),
    Aim("eight models with memory for three, a bursty trace: measured over predicted mean wait", "cohost",
        "measured_over_predicted", {}, least=(0.8,), most=(1.25,), beside=("minutes", "min")),
    Aim("there: requests failed", "cohost", "failed", {}, most=(0,)),
)  # fmt: skip


# aims of models over several devices, each with the result files that may show it: `make bench` does not measure them
SPLIT_AIMS = (
    ("*-ranks*.jsonl", Aim("a sum of 8 KiB of two ranks, one of which sleeps, µs", "ranks sums", "us_p50",
        {"way": "shared memory", "state": "from sleep"}, most=(40,))),
    ("*-ranks*.jsonl", Aim("the plan of a step of 16 rows, until a follower that spins has it, µs", "ranks plans", "us_p50",
        {"state": "spinning"}, most=(10,))),
    ("*-crash-ranks.jsonl", Aim("engine killed under streams, a third of them of a split model: requests lost", "crash_ranks",
        "failed", {}, most=(0,), beside=("running_when_killed", "running"))),
    ("*-shared-reads.jsonl", Aim("ranks read shares of matrices, of layers, plain files: from the drive, of the files' bytes",
        "loading shares", "drive", {"kind": ("tensor", "pipeline"), "files": "plain"}, most=(1.01,), beside=("ranks", "ranks"))),
    ("*-shared-reads.jsonl", Aim("there: time over a raw read's", "loading shares", "ratio",
        {"kind": ("tensor", "pipeline"), "files": "plain"}, most=(1.1,), beside=("ranks", "ranks"))),
    ("*-cohost-split.jsonl", Aim("eight models, two of them over both devices: measured over predicted mean wait", "cohost",
        "measured_over_predicted", {}, least=(0.8,), most=(1.25,), beside=("minutes", "min"))),
    ("*-cohost-split.jsonl", Aim("there: requests failed", "cohost", "failed", {}, most=(0,))),
)  # fmt: skip


def split_table() -> str:
    """Returns the table of SPLIT_AIMS. Of the files that an aim names the newest one counts that has such a line."""
    rows = [["", "aim", "measured", "file"], ["---"] * 4]
    for pattern, aim in SPLIT_AIMS:
        shown = ((aim.of(_lines_with_parts(file)), file.name) for file in sorted(RESULTS.glob(pattern), reverse=True))
        value, name = next((one for one in shown if one[0] != "-"), ("-", "-"))
        rows.append([aim.what, aim.aim(), value, f"`{name}`"])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _lines_with_parts(file: Path) -> Iterator[Line]:
    """Yields the lines of a result file, and for each row of a line's table NAME one of the benchmark "BENCHMARK NAME"."""
    for text in file.read_text().splitlines():
        line = json.loads(text)
        yield line
        for name, rows in line.items():
            if isinstance(rows, list):
                yield from ({"benchmark": f"{line['benchmark']} {name}"} | row for row in rows if isinstance(row, dict))


def results() -> list[list[Line]]:
    """Returns the lines of the newest result file of each kind of machine, the newest kind first."""
    newest: dict[str, list[Line]] = {}
    for file in sorted(RESULTS.glob("*-cpu.jsonl"), reverse=True):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        newest.setdefault(lines[0]["machine"], lines)
    return list(newest.values())


def table(runs: list[list[Line]]) -> str:
    heads = [f"{run[0]['machine']}, {run[0]['date']}" for run in runs]
    rows = [[aim.what, aim.aim(), *(aim.of(run) for run in runs)] for aim in AIMS]
    head = ["", "aim", *heads]
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


if __name__ == "__main__":
    print(f"{table(results())}\n\n{split_table()}")
