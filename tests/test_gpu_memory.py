"""What `make gpu` asks of a machine fits on it, whatever the part: on a card of 80 GB and on one of 141 GB."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks import (
    gpu_adapters,
    gpu_adoption,
    gpu_evictions,
    gpu_forward,
    gpu_kernels,
    gpu_limits,
    gpu_loading,
    gpu_memory,
    gpu_mixed,
    gpu_ncu,
    gpu_profile,
    gpu_sampling,
    gpu_server,
    gpu_shapes,
    gpu_soak,
    gpu_split,
    gpu_split_models,
    gpu_throughput,
    gpu_tiles,
)
from benchmarks.gpu import DISK_BYTES
from benchmarks.gpu_drives import SPARE_BYTES
from benchmarks.gpu_node import Node, checkpoints_bytes
from benchmarks.gpu_parts import COMMANDS, MOST_WORKERS, PARTS
from config.devices import CUDA_LEFT_BYTES
from engine.contracts.steps import StepResult
from engine.cuda import overlap_choice, overlap_trial
from engine.cuda.backend import MAX_GRAPH_ROWS, MAX_GRAPH_TOKENS
from engine.cuda.graph_room import MOST_GRAPHS
from engine.cuda.graphs import graph_rows
from engine.cuda.kept_models import MOST_KEPT_BYTES
from engine.cuda.kernels import entry, linear_choice, triton_decode, triton_extend, triton_inputs, triton_sampling, triton_unpack
from engine.cuda.mixed_steps import mixed_padding, mixed_sizes
from engine.cuda.model import CudaModel
from engine.cuda.work_space import KEPT_BYTES
from loader.packing import codec
from loader.sizes.gpu_sizing import (
    CUBLAS_BYTES,
    EDITED_ROWS,
    LIBRARY_BYTES,
    PACKED_BYTES,
    edited_graph_words,
    gpu_work_space_bytes,
    sampling_bytes,
)
from tests.counted_memory import CountedMemory

CARDS_GIB = (78, 139)  # usable, of 80 GB and of 141 GB
HOST_GIB, DISK_GIB = 128, 30
CONTEXT_BYTES = 1 << 30  # CUDA's context and libraries, outside of what torch counts
# Maps each part that starts a daemon to the node that the daemon serves.
NODES = {
    "server": gpu_server.SERVE,
    "confined": gpu_server.SERVE,
    "cohost": gpu_server.COHOST,
    "soak": gpu_soak.NODE,
    "evictions": gpu_evictions.NODE,
    "adoption": gpu_adoption.NODE,
}
# Parts that compute in their own process: what they run, with these arguments, and the largest model of it.
MAINS: dict[str, tuple[Callable[[], object], list[str], str]] = {
    "forward": (gpu_forward.main, [], "8b"),
    "forward-1b": (gpu_forward.main, ["--model", "1b"], "1b"),
    "mixed": (gpu_mixed.main, [], "8b"),
    "adapters": (gpu_adapters.main, [], "8b"),
    "sampling": (gpu_sampling.main, [], "1b"),
    "profile": (gpu_profile.main, [], "8b"),
    "throughput": (gpu_throughput.main, [], "8b"),
    "kernels": (gpu_kernels.main, [], "8b"),
    "tiles": (gpu_tiles.main, [], "8b"),
    "ncu": (gpu_ncu.main, ["--launches"], "8b"),
    # the rank that holds the whole model, after its share
    "split": (partial(gpu_split_models.decode_whole, "8b", "cuda", gpu_split.CONTEXT, gpu_split.NUM_STEPS), [], "8b"),
}
# The tests of a GPU have random shapes, and models of a few layers that are 64 wide. Their largest allocation is to be refused:
# tests/gpu/test_memory.py asks for KEPT_BYTES and 65 MiB.
TEST_BYTES = 1 << 30
# Maps each part that drives the device in a way that no meta tensor shows to what it takes there at most, in all its processes.
SMALL_BYTES = {
    "cache": CONTEXT_BYTES + TEST_BYTES,  # a norm of one row
    "tests": MOST_WORKERS * (CONTEXT_BYTES + TEST_BYTES),
    "sanitizer": CONTEXT_BYTES + 4 * TEST_BYTES,  # one shape at a time, and compute-sanitizer's own
    "memory": CONTEXT_BYTES + 4 * gpu_memory.RANGE_BYTES,  # a mapped range, two plain ones, and what torch keeps of those before
    "loading": CONTEXT_BYTES + gpu_loading.LAYERS * gpu_loading.LAYER_BYTES + TEST_BYTES,  # all files, plain and packed; frames
}


class Ended:
    """A step that has computed nothing."""

    def wait(self) -> StepResult:
        return StepResult(np.zeros(0, np.int32), np.zeros(0, np.bool_), 1e-3)


@pytest.fixture(params=CARDS_GIB, ids=lambda gib: f"{gib} GiB")
def card(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[CountedMemory]:
    """A card whose steps and kernels compute nothing and whose memory is counted. Its memory is request.param GiB."""
    total_bytes = request.param << 30
    memory = CountedMemory()
    cuda: dict[str, Callable[..., Any]] = {
        "mem_get_info": lambda *_: (total_bytes - CONTEXT_BYTES - memory.held_bytes(), total_bytes),
        "get_device_properties": lambda *_: SimpleNamespace(multi_processor_count=132, total_memory=total_bytes),
        "get_device_capability": lambda *_: (9, 0),
        "max_memory_allocated": lambda *_: memory.most_bytes,
        "max_memory_reserved": lambda *_: memory.most_bytes,
        "memory_snapshot": list,
        "reset_peak_memory_stats": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda *_: None,
    }
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    for name in ("warm", "launch"):
        monkeypatch.setattr(CudaModel, name, lambda *_: Ended())
    monkeypatch.setattr(CudaModel, "num_uncaptured", 0)
    monkeypatch.setattr(gpu_adapters, "capture_prompts", lambda *_: None)
    monkeypatch.setattr(gpu_profile, "profiled", lambda *_: None)
    monkeypatch.setattr(gpu_mixed, "busy_s", lambda *_: 1e-3)  # torch's profiler needs a device
    monkeypatch.setattr(gpu_forward, "swap", lambda *_: None)  # takes page-locked memory of the host, and none of the device
    for module in (gpu_limits, gpu_kernels):
        monkeypatch.setattr(module, "seconds_of", lambda *_, **__: 1e-3)
    monkeypatch.setattr(overlap_trial.Layers, "launch", lambda _: None)
    monkeypatch.setattr(overlap_choice, "have_right_results", lambda *_: True)
    monkeypatch.setattr(gpu_kernels, "captured", lambda _, launch: SimpleNamespace(replay=launch))
    monkeypatch.setattr(linear_choice, "times_s", lambda calls, _: {name: [1e-3] for name in calls})
    monkeypatch.setattr(gpu_throughput, "ours", _started(gpu_throughput))
    monkeypatch.setattr(entry, "split_contexts", lambda *_: None)
    monkeypatch.setattr(codec, "encode", lambda values: bytes(values[: len(values) // 2]))
    for module, kernel in (
        (triton_unpack, "unpack"),
        (triton_decode, "decode_attention"),
        (triton_extend, "extend_attention"),
        (triton_sampling, "sample"),
        (triton_inputs, "set_entries"),
    ):
        monkeypatch.setattr(module, kernel, lambda *_: None)
    with memory:
        yield memory


def _started(module: Any) -> Callable[..., dict[str, Any]]:
    """The throughput's model and its memory, without the requests."""

    def ours(name: str, device: str, requests: list[tuple[int, int]]) -> dict[str, Any]:
        module.bench_for(name, device, requests)
        return {}

    return ours


def rest_bytes(shape: str) -> int:
    """What steps and graphs take beside what is counted, and the context."""
    return gpu_work_space_bytes(gpu_shapes.shape_of(shape), "bfloat16", 8192, 256) + KEPT_BYTES + CONTEXT_BYTES


@pytest.mark.parametrize("part", MAINS)
def test_a_model_its_kv_and_copies_fit(card: CountedMemory, monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    main, arguments, shape = MAINS[part]
    assert PARTS[part].arguments[1:] == (*arguments,) or part in ("throughput", "ncu")
    monkeypatch.setattr(sys, "argv", ["part", *arguments])
    main()
    total_bytes = torch.cuda.mem_get_info()[1]
    assert card.most_bytes > 1 << 29, "nothing was counted"
    assert card.most_bytes + rest_bytes(shape) <= total_bytes, f"{card.most_bytes / 2**30:.1f} GiB of tensors at a time"


@pytest.mark.parametrize("card_gib", CARDS_GIB)
def test_each_part_is_counted_or_bounded(card_gib: int) -> None:
    """The part `peer` has one engine after the other, each in a process of its own: ours as in `throughput`, and transformers',
    which takes a share of what it finds free."""
    assert set(PARTS) == {*NODES, *MAINS, *SMALL_BYTES, "peer"}
    assert PARTS["peer"].arguments == ("benchmarks.gpu_throughput", "--engine", "both")
    assert max(SMALL_BYTES.values()) <= card_gib << 30
    assert TEST_BYTES >= KEPT_BYTES + (65 << 20)


@pytest.mark.parametrize("card_gib", CARDS_GIB)
@pytest.mark.parametrize("node", NODES.values(), ids=NODES)
def test_models_fit_on_their_node(node: Node, card_gib: int) -> None:
    default_bytes = (card_gib << 30) - CUDA_LEFT_BYTES
    assert node.budget_bytes <= default_bytes
    assert node.device_bytes() <= (node.budget_bytes or default_bytes)
    assert node.host_tier_bytes <= HOST_GIB * 3 // 4 << 30
    assert node.disk_bytes() + (4 << 30) <= DISK_GIB << 30
    if node.num_resident < len(node.models):
        assert replace(node, num_resident=node.num_resident + 1).device_bytes() > node.budget_bytes, "nobody has to leave"


@pytest.mark.parametrize("command", COMMANDS)
def test_checkpoints_that_the_parts_of_a_command_share_fit_on_the_disk(command: str) -> None:
    """So that none has to be deleted and made again. The part `loading` makes one of its own."""
    parts = {part.name for part in COMMANDS[command]}
    shared: Counter[str] = Counter()
    for name in parts & set(NODES):
        shared |= NODES[name].checkpoints()
    assert bool(shared) == (command != "speed")
    own_bytes = gpu_loading.LAYERS * gpu_loading.LAYER_BYTES if "loading" in parts else 0
    assert checkpoints_bytes(shared) + own_bytes + SPARE_BYTES <= DISK_GIB << 30
    assert DISK_BYTES == DISK_GIB << 30


def test_the_default_budget_leaves_room_for_all_that_is_outside_of_it() -> None:
    """What the driver takes is an estimate until a GPU was measured: some 0.5 GiB for the context of an H100, and as much as `make
    gpu` aims at for each graph."""
    context_bytes, modules_bytes, executables_bytes = 512 << 20, 256 << 20, MOST_GRAPHS * (2 << 20)
    assert KEPT_BYTES + context_bytes + modules_bytes + executables_bytes <= CUDA_LEFT_BYTES


@pytest.mark.parametrize("vocab", [1, 4096, 32001, 128256, 262144])
def test_what_sampling_writes_down_is_work_space(vocab: int) -> None:
    records = triton_sampling.empty_records(256, vocab, "meta")
    assert sum(each.nbytes for each in records) == sampling_bytes(256, vocab)


def test_what_graphs_keep_fits_beside_the_work_space() -> None:
    """The graphs of all models share one pool, which holds what one step takes at a time. Each keeps its columns and the hidden
    states of its rows besides; a model with a predictor those of all tokens once. Of four 8B models, and of models that were
    evicted, that is less than what torch may keep."""
    shape = gpu_shapes.shape_of("8b")
    decode = {graph_rows(num) for num in range(1, MAX_GRAPH_ROWS + 1)}
    mixed = mixed_sizes(MAX_GRAPH_TOKENS, MAX_GRAPH_ROWS, triton_extend.tile_tokens([shape.head_dim], torch.bfloat16, False))
    assert 4 * (len(decode) + len(mixed)) <= MOST_GRAPHS
    pool_bytes = gpu_work_space_bytes(shape, "bfloat16", MAX_GRAPH_TOKENS, MAX_GRAPH_ROWS) - LIBRARY_BYTES - PACKED_BYTES
    kept_rows = sum(decode) + sum(size.num_rows for size in mixed) + MAX_GRAPH_TOKENS
    columns_bytes = sum(column.nbytes for size in mixed for column in mixed_padding(size, MAX_GRAPH_ROWS).values())
    block_tables_bytes = MAX_GRAPH_ROWS * (131072 // gpu_shapes.BLOCK_TOKENS) * 4
    kept_bytes = kept_rows * (shape.hidden_size * 2 + 16 * 4) + columns_bytes + block_tables_bytes
    # of the graphs that sample edited rows: their words, columns and results, and hidden states
    kept_bytes += 4 * edited_graph_words(shape.vocab_size) + EDITED_ROWS * (shape.hidden_size * 2 + 256) + (64 << 10)
    assert pool_bytes + 4 * kept_bytes + MOST_KEPT_BYTES + CUBLAS_BYTES <= KEPT_BYTES, "with that of captures"
