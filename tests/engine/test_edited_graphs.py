"""Rows whose logits are edited or whose log-probabilities are wanted get from graphs what launched kernels give them, to the last
bit. A stand-in for a graph runs the captured work again, as a replay would."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import edited_graphs, graphs
from engine.cuda.edited_graphs import EditedGraphs
from engine.cuda.graph_room import GraphRoom
from engine.cuda.model import CudaModel
from engine.grammar.row_masks import LockedMasks, RowMasks
from engine.protocol import SamplingParams
from scheduler.batch.plan import BatchPlan, write_sampling
from tests.engine.cuda_bench import INTERPRETED, PROMPT, load_cuda_model
from tests.engine.model_bench import MAX_LEN, make_checkpoint, make_table, plan, put
from tests.engine.stand_in_graphs import StandInGraph, remember_steps, stand_in_graphs

__all__ = ["stand_in_graphs"]  # a fixture
pytestmark = INTERPRETED
VOCAB = 211
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.7, "repetition_penalty": 1.3},
    "bias": {"logit_bias": {4: 3.0, 200: 2.5}},
    "min_tokens": {"min_tokens": 80, "stop_token_ids": [7, 9]},
    "log-probabilities": {"logprobs": 3},
    "many": {"repetition_penalty": 1.2, "logit_bias": {9: 4.0}, "min_tokens": 80, "stop_token_ids": [9], "logprobs": 20},
    "mask": {},
    "mask and more": {"frequency_penalty": 0.4, "logprobs": 0},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_checkpoint(folder, kind="qwen2", num_hidden_layers=1)
    return folder


def results(
    model: CudaModel, mix: list[str], with_prompts: bool = False, num_steps: int = 3, are_locked: bool = False
) -> list[Any]:
    """Returns the ids, flags and log-probabilities of steps in which the rows ask for what `mix` names. with_prompts: every second
    step has a piece of one more prompt. are_locked: whether masks lie in page-locked memory."""
    random_bits, table = np.random.default_rng(7), make_table(groups=model.kv_groups)
    table.request_id[:] = np.arange(100, 100 + len(table.request_id))
    for slot, kind in enumerate(mix):
        put(table, slot, PROMPT[slot : slot + 5])
        params = SamplingParams(90, temperature=0.9 * (slot % 2), top_p=0.9, top_k=40 * (slot % 3), seed=slot, **SETTINGS[kind])
        write_sampling(table, slot, params, 5, MAX_LEN)
    put(table, len(mix), PROMPT)
    table.num_prompt[: len(mix)], table.num_prompt[len(mix)] = 5, len(PROMPT)
    model.execute(plan(*((slot, 0, 5) for slot in range(len(mix)))), table)
    masked = [row for row, kind in enumerate(mix) if kind.startswith("mask")]
    told = []
    for at in range(num_steps):
        rows, samples = [(slot, 5 + at, 1) for slot in range(len(mix))], [True] * len(mix)
        if with_prompts and at % 2:
            rows, samples = [*rows, (len(mix), 3 * at, 3)], [*samples, False]
        bits = random_bits.integers(0, 2**32, (len(masked), -(-VOCAB // 32)), np.uint32)
        masks = RowMasks([1] * len(masked), np.array(masked, np.intp), list(bits)) if masked else None
        if masks is not None and are_locked:
            masks.locked, masks.places = LockedMasks(bits), np.arange(len(masked), dtype=np.int32)
        result = model.execute(plan(*rows, samples=tuple(samples)), table, masks)
        table.tokens[: len(mix), 5 + at + 1], table.num_tokens[: len(mix)] = result.ids, 5 + at + 2
        told.append((result.ids.tolist(), result.bad.tolist(), result.logprobs))
    return told


MIXES = [
    ["penalties", "nothing"],
    ["mask", "mask"],
    ["log-probabilities", "log-probabilities", "log-probabilities"],
    ["many", "nothing", "bias", "mask and more", "min_tokens", "penalties"],
    ["nothing", "bias", "log-probabilities", "nothing", "mask"],
    ["nothing", "nothing"],
]


def test_replays_give_what_launches_give(folder: Path, stand_in_graphs: None) -> None:
    """Graphs replay steps of decoding alone and steps with a piece of a prompt, both after a capture."""
    launched = load_cuda_model(folder, max_graph_rows=8, max_graph_tokens=16)
    model = load_cuda_model(folder, max_graph_rows=8, max_graph_tokens=16)
    replayed: list[tuple[int, bool]] = []
    launched.edited_graphs._most_rows = 0
    for each in (launched, model):
        remember_steps(each)
        while each.num_uncaptured:
            each.capture_next()
    replay, execute, steps = model.edited_graphs.replay, model.execute, list[BatchPlan]()

    def counted(size: int, *arguments: Any) -> Any:
        replayed.append((size, len(steps[-1].slots) > len(mix)))
        return replay(size, *arguments)

    def noted(step: BatchPlan, *arguments: Any) -> Any:
        steps.append(step)
        return execute(step, *arguments)

    model.edited_graphs.replay = counted  # type: ignore[method-assign]
    model.execute = noted  # type: ignore[method-assign]
    for mix in MIXES:
        replayed.clear()
        assert results(model, mix, True) == results(launched, mix, True), mix
        asking = len(mix) - mix.count("nothing")
        # a size is captured when a step needs it for the second time
        assert {with_prompt for _, with_prompt in replayed} == ({False, True} if asking else set())
        # a step without a graph of its own samples none of its rows, and all of them are edited then
        assert {size for size, _ in replayed} <= {edited_graphs.edited_rows(asking), edited_graphs.edited_rows(len(mix))}


def test_replays_read_masks_from_page_locked_memory(folder: Path, stand_in_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = (load_cuda_model(folder, max_graph_rows=8) for _ in range(2))
    spans: list[int] = []
    replay = EditedGraphs.replay

    def noted(self: Any, size: int, columns: Any, *arguments: Any) -> Any:
        locked = [group for group in columns["words"] if group.is_locked]
        spans.extend(group.num_words for group in locked if isinstance(group.arrays[0], np.ndarray))  # a tensor holds tokens
        return replay(self, size, columns, *arguments)

    for each in (plain, model):
        remember_steps(each)
        results(each, ["mask and more", "nothing", "mask", "many"])
    monkeypatch.setattr(EditedGraphs, "replay", noted)
    for mix in (["mask", "mask"], ["many", "nothing", "bias", "mask and more", "mask", "penalties"]):
        wanted = results(plain, mix, True)
        assert not spans
        assert results(model, mix, True, are_locked=True) == wanted, mix
        assert set(spans) == {2 * -(-VOCAB // 32)}
        spans.clear()


def test_idle_time_captures_once_a_step_had_edits(folder: Path, stand_in_graphs: None) -> None:
    model = load_cuda_model(folder, max_graph_rows=8)
    remember_steps(model)
    while model.num_uncaptured:
        model.capture_next()
    assert not model.edited_graphs.captured
    results(model, ["penalties"], num_steps=1)
    assert list(model.edited_graphs.captured) == [1], "it was needed twice, by the prompt's end and by the step after it"
    while model.num_uncaptured:
        model.capture_next()
    assert list(model.edited_graphs.captured) == [1, 2, 4, 8]
    assert model.edited_graphs.kept_bytes > 1 << 20
    model.drop_graphs()
    assert (dict(model.edited_graphs.captured), model.edited_graphs.kept_bytes) == ({}, 0)


def test_what_is_too_much_for_a_graph_is_launched(folder: Path, stand_in_graphs: None, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = load_cuda_model(folder)
    model = load_cuda_model(folder, max_graph_rows=8)
    remember_steps(model)
    monkeypatch.setattr(EditedGraphs, "replay", None)
    monkeypatch.setattr(edited_graphs, "MOST_TOP", 2)
    model.edited_graphs._num_words = 3
    for mix in (["penalties"] * 3, ["mask"] * 2):
        assert [each[0] for each in results(model, mix)] == [each[0] for each in results(plain, mix)]
    assert not model.edited_graphs.captured


def test_a_capture_without_memory_leaves_the_launches(
    folder: Path, stand_in_graphs: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    plain, model = load_cuda_model(folder), load_cuda_model(folder, max_graph_rows=8)
    remember_steps(model)

    def refuse(columns: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    model.edited_graphs._step = refuse
    told = results(model, ["many", "bias"])
    assert [each[0] for each in told] == [each[0] for each in results(plain, ["many", "bias"])]
    assert not model.edited_graphs.captured
    assert "steps of 2 rows with edited logits or log-probabilities have no graph" in caplog.text


def test_they_count_in_the_room_for_graphs_and_go_with_evicted_models(
    folder: Path, stand_in_graphs: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "_room", GraphRoom(5))
    model, other = (load_cuda_model(folder, max_graph_rows=8) for _ in range(2))
    for size in (1, 2, 4):
        assert model.edited_graphs.capture_size(size)
    model.release()
    for size in (1, 2):
        assert other.edited_graphs.capture_size(size)
    assert list(model.edited_graphs.captured) == [1, 2, 4]
    assert other.edited_graphs.capture_size(4)
    assert not model.edited_graphs.captured
    assert list(other.edited_graphs.captured) == [1, 2, 4]
    StandInGraph.captured.clear()
