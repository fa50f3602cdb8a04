"""Decoders that embed texts: a text's vector is the one that transformers' hidden states give, however its steps are cut and
whatever runs beside it. The engine holds nothing of a text once it is answered.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.cpu.model import CpuModel
from engine.cuda.mixed_graphs import MixedGraphs
from engine.cuda.mixed_steps import MixedSize
from engine.protocol import Abort, EmbeddingsOut, LoadDone, LoadStreams, RequestFailed, SamplingParams, Submit, TokensOut
from tests.engine.cuda_bench import INTERPRETED, load_cuda_model
from tests.engine.embedder_checkpoint import expected, make_embedder
from tests.engine.engine_process import load_message
from tests.engine.first_step.bench import Bench
from tests.engine.model_bench import CASES, MAX_LEN, make_checkpoint, make_table, plan, put
from tests.engine.stand_in_graphs import remember_steps, stand_in_graphs

__all__ = ["stand_in_graphs"]  # a fixture

TOLERANCE = 2e-4
STEP_TOKENS = 64  # of the bench's steps
LENGTHS = (1, 2, 17, 64, 65, 33, 5, MAX_LEN)
TEXTS = [np.random.default_rng(at).integers(0, 211, length).tolist() for at, length in enumerate(LENGTHS)]
# as Qwen3-Embedding, e5-mistral and a text generator with pooling files are published
FOLDERS: dict[str, dict[str, Any]] = {
    "qwen3": {"case": "qwen3", "bare": True, "tie_word_embeddings": True},
    "mistral": {"case": "mistral-window", "bare": True, "architecture": "MistralModel"},
    "llama": {"case": "llama"},
}


@pytest.fixture(scope="module", params=FOLDERS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_embedder(folder, **FOLDERS[request.param])


@pytest.fixture
def bench(made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(made[0], monkeypatch)


def ask(bench: Bench, texts: dict[int, list[int]], **changes: Any) -> None:
    for request_id, text in texts.items():
        bench.engine._handle(Submit(request_id, "m", text, SamplingParams(max_tokens=0), task="embed", **changes))


def vectors(bench: Bench) -> dict[int, np.ndarray]:
    return {
        request_id: np.frombuffer(value, "<f4")
        for out in bench.channel.sent
        if isinstance(out, EmbeddingsOut)
        for request_id, value in zip(out.request_ids, out.values, strict=True)
    }


def check(found: dict[int, np.ndarray], wanted: dict[int, np.ndarray]) -> None:
    assert found.keys() >= wanted.keys()
    for request_id, vector in wanted.items():
        assert np.abs(found[request_id] - vector).max() < TOLERANCE, request_id


def test_vectors_equal_transformers(bench: Bench, made: tuple[Path, Any]) -> None:
    wanted = {at: expected(made[1], text) for at, text in enumerate(TEXTS, 1)}
    assert np.abs(wanted[1] - wanted[2]).max() > 0.05, "the vectors are too alike to tell anything"
    bench.load()
    bench.until(LoadDone)
    for turn, salt in enumerate(("", "another", "")):  # computed, by recorded steps, and from what the first left in the cache
        asked = {100 * turn + at: text for at, text in enumerate(TEXTS, 1)}
        ask(bench, asked, cache_salt=salt)
        bench.pump(lambda asked=asked: asked.keys() <= vectors(bench).keys())
        check({request_id % 100: vector for request_id, vector in vectors(bench).items() if request_id // 100 == turn}, wanted)
    ask(bench, {1000: TEXTS[4]}, cache_salt="alone")
    bench.pump(lambda: 1000 in vectors(bench))
    check(vectors(bench), {1000: wanted[5]})
    outs = [out for out in bench.channel.sent if isinstance(out, EmbeddingsOut)]
    assert sum(out.steps for out in outs) >= 2 * sum(LENGTHS) // STEP_TOKENS
    assert not [out for out in bench.channel.sent if isinstance(out, TokensOut)]
    served = bench.engine.models.by_name["m"]
    assert isinstance(served.hosted, CpuModel)
    assert served.hosted._steps.chunks, "no step was recorded"
    assert not served.hosted._steps.decodes
    assert not served.hosted._steps.heads, "logits were computed"
    stats = bench.engine.models.stats(0).models["m"]
    assert stats[:3] == [0, 0, 0], "something of a text is held"


def test_beside_a_model_that_generates(bench: Bench, made: tuple[Path, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "g", **CASES["qwen2"])
    bench.load()
    bench.until(LoadDone)
    bench.engine._handle(
        load_message(
            str(tmp_path / "g"), "g", 2, fingerprint="", weights_chunks=12, kv_reserved_chunks=4, lease_chunks=64, max_sequences=8
        )
    )
    bench.pump(lambda: len([each for each in bench.channel.sent if isinstance(each, LoadDone)]) == 2)

    def generate(request_id: int) -> None:
        bench.engine._handle(Submit(request_id, "g", TEXTS[2], SamplingParams(24, temperature=0.0, ignore_eos=True)))

    def tokens(request_id: int) -> list[int]:
        outs = [out for out in bench.channel.sent if isinstance(out, TokensOut) and request_id in out.request_ids]
        return [out.ids[out.request_ids.index(request_id)] for out in outs]

    generate(501)
    bench.pump(lambda: len(tokens(501)) == 24)
    generate(502)
    bench.pump(lambda: len(tokens(502)) > 2)
    asked = dict(enumerate(TEXTS * 2, 1))
    ask(bench, asked)
    bench.pump(lambda: asked.keys() <= vectors(bench).keys() and len(tokens(502)) == 24)
    assert tokens(502) == tokens(501)
    check(vectors(bench), {at: expected(made[1], text) for at, text in asked.items()})


def test_a_text_is_computed_behind_the_weights(bench: Bench, made: tuple[Path, Any]) -> None:
    bench.allow(1)
    bench.load()
    bench.until(LoadStreams)
    ask(bench, {1: TEXTS[-1], 2: TEXTS[2]})
    bench.until_waits_for(2)
    assert not vectors(bench)
    bench.allow(99)
    bench.until(LoadDone)
    bench.pump(lambda: len(vectors(bench)) == 2)
    check(vectors(bench), {1: expected(made[1], TEXTS[-1]), 2: expected(made[1], TEXTS[2])})


class Ahead:
    """Makes a model that launches steps ahead of one that does not."""

    name, num_uncaptured = "m", 0

    def __init__(self, hosted: Any) -> None:
        self._hosted = hosted

    def capture_next(self) -> None:
        """Does nothing: nothing is left to capture."""

    def launch(self, *step: Any) -> Any:
        result = self._hosted.execute(*step)
        return SimpleNamespace(wait=lambda: result)


@pytest.mark.parametrize("made", ["qwen3"], indirect=True)
def test_steps_that_are_launched_ahead(bench: Bench, made: tuple[Path, Any]) -> None:
    """Requests that end are not in the step that was launched meanwhile, and others take their slots."""
    bench.load(max_sequences=3)
    bench.until(LoadDone)
    served = bench.engine.models.by_name["m"]
    served.ahead = Ahead(served.hosted)
    asked = dict(enumerate(TEXTS * 3, 1))
    ask(bench, asked)
    bench.engine._handle(Abort([4, 12]))
    bench.pump(lambda: len(vectors(bench)) == len(asked) - 2)
    check(vectors(bench), {at: expected(made[1], text) for at, text in asked.items() if at not in (4, 12)})


@pytest.mark.parametrize("made", ["qwen3"], indirect=True)
def test_matrices_rounded_to_int8(bench: Bench, made: tuple[Path, Any]) -> None:
    bench.load(quantize="int8")
    bench.until(LoadDone)
    ask(bench, dict(enumerate(TEXTS[2:4], 1)))
    bench.pump(lambda: len(vectors(bench)) == 2)
    for at, text in enumerate(TEXTS[2:4], 1):
        assert 0.9 < float(vectors(bench)[at] @ expected(made[1], text)) < 1 - 1e-6


@pytest.mark.parametrize("made", ["qwen3"], indirect=True)
@pytest.mark.parametrize(
    ("text", "task", "told"),
    [
        ([1] * (MAX_LEN + 1), "embed", "129 prompt tokens are more than max_model_len 128"),
        ([], "embed", "the prompt is empty"),
        ([211], "embed", "below vocab_size 211"),
        ([1], "generate", "does not do task generate"),
    ],
)
def test_what_cannot_be_embedded_is_refused(bench: Bench, text: list[int], task: str, told: str) -> None:
    bench.load()
    bench.until(LoadDone)
    bench.engine._handle(Submit(1, "m", text, SamplingParams(max_tokens=4), task=task))
    assert told in bench.until(RequestFailed).error


@pytest.mark.parametrize("made", ["qwen3"], indirect=True)
def test_a_vector_that_is_not_finite_fails_its_request_alone(bench: Bench, made: tuple[Path, Any]) -> None:
    bench.load()
    bench.until(LoadDone)
    served = bench.engine.models.by_name["m"]
    forward = served.hosted._forward  # type: ignore[attr-defined]

    def spoilt(*args: Any, **options: Any) -> Any:
        hidden, num = forward(*args, **options)
        hidden = hidden.clone()
        hidden[0, 3] = np.nan
        return hidden, num

    served.hosted._forward = spoilt  # type: ignore[attr-defined]
    ask(bench, {1: TEXTS[2], 2: TEXTS[1]})
    failed = bench.until(RequestFailed)
    assert (failed.code, failed.error) == ("nan_logits", "model m: the vector is not finite")
    bench.pump(lambda: vectors(bench))
    assert {failed.request_id, *vectors(bench)} == {1, 2}


class TestOnAGPU:
    pytestmark = INTERPRETED

    def test_vectors_equal_transformers(self, tmp_path: Path, stand_in_graphs: Any) -> None:
        """Vectors are those of transformers from steps that launch their kernels, and from graphs of both kinds."""
        pytest.importorskip("triton")
        reference = make_embedder(tmp_path, "qwen3", bare=True, num_hidden_layers=1)
        model, (first, second) = load_cuda_model(tmp_path, max_graph_rows=1), (TEXTS[2][:9], TEXTS[5][:6])
        size = MixedSize(12, 2, 9)
        model.mixed_graphs = MixedGraphs(model.compute_mixed, model._staging, model._device, [size])
        remember_steps(model)
        model.capture(1)
        table = make_table(groups=model.kv_groups)
        for slot, text in enumerate((first, second, first, second)):
            put(table, slot, text)
        told = [
            (model.execute(plan((0, 0, 5), (1, 0, 6), samples=(False, True)), table), second),
            (model.execute(plan((0, 5, 3), samples=(False,)), table), None),
            (model.execute(plan((0, 8, 1)), table), first),
        ]
        assert (list(model.graphs.captured), list(model.mixed_graphs.captured)) == ([1], [])
        assert model.capture_mixed(size)
        told += [
            (model.execute(plan((2, 0, 9), (3, 0, 2), samples=(True, False)), table), first),
            (model.execute(plan((3, 2, 4)), table), second),
        ]
        for result, text in told:
            assert result.vectors is not None
            assert (result.vectors.shape, len(result.ids)) == ((text is not None, 48), text is not None)
            if text is not None:
                assert np.abs(result.vectors[0] - expected(reference, text)).max() < TOLERANCE
