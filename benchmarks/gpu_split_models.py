"""Models of drawn weights for the part `split`, whole and in shares, and the steps that the ranks run with them (gpu_ranks.py)."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_limits import CACHE_DIR
from benchmarks.gpu_pipeline import pipelined
from benchmarks.gpu_ranks import Rank
from benchmarks.gpu_shapes import BLOCK_TOKENS, CONFIGS, LLAMA, SPARE_BLOCKS, Bench, random_weights, shape_of
from benchmarks.gpu_split_exchanges import behind_lost, wait
from benchmarks.plain_memory import PlainRange
from engine.cuda.backend import MAX_GRAPH_ROWS
from engine.cuda.collectives import Collectives
from engine.cuda.model import CudaModel
from engine.cuda.nccl import nccl
from engine.cuda.ops import CudaOps
from engine.cuda.ranks import DeviceRanks
from engine.cuda.share import CudaShare, ShareLinks
from engine.protocol import LoadModel
from loader.configs.hf_config import parse_config
from loader.shapes import kv_layout
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes import layout
from loader.sizes.slices import split
from scheduler.batch.plan import BatchPlan

LENGTH, NUM_ROWS = 64, 4
DRAWN: dict[str, dict[str, Any]] = {
    "llama": {},
    "mixture": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 6, "num_experts_per_tok": 2},
}
WARM_UP = 4  # steps


def drawn_shape(name: str) -> ModelShape:
    return parse_config(json.dumps(LLAMA | CONFIGS["tiny"] | DRAWN[name] | {"torch_dtype": "float32"}).encode())


def drawn_weights(shape: ModelShape, device: str) -> PlainRange:
    """Returns weights in float32 that depend on their names alone, so that shares have parts of the whole model's. They are so
    large that logits are some units."""
    weights = PlainRange(layout.weights_bytes(shape, "float32"), device)
    for slot in layout.weight_layout(shape, "float32"):
        generator = torch.Generator().manual_seed(zlib.crc32(slot.name.encode()))
        drawn = torch.randn(slot.stored_shape, generator=generator) * 0.2
        if "norm" in slot.name:
            drawn = torch.rand(slot.stored_shape, generator=generator) + 0.5
        if (cut := slot.cut) is not None:
            drawn = torch.cat([drawn.narrow(cut.axis, begin, end - begin) for begin, end in cut.ranges], cut.axis)
        weights.tensor(slot.offset_bytes, slot.shape, torch.float32).copy_(drawn)
    return weights


class SplitBench(Bench):
    """A share of a model with a table of sequences to step it with, the same on all ranks; the whole model if `links` is None."""

    def __init__(
        self,
        shape: ModelShape,
        weights: PlainRange,
        device: str,
        dtype: str,
        links: ShareLinks | None,
        num_rows: int,
        length: int,
        max_graph_rows: int,
    ) -> None:
        self.device, self.dtype, self.shape, self.weights = device, dtype, shape, weights
        self.num_blocks = num_rows * -(-length // BLOCK_TOKENS) + SPARE_BLOCKS
        num_bytes = self.num_blocks * kv_layout.block_bytes(shape, dtype, BLOCK_TOKENS)
        kv_memory = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=device)  # NaN in every dtype
        spec = LoadModel(1, "split", "", dtype, "", 0, 0, 0, length, num_rows, [])
        parts = (CudaOps(CACHE_DIR), spec, shape, cast(Any, weights), kv_memory, BLOCK_TOKENS)
        self.model = CudaModel(*parts) if links is None else CudaShare(*parts, links, max_graph_rows)
        self.table = self.new_table(num_rows, length)
        self.table.num_tokens[:] = length


def step(*rows: tuple[int, int, int], samples: tuple[bool, ...] = ()) -> BatchPlan:
    """Returns a step of rows (slot, tokens computed before, new tokens)."""
    columns = np.array(rows, np.int32)
    kept = np.array(samples or (True,) * len(rows), np.bool_)
    return BatchPlan(0, "split", columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy(), kept)


def steps() -> Iterator[BatchPlan]:
    """Yields prompts, a piece of a prompt beside rows that decode, and decode steps: of three rows, which are padded and have a
    graph from the second one on."""
    yield step((0, 0, 1), (1, 0, 12), (2, 0, 5), samples=(True, True, False))
    yield step((1, 12, 1), (2, 5, 9))
    for number in range(4):
        yield step((0, 1 + number, 1), (1, 13 + number, 1), (2, 14 + number, 1))


def logits(bench: SplitBench, own: Rank | None = None) -> list[Any]:
    """Returns the logits of steps(), and of each token of a prompt; of a stage without a head none. own: the rank, if it is a stage
    of a pipeline."""
    found, prompt = list[Any](), step((3, 0, 9))
    for number, one in enumerate((*steps(), prompt)):
        if own is not None:
            own.await_turn(number)
        if own is not None and own.rank:
            assert isinstance(bench.model, CudaShare)
            bench.model.follow(one, bench.table)
            continue
        found.append(bench.model.logits(one, bench.table, every_token=one is prompt))
        if own is not None:
            own.ended[0] += 1
    return found


def whole_logits(own: Rank, name: str) -> list[Any]:
    shape = drawn_shape(name)
    return logits(SplitBench(shape, drawn_weights(shape, own.device), own.device, "float32", None, NUM_ROWS, LENGTH, 0))


def share_logits(own: Rank, name: str, expert_parts: int, max_graph_rows: int) -> tuple[list[Any], int]:
    """Returns the logits of a share, and how many graphs it has captured. give_up releases it."""
    shape = split(drawn_shape(name), own.rank, Division(own.size, expert_parts))
    return _of_share(own, shape, ShareLinks(own.connected(), None, own.broken), max_graph_rows)


def stage_logits(own: Rank, name: str, max_graph_rows: int) -> tuple[list[Any], int]:
    """Returns what share_logits does, of a stage of a pipeline whose stages are the ranks; logits on rank 0, the last stage."""
    shape = _stage_of(drawn_shape(name), own)
    return _of_share(own, shape, own.linked(shape, "float32"), max_graph_rows, own)


def _stage_of(shape: ModelShape, own: Rank) -> ModelShape:
    return split(shape, own.rank, Division(own.size, num_stages=own.size))


def _of_share(
    own: Rank, shape: ModelShape, links: ShareLinks, max_graph_rows: int, stage: Rank | None = None
) -> tuple[list[Any], int]:
    bench = _share_bench(own, shape, links, max_graph_rows)
    return logits(bench, stage), len(bench.model.graphs.captured)


def _share_bench(own: Rank, shape: ModelShape, links: ShareLinks, max_graph_rows: int) -> SplitBench:
    """Returns a share of a drawn model. give_up releases it."""
    bench = SplitBench(shape, drawn_weights(shape, own.device), own.device, "float32", links, NUM_ROWS, LENGTH, max_graph_rows)
    own.to_end.insert(0, bench.model.release)  # graphs end before their connection
    return bench


def wait_for_lost_stage(own: Rank, max_graph_rows: int) -> tuple[float, bool]:
    """Runs two steps with a pipeline of two stages, and then one on rank 0, the last stage, alone: the other stage never sends its
    states. Returns what wait_for_lost does. give_up releases the stage."""
    shape = _stage_of(drawn_shape("llama"), own)
    bench = _share_bench(own, shape, own.linked(shape, "float32"), max_graph_rows)
    model, table = bench.model, bench.table
    assert isinstance(model, CudaShare)
    while model.num_uncaptured:
        model.capture_next()
    *plans, last = (step((0, number, 1), (1, number, 1)) for number in range(3))
    for number, plan in enumerate(plans):
        own.await_turn(number)
        if own.rank:
            model.follow(plan, table)
        else:
            model.execute(plan, table)
            own.ended[0] += 1
    return (0.0, True) if own.rank else behind_lost(own, lambda: model.execute(last, table))


class Mirrored:
    """An engine.cuda.collectives.Collectives of two ranks of which the other one does not exist: of one GPU, through NCCL. What the
    other rank would add to a sum is 0, and what it would add to a gather is this rank's part again. alone: a communicator of one
    rank."""

    def __init__(self, alone: Collectives) -> None:
        self._alone = alone

    def join(self, agreed: Callable[[bool], bool]) -> None:
        """Does nothing, because there is nobody to join."""

    def sum(self, x: Tensor) -> None:
        self._alone.sum(x)

    def share_first(self, x: Tensor) -> None:
        self._alone.share_first(x)

    def gather(self, part: Tensor, out: Tensor) -> None:
        for each in out:
            self._alone.gather(part, each[None])

    def abort(self) -> None:
        self._alone.abort()

    def release(self) -> None:
        self._alone.release()


def mirrored_logits(own: Rank, name: str, max_graph_rows: int) -> tuple[list[Any], int]:
    """Returns what share_logits does, of a share whose other rank is a Mirrored's: graphs with NCCL's calls on one GPU."""
    ranks = DeviceRanks(Mirrored(nccl().connect(nccl().new_id(), 0, 1)), 0, 2, own.broken)
    links = ShareLinks(ranks, None, own.broken)
    return _of_share(own, split(drawn_shape(name), 0, Division(2)), links, max_graph_rows)


def decode_share(own: Rank, name: str, context: int, num_steps: int, max_graph_rows: int, staged: bool = False) -> dict[str, Any]:
    """Decodes one row with a share, each step after the last one was read, as engines run split models. Returns the means of a
    step. give_up releases the share. staged: the ranks are stages of a pipeline; as many rows as there are stages decode in turn,
    each in steps of its own, so that all stages have one under way."""
    dtype, num_rows = "bfloat16" if own.device == "cuda" else "float32", own.size if staged else 1
    shape = _stage_of(shape_of(name), own) if staged else split(shape_of(name), own.rank, Division(own.size))
    weights = random_weights(shape, dtype, own.device)
    links = own.linked(shape, dtype) if staged else ShareLinks(own.connected(), None, own.broken)
    bench = SplitBench(shape, weights, own.device, dtype, links, num_rows, context + WARM_UP + num_steps, max_graph_rows)
    assert isinstance(bench.model, CudaShare)
    own.to_end.insert(0, bench.model.release)
    if own.device == "cuda":  # interpreted, it takes long and brings nothing
        bench.model.warm()
    while bench.model.num_uncaptured:
        bench.model.capture_next()
    began_s = device_s = 0.0
    for number in range(WARM_UP + num_steps):
        if staged:
            own.await_turn(number)
        plan = step((number % num_rows, context + number // num_rows, 1))
        if own.rank:
            bench.model.follow(plan, bench.table)
            continue
        if number == WARM_UP:
            began_s, device_s = time.perf_counter(), 0.0
        device_s += bench.model.execute(plan, bench.table).seconds
        own.ended[0] += 1
    wall_s, graphs = time.perf_counter() - began_s, list(bench.model.graphs.captured.values())
    wait(own.device)
    return {
        "ms": round(wall_s / num_steps * 1e3, 3),
        "device_ms": round(device_s / num_steps * 1e3, 3),
        "weights_gib": round(weights.num_bytes / 2**30, 2),
        "capture_ms": round(graphs[0].capture_s * 1e3, 1) if graphs else None,
    }


def decode_whole(name: str, device: str, context: int, num_steps: int) -> float:
    """Decodes one row with the whole model on one device, the next step launched before the last one is read, as engines do.
    Returns the milliseconds of a step."""
    bench = Bench(name, device, 1, context + WARM_UP + num_steps, MAX_GRAPH_ROWS if device == "cuda" else 0)
    while bench.model.num_uncaptured:
        bench.model.capture_next()

    def plan(number: int) -> BatchPlan:
        return bench.plan(1, context + number, 1, known=False)

    pipelined(bench, plan, WARM_UP)
    return round(pipelined(bench, plan, num_steps).wall * 1e3, 3)


def decode_whole_on(own: Rank, name: str, context: int, num_steps: int) -> float:
    return decode_whole(name, own.device, context, num_steps)
