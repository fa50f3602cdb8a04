"""The GPU's model, its kernels interpreted, against transformers: every logit, and tokens fed back on the device. What only a GPU
can show (graphs, streams, page-locked memory) is in tests/gpu."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from benchmarks.plain_memory import PlainRange
from config.devices import CUDA_LEFT_BYTES
from engine import ops, work_space
from engine.__main__ import beside_work_space
from engine.contracts import NoWorkSpace
from engine.cuda_model import CudaModel
from engine.kv_caches import make_kv_cache
from engine.loading.device_sink import DeviceSink
from engine.memory.weight_range import WeightRange
from engine.model_runner import TorchRunner
from engine.protocol import Configure, LoadModel, SamplingParams
from engine.steps import cuda_graphs
from engine.steps.cuda_graphs import graph_rows
from loader import sizing
from loader.catalog import scan_one
from loader.errors import UnsupportedModel
from loader.sinks import HostSink
from loader.staging import StagingRing
from loader.weight_stream import open_checkpoint, stream_weights
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.plan import BatchPlan, write_sampling
from scheduler.batch.request import BatchRequest
from tests.engine.model_bench import (
    BLOCK_TOKENS,
    CACHE_DIR,
    CASES,
    CHUNK_BYTES,
    MAX_LEN,
    load,
    load_task,
    make_checkpoint,
    make_memory,
    make_runner,
    make_table,
    plan,
    put,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy tells of infinities, a GPU does not
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu runs the same model"),
]
PROMPT = np.random.default_rng(11).integers(0, 211, 60).tolist()
OTHER = np.random.default_rng(12).integers(0, 211, 45).tolist()
KINDS = ["llama", "qwen3", "gemma2", "gemma3", "phi3-partial-window"]


def load_cuda_model(
    folder: Path, device: str = "cpu", dtype: str = "float32", max_graph_rows: int = 0, kv_cache_dtype: str = ""
) -> CudaModel:
    limits = (1 << 20, 0, 0, MAX_LEN, 8, [1])
    spec = LoadModel(1, "tiny", str(folder), dtype, scan_one(folder).fingerprint, *limits, kv_cache_dtype=kv_cache_dtype)
    with ExitStack() as stack:
        source = open_checkpoint(folder, spec.fingerprint, stack, in_place=False)
        on_host = PlainRange(sizing.weights_bytes(source.shape, dtype), "cpu")
        sink = HostSink(on_host.memory.numpy().data)
        stream_weights(source, dtype, sink, StagingRing(), lambda done, total: None, lambda: False)
    weights = PlainRange(on_host.num_bytes, device)
    weights.memory.copy_(on_host.memory)
    arena = torch.full((4 << 20,), 0xFF, dtype=torch.uint8, device=device)  # NaN in every dtype
    return CudaModel(spec, source.shape, weights, arena, BLOCK_TOKENS, max_graph_rows)


@pytest.fixture(autouse=True)
def on_gpu_kernels() -> Iterator[None]:
    ops.configure_gpu(CACHE_DIR)
    yield
    ops.configure(CACHE_DIR)


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(folder, **CASES[request.param])


def expected(made: tuple[Path, Any], tokens: list[int]) -> np.ndarray:
    with torch.inference_mode():
        return made[1](torch.tensor([tokens])).logits[0].numpy()


def close(actual: np.ndarray, wanted: np.ndarray) -> None:
    assert actual.shape == wanted.shape
    assert np.abs(wanted).max() > 1.0, "the checkpoint's logits are too small to tell anything"
    assert np.abs(actual - wanted).max() < 2e-4


def test_prefill_in_chunks_then_a_mixed_batch(made: tuple[Path, Any]) -> None:
    """Three rows prefill; then one decodes, one has a short chunk and one a long one."""
    model = load_cuda_model(made[0])
    table = make_table(groups=model.kv_groups)
    for slot, tokens in ((0, PROMPT), (1, OTHER), (4, PROMPT)):
        put(table, slot, tokens)
    first, second = expected(made, PROMPT), expected(made, OTHER)
    close(model.logits(plan((0, 0, 17), (1, 0, 9), (4, 0, 3)), table, True), np.concatenate((first[:17], second[:9], first[:3])))
    mixed = plan((0, 17, 1), (4, 3, 4), (1, 9, 14))
    close(model.logits(mixed, table, True), np.concatenate((first[17:18], first[3:7], second[9:23])))
    mixed.samples[:] = [True, False, True]
    close(model.logits(mixed, table), np.stack((first[17], second[22])))


@pytest.mark.parametrize("kind", ["llama", "gemma2"])
def test_tokens_go_from_step_to_step_on_the_device(tmp_path: Path, kind: str) -> None:
    """Six steps are launched before the first is read; the host never tells a sampled token back."""
    made = make_checkpoint(tmp_path, **CASES[kind])
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 2, PROMPT[:10])
    put(table, 5, OTHER[:3])
    with torch.inference_mode():
        wanted = made.generate(torch.tensor([PROMPT[:10]]), max_new_tokens=6, do_sample=False, eos_token_id=None)[0].tolist()
    steps = [model.launch(plan((2, 0, 10), (5, 0, 3), samples=(True, False)), table)]
    steps += [model.launch(plan((2, 10 + at, 1)), table) for at in range(5)]
    results = [step.wait() for step in steps]
    assert PROMPT[:10] + [int(result.ids[0]) for result in results] == wanted
    assert not any(result.bad.any() for result in results)


def test_settings_of_rows_give_the_tokens_of_the_cpu(tmp_path: Path) -> None:
    """Seeded, cut, penalised, biased and greedy rows in one step, log-probabilities for some, as the CPU's sampler gives them."""
    make_checkpoint(tmp_path, **CASES["llama"])
    settings = [
        SamplingParams(max_tokens=20, temperature=0.9, seed=4),
        SamplingParams(max_tokens=20, temperature=1.3, top_p=0.7, top_k=20, seed=5, logprobs=3),
        SamplingParams(max_tokens=20, temperature=0.0, frequency_penalty=0.8, presence_penalty=0.5, logit_bias={7: 4.0}),
        SamplingParams(max_tokens=20, temperature=0.7, min_p=0.02, seed=6, repetition_penalty=1.3, min_tokens=30),
        SamplingParams(max_tokens=20, temperature=0.0),
    ]

    def run(num_rows: int, on_gpu: bool) -> Any:
        model = load_cuda_model(tmp_path)
        table = make_table(groups=model.kv_groups)
        for slot in range(num_rows):
            put(table, slot, PROMPT[slot : slot + 14])
            write_sampling(table, slot, settings[slot], 8, MAX_LEN)
        step = plan(*((slot, 0, 14) for slot in range(num_rows)))
        if on_gpu:
            return model.execute(step, table)
        runner = make_runner(make_memory())
        runner._kernels.result()
        ops.configure(CACHE_DIR, use_kernels=False)
        try:
            return load(runner, tmp_path).execute(step, table)
        finally:
            ops.configure_gpu(CACHE_DIR)

    for num_rows in (1, 5):
        ours, wanted = run(num_rows, True), run(num_rows, False)
        assert ours.ids.tolist() == wanted.ids.tolist()
        assert not ours.bad.any()
        if num_rows == 5:
            assert ours.logprobs.top_ids == wanted.logprobs.top_ids
            assert np.abs(np.array(ours.logprobs.top) - np.array(wanted.logprobs.top)).max() < 1e-3


def test_a_row_that_is_not_finite_is_bad_and_no_other(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    put(table, 1, OTHER)
    model.execute(plan((0, 0, 12), (1, 0, 12)), table)
    model._memory[0].kv[table.block_tables[0][1, 2]] = torch.nan
    assert model.execute(plan((0, 12, 1), (1, 12, 1)), table).bad.tolist() == [False, True]


class StandInGraph:
    """In CUDAGraph's place: a replay runs the captured step again, into the same result."""

    captured: ClassVar[list[StandInGraph]] = []
    step: Any = None
    drawn: Any = None

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        StandInGraph.captured.append(self)

    def capture_end(self) -> None:
        """The step between the two was the captured one."""

    def replay(self) -> None:
        self.drawn.copy_(self.step())


@pytest.fixture
def stand_in_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    stream = SimpleNamespace(wait_stream=lambda other: None)
    cuda = SimpleNamespace(
        CUDAGraph=StandInGraph,
        Stream=lambda: stream,
        current_stream=lambda: stream,
        stream=lambda stream: nullcontext(),
        graph_pool_handle=lambda: (0, 0),
        memory_reserved=lambda: 0,
    )
    names = {"zeros": torch.zeros, "int32": torch.int32, "OutOfMemoryError": torch.OutOfMemoryError}
    monkeypatch.setattr(cuda_graphs, "torch", SimpleNamespace(cuda=cuda, **names))
    monkeypatch.setattr(cuda_graphs, "_pool", None)
    monkeypatch.setattr(cuda_graphs, "_stream", None)
    yield
    StandInGraph.captured.clear()


def remember_steps(model: CudaModel) -> None:
    """Each stand-in for a graph gets the step that was captured with it."""
    step = model.graphs._step

    def remembered(columns: Any) -> Any:
        drawn = step(columns)
        if StandInGraph.captured and StandInGraph.captured[-1].step is None:
            graph = StandInGraph.captured[-1]
            graph.step, graph.drawn = lambda: step(columns), drawn
        return drawn

    model.graphs._step = remembered


def decoded(model: CudaModel, rows: int, steps: int) -> list[list[int]]:
    """Seeded and greedy rows, each step's tokens known to the next on the device alone."""
    table = make_table(groups=model.kv_groups)
    for slot in range(rows):
        put(table, slot, PROMPT[slot : slot + 5])
        write_sampling(table, slot, SamplingParams(max_tokens=90, temperature=0.8 * (slot % 2), top_p=0.9, seed=slot), 5, MAX_LEN)
    ids = [model.execute(plan(*((slot, 0, 5) for slot in range(rows))), table).ids.tolist()]
    ids += [model.execute(plan(*((slot, 5 + at, 1) for slot in range(rows))), table).ids.tolist() for at in range(steps)]
    return ids


def test_captured_steps_are_padded_steps_with_other_columns(tmp_path: Path, stand_in_graphs: None) -> None:
    """What a graph runs again reads its columns where the first run's were; rows of padding change nothing."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 3)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    model.capture(3)
    assert list(model.graphs.captured) == [4]
    assert decoded(model, 3, 3) == plain
    assert list(model.graphs.captured) == [4]


def test_a_step_without_memory_for_its_graph_runs_without_one(tmp_path: Path, stand_in_graphs: None) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    plain = decoded(load_cuda_model(tmp_path), 3, 3)
    model = load_cuda_model(tmp_path, max_graph_rows=8)

    def refuse(columns: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore of it")

    model.graphs._step = refuse
    assert decoded(model, 3, 3) == plain
    assert not model.graphs.captured
    assert model.graphs.rows_for(3) == 0
    assert model.graphs.rows_for(1) == 1
    while model.num_uncaptured:
        model.capture_next()
    assert not model.graphs.captured


def test_a_step_that_finds_no_memory_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the model steps on."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    wanted = model.execute(plan((0, 0, 9)), table).ids.tolist()

    def refuse(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore of it")

    with monkeypatch.context() as patched:
        patched.setattr(model, "_forward", refuse)
        with pytest.raises(NoWorkSpace, match=r"a step of 9 tokens of 1 requests .*Tried to allocate 2.00 MiB\.$"):
            model.launch(plan((0, 0, 9)), table)
    assert model.execute(plan((0, 0, 9)), table).ids.tolist() == wanted


def test_torch_is_held_to_the_work_space(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: set_to.append((fraction, index)))
    assert work_space.limit_torch(3 << 30) == (3 << 30) + work_space.KEPT_BYTES
    assert set_to == [(((3 << 30) + work_space.KEPT_BYTES) / (80 << 30), 0)]
    assert work_space.limit_torch(90 << 30) == 80 << 30
    assert set_to[1] == (1.0, 0)
    assert work_space.KEPT_BYTES < CUDA_LEFT_BYTES


def test_nothing_is_captured_after_a_second_load(tmp_path: Path, stand_in_graphs: None) -> None:
    """The first load captures what it is asked for, idle time the rest, smallest first; what comes back has them all."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    model = load_cuda_model(tmp_path, max_graph_rows=8)
    remember_steps(model)
    model.capture(3)  # the stand-in's capture computes, which a real one does not: before there is a token to be spoilt
    first = decoded(model, 3, 2)
    order = []
    while model.num_uncaptured:
        model.capture_next()
        order.append(list(model.graphs.captured)[-1])
    assert (next(iter(model.graphs.captured)), order) == (4, [1, 2, 8])
    num_captured = len(StandInGraph.captured)
    kept = model._weights.memory.clone()
    model.release()
    assert model.num_uncaptured == 0, "an evicted model has no weights to capture with"
    model._weights.memory.zero_()
    model._weights.memory.copy_(kept)
    model.restore()
    assert decoded(model, 3, 2) == first
    decoded(model, 7, 1)
    assert (len(StandInGraph.captured), model.num_uncaptured) == (num_captured, 0)


def test_warming_up_writes_no_kv(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["gemma2"])
    model = load_cuda_model(tmp_path)
    model.warm(graph_rows=())
    assert all(memory.kv.isnan().all() for memory in model._memory)


def test_the_runner_gives_the_model_of_the_last_load_back(tmp_path: Path) -> None:
    """An evicted model's weights return to their addresses: what was captured over them stays."""
    whole = make_checkpoint(tmp_path, **CASES["llama"])
    memory = make_memory()
    options = Configure("cpu:0", memory.num_chunks, memory.chunk_bytes, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    runner = TorchRunner(memory, options, gpu=True)
    spec = LoadModel(1, "m", str(tmp_path), "float32", scan_one(tmp_path).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])
    wanted = expected((tmp_path, whole), PROMPT)[:9]
    models = []
    for _ in range(2):
        model = runner.load(load_task(spec, memory=memory))
        assert isinstance(model, CudaModel)
        table = make_table(groups=model.kv_groups)
        put(table, 0, PROMPT)
        close(model.logits(plan((0, 0, 9)), table, True), wanted)
        model.release()
        models.append(model)
    assert models[0] is models[1]
    renamed = msgspec.structs.replace(spec, max_sequences=4)
    assert runner.load(load_task(renamed, memory=memory)) is not models[0]
    with pytest.raises(UnsupportedModel, match="quantize: int8 is not built on a GPU"):
        runner.load(load_task(msgspec.structs.replace(spec, quantize="int8"), memory=memory))
    memory.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_reach_a_device_as_they_reach_the_host(tmp_path: Path, dtype: str) -> None:
    """Through slots smaller than a tensor, as they are and converted."""
    make_checkpoint(tmp_path, **CASES["llama"])
    memory = make_memory()
    with ExitStack() as stack:
        source = open_checkpoint(tmp_path, "", stack)
        on_host = np.zeros(sizing.weights_bytes(source.shape, dtype), np.uint8)
        weights = WeightRange(memory, len(on_host))
        weights.map(list(range(weights.num_chunks)))
        for sink in (HostSink(on_host.data), DeviceSink(memory, weights)):
            stream_weights(source, dtype, sink, StagingRing(2, 8 << 10), lambda done, total: None, lambda: False)
    for slot in sizing.weight_layout(source.shape, dtype):
        wanted = torch.from_numpy(on_host[slot.offset_bytes : slot.offset_bytes + slot.num_bytes])
        assert torch.equal(weights.tensor(slot.offset_bytes, (slot.num_bytes,), torch.uint8), wanted), slot.name
    weights.close()
    memory.close()


def test_work_space_is_beside_the_chunks_of_a_gpu() -> None:
    given = Configure("cuda:0", 100, 16 << 20, 33 << 20, 512, 16, 5.0, 0)
    left = beside_work_space(given)
    assert (left.num_chunks, left.work_space_bytes) == (97, 0)
    on_cpu = msgspec.structs.replace(given, device="cpu:0")
    assert beside_work_space(on_cpu) is on_cpu


def test_released_weights_are_not_used(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["llama"])
    model = load_cuda_model(tmp_path)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    model.release()
    model.release()
    with pytest.raises(RuntimeError, match="released"):
        model.execute(plan((0, 0, 5)), table)


def test_graph_row_counts_are_few_and_not_much_larger() -> None:
    sizes = [graph_rows(n) for n in range(1, 257)]
    assert all(n <= size <= 2 * n for n, size in enumerate(sizes, start=1))
    assert len(set(sizes)) < 24
    assert sizes[:8] == [1, 2, 4, 4, 8, 8, 8, 8]


def scheduled(model: CudaModel, ahead: bool, stop: Sequence[int] = ()) -> dict[int, list[int]]:
    """Texts of three requests, with seeds, chunks, and stop ids for one: steps one after the other, or each launched before the
    last is read."""
    block_bytes = model.kv_groups[0].block_bytes
    chunks = ChunkPool(len(model._memory[0].kv) * block_bytes // CHUNK_BYTES, CHUNK_BYTES, lease_chunks=40)
    spec = LoadModel(1, "tiny", "", "float32", "f", 0, 8, 40, MAX_LEN, 8, [1])
    kv = make_kv_cache(spec, model.kv_groups, chunks, 16)
    scheduler = BatchScheduler("tiny", kv, BatchLimits(8, MAX_LEN, 16, (1,), "f", "float32"))
    texts: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for request_id, prompt in ((1, PROMPT[:9]), (2, OTHER[:13]), (3, PROMPT[:4])):
        params = SamplingParams(max_tokens=4 + request_id, temperature=0.9 * (request_id - 1), seed=request_id, ignore_eos=True)
        if request_id == 2:
            params = msgspec.structs.replace(params, stop_token_ids=list(stop))
        scheduler.submit(BatchRequest(request_id, np.array(prompt, np.int32), len(prompt), params))
    under_way: deque[tuple[BatchPlan, Any]] = deque()
    while True:
        step = scheduler.plan(0)
        if step is not None:
            under_way.append((step, model.launch(step, scheduler.table)))
            if ahead:
                scheduler.start_step(step)
        if not under_way:
            return texts
        if step is None or not ahead or len(under_way) > 1:
            oldest, launched = under_way.popleft()
            result = launched.wait()
            outcome = scheduler.finish_step(oldest, result.ids, result.bad)
            for request_id, token in zip(outcome.request_ids, outcome.ids, strict=True):
                texts[request_id].append(token)


def test_steps_planned_before_the_last_is_read_give_the_same_texts(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    whole = scheduled(load_cuda_model(tmp_path), False)
    assert [len(text) for text in whole.values()] == [5, 6, 7]
    stop = whole[2][3]
    plain = whole | {2: whole[2][: whole[2].index(stop) + 1]}
    assert scheduled(load_cuda_model(tmp_path), True, [stop]) == plain
