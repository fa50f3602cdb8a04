"""Steps with pieces of prompts, padded to the sizes that graphs are captured for: they compute what plain steps compute, whatever
the padding holds; and graphs of them are captured, kept and given up as engine/cuda/mixed_graphs.py says.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.cuda import graphs, mixed_steps
from engine.cuda.graph_room import GraphRoom
from engine.cuda.graphs import StepGraph, StepGraphs, StepOutputs
from engine.cuda.mixed_graphs import STEPS_BEFORE_CAPTURE, MixedGraphs
from engine.cuda.mixed_steps import PROMPTS, MixedSize, mixed_columns, mixed_padding, mixed_sizes, num_tiles
from engine.cuda.model import CudaModel
from engine.cuda.sequences import Padding
from engine.grammar.row_masks import RowMasks
from engine.ops import reference
from engine.protocol import SamplingParams
from engine.sampling.sampler import sampling_rows
from scheduler.batch.plan import BatchPlan, SequenceTable, write_sampling
from tests.engine.cuda_bench import INTERPRETED, OTHER, PROMPT, load_cuda_model
from tests.engine.flash_stand_in import flash_chosen
from tests.engine.model_bench import BLOCK_TOKENS, CASES, MAX_LEN, make_checkpoint, make_table, plan, put
from tests.engine.stand_in_graphs import StandInGraph, remember_steps, stand_in_graphs

pytest.importorskip("triton")
pytestmark = INTERPRETED
__all__ = ["stand_in_graphs"]  # a fixture

NUM_SLOTS, VOCABULARY = 8, 211
SIZES = (MixedSize(12, 5, 4), MixedSize(16, 7, 4))


@contextmanager
def unwritten_memory_is_nan() -> Iterator[None]:
    """Inside, torch fills new memory with NaN, or the largest integers."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def random_step(generator: random.Random, table: SequenceTable, size: MixedSize, reaches: list[int]) -> BatchPlan:
    """Returns a step that the size holds: rows that decode, pieces of prompts, some behind blocks that they share with another row
    or behind a window. The table's sequences are made up for it."""
    num_rows, slots = generator.randint(1, min(size.num_rows, NUM_SLOTS)), generator.sample(range(NUM_SLOTS), NUM_SLOTS)
    left, rows = size.num_tokens - num_rows, []
    for slot in slots[:num_rows]:
        more = generator.choice([0, 0, generator.randint(0, left)])
        left -= more
        computed = generator.choice([0, generator.randint(1, 70)]) if more else generator.randint(1, 70)
        rows.append((slot, computed, 1 + more))
    rows.sort(key=lambda row: row[2] > 1)
    for slot, computed, num_new in rows:
        put(table, slot, [generator.randrange(VOCABULARY) for _ in range(computed + num_new)])
        write_sampling(
            table,
            slot,
            SamplingParams(
                max_tokens=9, temperature=generator.choice([0.0, 0.8]), top_p=0.9, top_k=generator.choice([0, 5]), seed=slot
            ),
            computed,
            MAX_LEN,
        )
        other = generator.choice(slots)
        for block_table, reach in zip(table.block_tables, reaches, strict=True):
            shared = computed // BLOCK_TOKENS
            block_table[slot, :shared] = block_table[other, :shared]
            if reach and generator.random() < 0.5:
                block_table[slot, : reference.first_seen(computed + 1, reach) // BLOCK_TOKENS] = -1
    samples = tuple(generator.random() < 0.8 for _ in rows)
    step = plan(*rows, samples=samples)
    if generator.random() < 0.3:  # the device alone knows the last token of rows that decode
        table.num_tokens[step.slots[step.num_new == 1]] -= 1
    return step


def rubbish(generator: random.Random, columns: dict[str, Any], padding: dict[str, Any], used: dict[str, int]) -> None:
    """Changes what a step leaves unused in its columns to anything that is allowed there."""
    num_tokens, num_rows = len(padding["token_rows"]), len(padding["wanted"])
    most = {"host_ids": VOCABULARY, "wanted": num_tokens, "top_k": 300, "tile_firsts": 999, "firsts": 999, "starts": num_tokens}
    for name, limit in most.items():
        for at in range(used[name], len(columns[name])):
            columns[name][at] = generator.randrange(limit)
    for at in range(used["wanted"], num_rows):
        columns["temperature"][at], columns["key0"][at] = generator.choice([0.0, 1.0]), generator.randrange(1 << 32)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a checkpoint of two layers, of which one has a window."""
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, **(CASES["qwen2-windows"] | {"num_hidden_layers": 2}))
    return folder


@pytest.mark.parametrize(
    ("seed", "kv_cache_dtype", "has_flash"), [(0, "", False), (1, "", False), (2, "fp8", False), (3, "", True), (5, "", True)]
)
def test_a_padded_step_computes_what_the_plain_one_does(folder: Path, seed: int, kv_cache_dtype: str, has_flash: bool) -> None:
    """Logits, sampled tokens and KV are the same, with rubbish in the padding and NaN wherever nothing was written; also if
    FlashAttention computes the prompts of the padded step in the layer without a window."""
    model = load_cuda_model(folder, kv_cache_dtype=kv_cache_dtype)
    generator, numbers = random.Random(seed), torch.Generator().manual_seed(seed)
    size, table = SIZES[seed % len(SIZES)], make_table(NUM_SLOTS, groups=model.kv_groups)
    memory = model._memory
    for group in memory:
        if group.scales is None:
            group.kv.normal_(generator=numbers)
        else:
            group.kv.view(torch.uint8).random_(0, 127, generator=numbers)
            group.scales.random_(120, 127, generator=numbers)
    step = random_step(generator, table, size, [group.reach for group in memory])
    last_ids = model._sequences.last_ids
    last_ids.random_(0, VOCABULARY, generator=numbers)
    arena = torch.empty(0, dtype=torch.uint8).set_(memory[0].kv.untyped_storage())
    before, ids_before = arena.clone(), last_ids.clone()
    rows = sampling_rows(step, table, [1], VOCABULARY) if step.samples.any() else None
    num_rows, num_sampling = len(step.slots), int(step.samples.sum())
    padding = mixed_padding(size, NUM_SLOTS)
    columns = {name: column.copy() for name, column in padding.items()}
    for name, own in mixed_columns(step, table, rows, model.tile_tokens).items():
        columns[name][: len(own)] = own
    used = {"host_ids": int(step.num_new.sum()), "wanted": num_sampling, "top_k": num_sampling, "firsts": num_rows}
    used |= {"starts": num_rows, "tile_firsts": num_tiles(step, model.tile_tokens)}
    rubbish(generator, columns, padding, used)
    with torch.inference_mode():
        plain = model._begin_plain(step, table, rows, None).outputs
        kv, ids = arena.clone(), last_ids.clone()
        arena.copy_(before)
        last_ids.copy_(ids_before)
        with ExitStack() as inside:
            inside.enter_context(unwritten_memory_is_nan())
            flash = inside.enter_context(flash_chosen(memory[0].kv.shape[5], torch.float32)) if has_flash else None
            padded = model.compute_mixed(model._staging.send(columns))
        assert flash is None or flash.num_calls == 1
        logits, wanted = (model._loaded().logits(outputs.hidden[:num_sampling]) for outputs in (padded, plain))
    assert wanted.isfinite().all()
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-4)
    assert torch.equal(padded.drawn[:, :num_sampling], plain.drawn)
    assert torch.equal(last_ids[:NUM_SLOTS], ids[:NUM_SLOTS])
    values = torch.uint8 if kv_cache_dtype else torch.int32
    stored, as_plain, before = arena.view(values), kv.view(values), before.view(values)
    untouched = as_plain == before
    assert not untouched.all()
    assert torch.equal(stored[untouched], before[untouched]), "padding was stored"
    if not kv_cache_dtype:
        torch.testing.assert_close(stored.view(torch.float32), as_plain.view(torch.float32), rtol=0, atol=1e-4, equal_nan=True)


def run_mixed(folder: Path, params: list[SamplingParams], steps: list[list[int]], **limits: int) -> tuple[CudaModel, list[Any]]:
    """Returns a model, and the results of steps. steps: how many tokens of each row a step computes; prompts have six. params: of
    each row."""
    model = load_cuda_model(folder, **limits)
    remember_steps(model)
    for size in model.mixed_graphs.missing():
        model.capture_mixed(size)
    if limits:
        for num_rows in range(1, len(params) + 1):
            model.capture(num_rows)
    table, results = make_table(groups=model.kv_groups), []
    for slot, own in enumerate(params):
        put(table, slot, PROMPT[slot : slot + 6])
        write_sampling(table, slot, own, 6, MAX_LEN)
    positions = [0] * len(params)
    for new in steps:
        rows = sorted(((slot, positions[slot], num) for slot, num in enumerate(new) if num), key=lambda row: row[2] > 1)
        samples = tuple(computed + num >= 6 for _, computed, num in rows)
        step = plan(*rows, samples=samples)
        result = model.execute(step, table, masks_of(step, params))
        positions = [at + num for at, num in zip(positions, new, strict=True)]
        for slot, token in zip(step.slots[step.samples].tolist(), result.ids.tolist(), strict=True):
            table.tokens[slot, positions[slot]] = token
            table.num_tokens[slot] = positions[slot] + 1
        told = None if result.logprobs is None else (result.logprobs.top_ids, [round(each, 3) for each in result.logprobs.top])
        results.append((result.ids.tolist(), result.bad.tolist(), told))
    return model, results


def masks_of(step: BatchPlan, params: list[SamplingParams]) -> RowMasks | None:
    masked = [at for at, slot in enumerate(step.slots[step.samples].tolist()) if params[slot].grammar]
    if not masked:
        return None
    bits = np.full((len(masked), -(-VOCABULARY // 32)), 0x0F0F0F0F, np.uint32)
    return RowMasks([1] * len(masked), np.array(masked, np.intp), list(bits))


BY_DEVICE = [SamplingParams(max_tokens=9, temperature=heat, seed=4, top_p=0.9) for heat in (0.0, 0.8, 1.3)]
BY_HOST = [
    SamplingParams(max_tokens=9, temperature=0.0, frequency_penalty=0.8, logprobs=2),
    SamplingParams(max_tokens=9, temperature=0.9, seed=2, grammar="regex:a*"),
    SamplingParams(max_tokens=9, temperature=0.7, seed=1, logit_bias={7: 4.0}, min_tokens=8),
]


@pytest.mark.parametrize(
    ("params", "steps"),
    [(BY_DEVICE, [[6, 4, 0], [1, 2, 6], [1, 1, 1]]), (BY_HOST, [[6, 6, 2], [1, 1, 0]])],
    ids=["by the device", "by the host"],
)
def test_tokens_are_those_of_steps_without_graphs(
    tmp_path: Path, stand_in_graphs: Any, monkeypatch: pytest.MonkeyPatch, params: list[SamplingParams], steps: list[list[int]]
) -> None:
    """All steps run as graphs, also those whose logits the host edits or reports."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    _, wanted = run_mixed(tmp_path, params, steps)
    for name, value in (("TOKENS", (15,)), ("ROWS", (4,)), ("PROMPTS", 3)):  # interpreted, larger sizes take long
        monkeypatch.setattr(mixed_steps, name, value)
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)
    monkeypatch.setattr(CudaModel, "_forward", lambda self, step: pytest.fail("a step without a graph"))
    model, actual = run_mixed(tmp_path, params, steps, max_graph_rows=4, max_graph_tokens=15)
    assert actual == wanted
    assert [size.num_tokens for size in model.mixed_graphs.captured] == [15]


def test_what_the_host_samples_is_there_for_a_step_launched_ahead(tmp_path: Path) -> None:
    """A step that is launched before the last one's tokens are in the table takes them from the device, also if the host sampled
    them: rows with min_tokens do not keep the scheduler from planning ahead."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    texts = []
    for ahead in (False, True):
        model, table = load_cuda_model(tmp_path), make_table()
        put(table, 3, OTHER[:5])
        write_sampling(table, 3, SamplingParams(max_tokens=9, temperature=0.9, seed=3, min_tokens=8), 5, MAX_LEN)
        ids = [int(model.launch(plan((3, 0, 5)), table).wait().ids[0])]
        for at in range(3):
            if not ahead:
                table.tokens[3, 5 + at], table.num_tokens[3] = ids[-1], 6 + at
            ids.append(int(model.launch(plan((3, 5 + at, 1)), table).wait().ids[0]))
        texts.append(ids)
    assert texts[0] == texts[1]


# ---- which graphs there are


def test_sizes_are_few_and_hold_what_they_say() -> None:
    for tile_tokens in (32, 64, 128):
        sizes = mixed_sizes(512, 256, tile_tokens)
        assert len(sizes) == 12
        assert sizes == sorted(sizes, key=lambda size: (size.num_tokens, size.num_rows))
        # as many rows with several new tokens as PROMPTS, however long each is
        assert all(size.num_tiles >= PROMPTS + size.num_tokens // tile_tokens for size in sizes)
    assert {(size.num_tokens, size.num_rows) for size in mixed_sizes(64, 17, 128)} == {(16, 16), (32, 16), (64, 16), (64, 64)}
    assert {size.num_rows for size in mixed_sizes(512, 16, 128)} == {16}
    assert mixed_sizes(0, 256, 128) == []


class Recorded(MixedGraphs):
    """Graphs whose capture computes nothing."""

    def __init__(self, sizes: list[MixedSize]) -> None:
        step: Any = None
        super().__init__(step, step, torch.device("cpu"), sizes, GraphRoom())
        self.attempts: list[MixedSize] = []
        self.seconds = (0.0, 1.0)  # of the device, of the host
        self.error: RuntimeError | None = None

    def capture(self, size: MixedSize, padding: Any = None) -> bool:
        self.attempts.append(size)
        return super().capture(size, padding)

    def _captured(self, padding: Any) -> StepGraph:
        if self.error is not None:
            raise self.error
        nothing = torch.empty(0)
        return StepGraph(StandInGraph(), nothing, Padding({}), StepOutputs(nothing, nothing), self.seconds[1], 0.0, 0)

    def _replay_s(self, graph: StepGraph) -> float:
        return self.seconds[0]


def test_a_step_takes_the_smallest_graph_that_holds_it() -> None:
    sizes = mixed_sizes(512, 256, 128)
    own = Recorded(sizes)
    assert own.size_for(10, 2, 1) is None
    while own.missing():
        own.capture(own.missing()[0])
    assert own.attempts == sizes
    assert own.size_for(10, 2, 1) == sizes[0]
    assert own.size_for(17, 16, 1) == MixedSize(32, 16, PROMPTS)
    assert own.size_for(17, 17, 1) == MixedSize(64, 64, PROMPTS)
    assert own.size_for(192, 65, 2) == MixedSize(256, 256, PROMPTS + 2)
    assert own.size_for(100, 20, PROMPTS + 2) == MixedSize(256, 64, PROMPTS + 2), "more tiles than one of 128 tokens has"
    assert own.size_for(513, 65, 2) is None
    assert own.size_for(300, 257, 2) is None
    assert own.size_for(300, 250, PROMPTS + 5) is None


def test_a_graph_that_keeps_the_device_longer_than_the_host_is_given_up() -> None:
    """So are larger ones, which would do so all the more, also if they are there already; none of them is tried again."""
    own = Recorded(mixed_sizes(512, 64, 128))
    own.capture(MixedSize(512, 64, PROMPTS + 4))
    assert len(own.captured) == 1
    while own.missing():
        size = own.missing()[0]
        own.seconds = (size.num_tokens * 1e-3, 0.1)
        own.capture(size)
    assert sorted((size.num_tokens, size.num_rows) for size in own.captured) == [(16, 16), (32, 16), (64, 16), (64, 64)]
    assert [(size.num_tokens, size.num_rows) for size in own.attempts if size not in own.captured] == [(512, 64), (128, 16)]
    for _ in range(3 * STEPS_BEFORE_CAPTURE):
        assert own.needed(100, 60, 1) is None


def test_a_model_that_is_never_idle_captures_what_its_steps_need() -> None:
    own = Recorded(mixed_sizes(512, 256, 128))
    lacking = [own.needed(200, 65, 2) for _ in range(STEPS_BEFORE_CAPTURE + 1)]
    assert lacking == [None] * STEPS_BEFORE_CAPTURE + [MixedSize(256, 256, PROMPTS + 2)]
    assert lacking[-1] is not None
    own.capture(lacking[-1])
    assert own.needed(200, 65, 2) is None
    assert own.needed(2000, 65, 2) is None


def test_a_refused_graph_leaves_its_steps_to_others(caplog: pytest.LogCaptureFixture, stand_in_graphs: SimpleNamespace) -> None:
    """Where there is no memory for a graph its steps run without, one line says so, and a larger graph may hold them."""
    own = Recorded(mixed_sizes(64, 16, 128))
    own.capture(MixedSize(64, 16, PROMPTS))
    own.error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nMore of it")
    while own.missing():
        assert not own.capture(own.missing()[0])
    assert [record.message.partition(" for")[0] for record in caplog.records] == [
        "steps of up to 16 tokens of 16 rows have no graph",
        "steps of up to 32 tokens of 16 rows have no graph",
    ]
    assert own.size_for(10, 2, 1) == MixedSize(64, 16, PROMPTS)
    assert own.needed(10, 2, 1) is None


def test_nothing_is_captured_after_a_second_load(tmp_path: Path, stand_in_graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are captured first. A model that is loaded again has all graphs, one that takes its place none of them."""
    make_checkpoint(tmp_path, kind="qwen2", num_hidden_layers=1)
    nothing = torch.empty(0)
    graph = StepGraph(StandInGraph(), nothing, Padding({}), StepOutputs(nothing, nothing), 0.0, 0.0, 0)
    monkeypatch.setattr(StepGraphs, "_captured", lambda self, padding: graph)
    model = load_cuda_model(tmp_path, max_graph_rows=1, max_graph_tokens=16)
    assert model.num_uncaptured == 2
    model.capture_next()
    assert (list(model.graphs.captured), list(model.mixed_graphs.captured)) == ([1], [])
    model.capture_next()
    assert model.num_uncaptured == 0
    model.release()
    assert model.num_uncaptured == 0
    model.restore()
    assert model.num_uncaptured == 0
    model.drop_graphs()
    assert model.num_uncaptured == 2
