"""The aims to which `make gpu` compares its figures. Aims are of an H100 or H200.

usage: python -m benchmarks.gpu_aims: prints the table that is in docs/gpu.md."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from benchmarks.aims import Aim

Line = dict[str, Any]
MISSED, NOT_THERE = "✗", "-"


@dataclass(frozen=True, slots=True)
class PartsAim:
    """An aim for lines of one part."""

    part: str
    aim: Aim


def _aim(
    part: str,
    what: str,
    benchmark: str,
    value: str,
    wanted: Line,
    least: tuple[float, ...] = (),
    most: tuple[float, ...] = (),
) -> PartsAim:
    return PartsAim(part, Aim(what, benchmark, value, wanted, least, most))


AIMS = (
    _aim("tests", "tests that failed", "gpu_tests", "failed", {"what": "outcomes"}, most=(0,)),
    _aim("tests", "tests that passed", "gpu_tests", "passed", {"what": "outcomes"}, least=(1,)),
    _aim("soak", "greedy texts that changed while other models loaded for the first time", "gpu_soak", "differing",
         {"what": "texts"}, most=(0,)),
    _aim("sanitizer", "errors found by memcheck / racecheck", "gpu_sanitizer", "errors", {"what": "total"}, most=(0,)),
    _aim("forward", "8B, a decode step of 1 / 64 / 128 rows: its floor (weights and KV at the bandwidth of a sum) over the step",
         "gpu_forward", "of_floor", {"what": "decode", "model": "8b", "rows": (1, 64, 128), "context": 1024},
         least=(0.8, 0.82, 0.82)),
    _aim("forward", "8B, 128 rows: launching a step, µs of the host", "gpu_forward", "launch_host_us",
         {"what": "decode", "model": "8b", "rows": 128}, most=(350,)),
    _aim("forward", "8B, capturing a graph, ms, 1 / 64 / 8 / 128 / 256 rows", "gpu_forward", "capture_ms",
         {"what": "decode", "model": "8b", "context": 1024, "graph": True}, most=(30,)),
    _aim("forward", "the graphs' pool over what torch may keep for it", "gpu_forward", "pool_of_kept",
         {"what": "work_space", "model": "8b"}, most=(1,)),
    _aim("forward", "8B, a prompt of 2,048 / 4,096 / 8,192 tokens: its operations over the matrix rate", "gpu_forward", "of_gemm",
         {"what": "prefill", "model": "8b"}, least=(0.75,)),
    _aim("forward", "8B, weights back from page-locked memory, over the bus", "gpu_forward", "of_bus",
         {"what": "reload", "model": "8b"}, least=(0.9,)),
    _aim("forward", "captures after that", "gpu_forward", "captures_after", {"what": "reload", "model": "8b"}, most=(0,)),
    _aim("forward", "8B, memory that steps took over what is kept for them", "gpu_forward", "of_kept",
         {"what": "work_space", "model": "8b"}, most=(1,)),
    _aim("mixed", "64 rows and a piece of a prompt of 64 / 256 / 512 tokens, 8B: the host's time to launch over the step's",
         "gpu_mixed", "host_share", {"model": "8b"}, most=(0.8,)),
    _aim("mixed", "the same, 1B", "gpu_mixed", "host_share", {"model": "1b"}, most=(0.8,)),
    _aim("mixed", "the step over the time in which the device executes something, 8B", "gpu_mixed", "over_device",
         {"model": "8b"}, most=(1.15,)),
    _aim("mixed", "the same, 1B", "gpu_mixed", "over_device", {"model": "1b"}, most=(1.15,)),
    _aim("mixed", "the step over launching each kernel, 8B", "gpu_mixed", "over_eager", {"model": "8b"}, most=(1.05,)),
    _aim("mixed", "the same, 1B", "gpu_mixed", "over_eager", {"model": "1b"}, most=(1.05,)),
    _aim("mixed", "8B, capturing a graph of such steps, ms", "gpu_mixed", "capture_ms", {"what": "graph", "model": "8b"},
         most=(30,)),
    _aim("mixed", "a graph, 8B / 1B: MiB that the driver takes", "gpu_mixed", "driver_mib_a_graph", {"what": "graphs"}, most=(2,)),
    _aim("adapters", "8B, 32 rows of 32 adapters of rank 16 / of one adapter: the rate over that of the base", "gpu_adapters",
         "of_base", {"what": "step", "case": "32 rows", "adapters": (32, 1)}, least=(0.7,)),
    _aim("adapters", "a row of one adapter", "gpu_adapters", "of_base", {"what": "step", "case": "1 row"}, least=(0.7,)),
    _aim("adapters", "a prompt of 512 / 2,048 tokens of one adapter", "gpu_adapters", "of_base",
         {"what": "step", "case": ("prompt of 512", "prompt of 2048")}, least=(0.8,)),
    _aim("forward-1b", "1B, a decode step of 1 / 64 rows over its floor", "gpu_forward", "of_floor",
         {"what": "decode", "model": "1b", "rows": (1, 64), "context": 1024}, least=(0.6,)),
    _aim("sampling", "1B, 64 rows: a step over the greedy one: temperature / top_p / top_k 20, 1,000 with top_p / min_p",
         "gpu_sampling", "over_greedy",
         {"settings": ("temperature", "top_p", "top_k, top_p", "top_k 1000, top_p", "min_p"), "rows": 64}, most=(1.15,)),
    _aim("kernels", "decode attention, 64 rows of 4,096 tokens, as cut in steps, over the bandwidth of a sum: heads of 128 / of 64",
         "gpu_kernels", "served_of_limit",
         {"kernel": "decode attention", "case": ("64 x 4096, 32/8 heads of 128", "64 x 4096, 32/8 heads of 64")}, least=(0.8,)),
    _aim("server", "loads whose weights came from where they should", "gpu_server", "as_asked", {"what": "load_from_host_memory"},
         least=(1,)),
    _aim("server", "8B, a cold load with compiled kernels / once more: its rate over that of a raw read of the same run",
         "gpu_server", "of_raw", {"what": ("cold_load", "cold_load_again")}, least=(0.9,)),
    _aim("server", "200 streams: CPU µs a token, whole tree", "gpu_server", "cpu_us_per_out_token",
         {"what": "streams", "confined": "no"}, most=(15,)),
    _aim("server", "requests that failed", "gpu_server", "failed", {"what": "streams", "confined": "no"}, most=(0,)),
    _aim("server", "default budget: GiB of the device left free", "gpu_server", "free_gib", {"what": "device"}, least=(0.1,)),
    _aim("cohost", "three models where two have room: requests that failed", "gpu_server", "failed", {"what": "cohost"}, most=(0,)),
    _aim("cohost", "texts that changed by swaps", "gpu_server", "differing", {"what": "texts"}, most=(0,)),
    _aim("evictions", "a neighbour's longest gap beside evictions to nothing / to host memory / loads from there, ms",
         "gpu_evictions", "longest_gap_ms", {"what": "gaps", "beside": ("evict", "evict to host", "load from host")}, most=(20,)),
    _aim("adoption", "engine killed: bytes read by the next one's load, twice with its weights", "gpu_adoption", "bytes_read",
         {"what": "engine killed", "adopted": True}, most=(0,)),
    _aim("adoption", "the same text then: adopted twice, loaded, without adoption", "gpu_adoption", "same_text",
         {"what": "engine killed"}, least=(1,)),
    _aim("adoption", "streams lost by a kill", "gpu_adoption", "failed", {"what": "streams over a kill"}, most=(0,)),
    _aim("memory", "swaps of 2 GiB in / out over the bus", "gpu_memory", "swap_in_of_bus", {"what": "swaps"}, least=(0.9,)),
    _aim("loading", "packed files decoded on the GPU over plain ones, from the drive", "gpu_loading", "packed_over_plain",
         {"what": "cold"}, least=(1,)),
    _aim("peer", "tokens/s over transformers' continuous batching", "gpu_throughput", "ours_over_it",
         {"what": "ours over transformers"}, least=(3,)),
    _aim("confined", "200 streams with half a core over the free run", "gpu_server", "of_free",
         {"what": "streams", "confined": "0.5 core, by control group"}, least=(0.95,)),
    _aim("split", "wrong results of exchanges, by the first / the second connection", "gpu_split", "wrong", {"what": "exchanges"},
         most=(0,)),
    _aim("split", "the same, of 100 replays of a graph", "gpu_split", "wrong_replays", {"what": "exchanges"}, most=(0,)),
    _aim("split", "memory that a connection takes over what is reckoned for it", "gpu_split", "of_reckoned",
         {"what": "exchanges"}, most=(1,)),
    _aim("split", "connections that could not be given up, after their graph / beside it", "gpu_split", "hung", {"what": "abort"},
         most=(0,)),
    _aim("split", "float32 logits of shares: largest difference to the whole model", "gpu_split", "difference",
         {"what": "logits"}, most=(2e-4,)),
    _aim("split", "float32 logits of a share alone: largest difference that its graphs make", "gpu_split", "difference",
         {"what": "graphs of a share alone"}, most=(2e-4,)),
    _aim("split", "float32 logits of pipelines: largest difference to the whole model", "gpu_split", "difference",
         {"what": "logits of a pipeline"}, most=(2e-4,)),
    _aim("split", "sums of 8 / 64 KiB through memory that two GPUs map from each other over NCCL's", "gpu_split", "of_plain",
         {"what": "small sum", "kib": (8, 64)}, most=(0.7, 0.9)),
    _aim("split", "a rank killed: seconds until the other one's stream goes on", "gpu_split", "goes_on_s", {"what": "rank killed"},
         most=(1,)),
    _aim("split", "a stage killed: the same", "gpu_split", "goes_on_s", {"what": "stage killed"}, most=(1,)),
    _aim("split", "8B on two GPUs, a row: its rate over that on one", "gpu_split", "faster", {"what": "decode", "model": "8b"},
         least=(1.3,)),
    _aim("split", "8B in two stages, two rows in turn: their rate over that of one row on one", "gpu_split", "faster",
         {"what": "decode in stages", "model": "8b"}, least=(1.5,)),
)  # fmt: skip


def table() -> str:
    """Returns all aims as Markdown."""
    return _table(["part", "figure", "aim"], ([one.part, one.aim.what, one.aim.aim()] for one in AIMS))


def _table(head: list[str], rows: Iterable[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [head, ["---"] * len(head), *rows])


def summary(parts: Collection[str], lines: Iterable[Line]) -> tuple[str, list[str], list[str]]:
    """Returns the table of the aims of these parts as Markdown, the aims that were missed, and those without a figure."""
    lines, rows = list(lines), list[list[str]]()
    missed, lacking = list[str](), list[str]()
    for one in AIMS:
        if one.part not in parts:
            continue
        found = one.aim.of(line for line in lines if line.get(one.aim.value) is not None)
        rows.append([one.part, one.aim.what, one.aim.aim(), found])
        if found == NOT_THERE:
            lacking.append(f"{one.part}: {one.aim.what}")
        elif MISSED in found:
            missed.append(f"{one.part}: {one.aim.what}: {found}, aim {one.aim.aim()}")
    return _table(["part", "figure", "aim", "measured"], rows), missed, lacking


if __name__ == "__main__":
    print(table())
