"""The model on a GPU: logits against the CPU's, and steps as graphs give what the same steps without give."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.cuda import mixed_graphs
from engine.cuda.model import CudaModel
from engine.protocol import MTP, SamplingParams
from scheduler.batch.plan import write_sampling
from tests.engine.cuda_bench import KINDS, OTHER, PROMPT, load_cuda_model
from tests.engine.drafting_steps import check_drafts
from tests.engine.embedder_checkpoint import expected, make_embedder
from tests.engine.model_bench import CASES, MAX_LEN, make_checkpoint, make_table, plan, put
from tests.engine.predictor_checkpoint import make_predicting_checkpoint
from tests.engine.test_cuda_adapters import make_adapter, put_adapters
from tests.engine.test_cuda_model import scheduled

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
TOLERANCE = 1e-3  # of logits up to tens, in float32
MOST_TIMES = 2.0  # as far from float32 as transformers' model is, on average, in bfloat16: of two alike experts either may count


@pytest.fixture(autouse=True)
def full_precision() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, make_checkpoint(folder, **CASES[request.param])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits(made: tuple[Path, Any], dtype: str) -> None:
    model = load_cuda_model(made[0], "cuda", dtype)
    table = make_table(groups=model.kv_groups)
    put(table, 0, PROMPT)
    put(table, 1, OTHER)
    parts = model.logits(plan((0, 0, 30), (1, 0, 20)), table, True), model.logits(plan((0, 30, 1), (1, 20, 25)), table, True)
    wanted = reference_logits(made[1])
    error = np.abs(np.concatenate(parts) - wanted)
    if dtype == "float32":
        assert error.max() < TOLERANCE
    else:
        allowed = MOST_TIMES * np.abs(reference_logits(copy.deepcopy(made[1]).to(torch.bfloat16)) - wanted)
        told = f"mean {error.mean():.4f} of {allowed.mean():.4f}, largest {error.max():.3f} of {allowed.max():.3f}"
        assert error.mean() < allowed.mean(), told
        assert error.max() < 2 * allowed.max(), told


def reference_logits(reference: Any) -> np.ndarray:
    with torch.inference_mode():
        first, second = (reference(torch.tensor([tokens])).logits[0].float().numpy() for tokens in (PROMPT, OTHER))
    return np.concatenate((first[:30], second[:20], first[30:31], second[20:45]))


def decoded(model: CudaModel, steps: int, ahead: int, adapters: tuple[int, ...] = (-1,) * 5) -> list[list[int]]:
    """Five rows, seeded and greedy, with these adapters, `ahead` steps under way at a time."""
    table = make_table(groups=model.kv_groups)
    table.adapter[:5] = adapters
    for slot in range(5):
        put(table, slot, PROMPT[slot : slot + 9])
        write_sampling(table, slot, SamplingParams(max_tokens=90, temperature=0.8 * (slot % 2), top_p=0.9, seed=slot), 9, MAX_LEN)
    ids = [model.execute(plan(*((slot, 0, 9) for slot in range(5))), table).ids.tolist()]
    pending: list[Any] = []
    for at in range(steps):
        if len(pending) == ahead:
            ids.append(pending.pop(0).wait().ids.tolist())
        pending.append(model.launch(plan(*((slot, 9 + at, 1) for slot in range(5))), table))
    return ids + [step.wait().ids.tolist() for step in pending]


def test_graphs_give_the_same_tokens_and_outlive_their_weights(made: tuple[Path, Any]) -> None:
    plain = decoded(load_cuda_model(made[0], "cuda"), 30, 1)
    model = load_cuda_model(made[0], "cuda", max_graph_rows=8)
    assert decoded(model, 30, 2) == plain
    assert list(model.graphs.captured) == [8]
    kept = model._weights.memory.clone()
    model._weights.memory.zero_()
    assert decoded(model, 30, 2) != plain
    model._weights.memory.copy_(kept)
    assert decoded(model, 30, 2) == plain
    assert list(model.graphs.captured) == [8], "captured again after a reload"


def test_experts_are_counted_in_graphs_as_without(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["qwen3-moe"])
    found = []
    for rows in (0, 8):
        model = load_cuda_model(tmp_path, "cuda", max_graph_rows=rows)
        assert model.expert_counts is not None
        model.launch_all()
        while model.num_uncaptured:
            model.capture_next()
        assert model.expert_counts.news(wait=True) is None
        decoded(model, 30, 2)
        counts = model.expert_counts.news(wait=True)
        assert counts is not None
        assert set(counts.sum(1).tolist()) == {5 * (9 + 30) * CASES["qwen3-moe"]["num_experts_per_tok"]}
        found.append(counts.tolist())
    assert found[0] == found[1]


def test_graphs_of_steps_with_pieces_of_prompts_give_the_same_tokens(
    made: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests with prompts in pieces beside rows that decode, steps launched ahead: each step is a graph."""
    plain = scheduled(load_cuda_model(made[0], "cuda"), True)
    monkeypatch.setattr(mixed_graphs, "pays", lambda device_s, launch_s: True)
    model = load_cuda_model(made[0], "cuda", max_graph_rows=8, max_graph_tokens=32)
    while model.num_uncaptured:
        model.capture_next()
    assert [size.num_tokens for size in model.mixed_graphs.captured] == [16, 32]
    monkeypatch.setattr(model, "_forward", lambda step: pytest.fail("a step without a graph"))
    assert scheduled(model, True) == plain


def test_rows_with_adapters_have_graphs_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of an adapter and of the base share steps, launched ahead, with tokens that are those of steps without graphs. Two
    adapters of the same files, at two places, give the same tokens; the base's are its own."""
    whole = make_checkpoint(tmp_path / "base", **CASES["llama"])
    adapter = make_adapter(tmp_path / "adapter", tmp_path / "base", whole, 20)
    plain = load_cuda_model(tmp_path / "base", "cuda")
    base = decoded(plain, 20, 1)
    monkeypatch.setattr(mixed_graphs, "pays", lambda device_s, launch_s: True)
    texts = []
    for model in (plain, load_cuda_model(tmp_path / "base", "cuda", max_graph_rows=8, max_graph_tokens=64)):
        put_adapters(model, [adapter, adapter], (63, 1))
        texts.append(decoded(model, 20, 2, (63, -1, 1, 63, -1)))
        while model.num_uncaptured:
            model.capture_next()
        texts.append(decoded(model, 20, 2, (1, -1, 63, 1, -1)))
    assert next(iter(model.adapted_graphs.captured)) == 8
    assert [size.num_tokens for size in model.adapted_mixed_graphs.captured] == [16, 32, 64]
    assert all(text == texts[0] for text in texts)
    for at in range(5):
        assert ([row[at] for row in texts[0]] == [row[at] for row in base]) == (at in (1, 4))


@pytest.mark.parametrize("graphs", [False, True])
def test_vectors_of_steps_launched_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, graphs: bool) -> None:
    """A step's vectors are on their way to the host before the next step's graph overwrites them."""
    monkeypatch.setattr(mixed_graphs, "pays", lambda device_s, launch_s: True)
    reference = make_embedder(tmp_path, "qwen3", bare=True)
    model = load_cuda_model(tmp_path, "cuda", max_graph_rows=8 * graphs, max_graph_tokens=32 * graphs)
    model.warm()
    while model.num_uncaptured:
        model.capture_next()
    table, texts = make_table(groups=model.kv_groups), [PROMPT[at : at + 9 + at] for at in range(6)]
    for slot, text in enumerate(texts):
        put(table, slot, text)
    under_way = [model.launch(plan((slot, 0, len(text) - 1), samples=(False,)), table) for slot, text in enumerate(texts[:3])]
    under_way += [
        model.launch(plan((slot, len(texts[slot]) - 1, 1), (slot + 3, 0, len(texts[slot + 3]))), table) for slot in range(3)
    ]
    results = [step.wait() for step in under_way]
    assert [len(result.ids) for result in results] == [0, 0, 0, 2, 2, 2]
    for slot, result in enumerate(results[3:]):
        assert result.vectors is not None
        wanted = np.stack([expected(reference, texts[slot]), expected(reference, texts[slot + 3])])
        assert np.abs(result.vectors - wanted).max() < TOLERANCE


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Yields the names of the kernels that Triton compiles inside the context."""
    from triton.runtime.jit import JITFunction

    compiled: list[str] = []
    original = JITFunction._do_compile

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        compiled.append(self.fn.__name__)
        return original(self, *args, **kwargs)

    JITFunction._do_compile = counted
    try:
        yield compiled
    finally:
        JITFunction._do_compile = original


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("case", ["glm4-moe", "deepseek-v3"])
def test_a_predictor_drafts_as_transformers_parts_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str, graphs: bool
) -> None:
    """Behind graphs and behind launched steps, also where the host samples; and nothing is compiled for it once it is warm."""
    monkeypatch.setattr(mixed_graphs, "pays", lambda device_s, launch_s: True)
    reference = make_predicting_checkpoint(tmp_path, case)
    model = load_cuda_model(tmp_path, "cuda", max_graph_rows=8 * graphs, max_graph_tokens=64 * graphs, speculator=MTP)
    model.warm()
    with compilations() as compiled:
        while model.num_uncaptured:
            model.capture_next()
        check_drafts(model, reference, {2: PROMPT[:17], 5: OTHER[:33]}, edited=5)
        check_drafts(model, reference, {5: PROMPT[:40], 2: OTHER[:9]})
    assert compiled == []


def test_nothing_is_compiled_once_it_is_warm(made: tuple[Path, Any]) -> None:
    model = load_cuda_model(made[0], "cuda", max_graph_rows=8, max_graph_tokens=64)
    model.warm()
    with compilations() as compiled:
        decoded(model, 40, 2)
        while model.num_uncaptured:
            model.capture_next()
        decoded(model, 2, 2)
    assert compiled == []
    assert sorted(model.graphs.captured) == [1, 2, 4, 8]
