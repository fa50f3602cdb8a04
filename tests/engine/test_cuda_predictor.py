"""The predictor of the GPU's model, with its kernels interpreted: drafts are those of transformers' parts and those of the CPU's
model, and steps are launched ahead where no drafts are awaited.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.contracts.steps import StepResult
from engine.cpu.model import CpuModel
from engine.cuda import graphs, mixed_steps
from engine.cuda.model import CudaModel
from engine.protocol import EAGLE3, MTP, LoadModel, SamplingParams
from engine.serve.kv_caches import make_kv_cache
from scheduler.batch import proposals
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.plan import BatchPlan
from scheduler.batch.prompt_lookup import looked_up
from scheduler.batch.request import BatchRequest
from scheduler.batch.steps_ahead import TokensNeeded
from tests.engine.cuda_bench import INTERPRETED, OTHER, PROMPT, load_cuda_model
from tests.engine.drafting_steps import check_drafts
from tests.engine.eagle_checkpoint import make_head
from tests.engine.model_bench import CASES, CHUNK_BYTES, MAX_LEN, load, make_checkpoint, make_memory, make_runner
from tests.engine.predictor_checkpoint import make_predicting_checkpoint
from tests.engine.stand_in_graphs import remember_steps, stand_in_graphs

__all__ = ["stand_in_graphs"]  # a fixture

pytest.importorskip("triton")
pytestmark = INTERPRETED

SMALL: dict[str, Any] = {  # interpreted, more takes long
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
TEXTS = {2: PROMPT[:6], 5: OTHER[:8]}


def test_drafts_are_those_of_transformers_parts(tmp_path: Path) -> None:
    """Also where the host samples."""
    reference = make_predicting_checkpoint(tmp_path, "glm4-moe", **SMALL)
    check_drafts(load_cuda_model(tmp_path, speculator=MTP), reference, TEXTS, edited=5)


def test_drafts_of_a_head(tmp_path: Path) -> None:
    """The head is an EAGLE-3 head, whose rotary angles differ from its model's."""
    small = {name: SMALL[name] for name in ("num_attention_heads", "num_key_value_heads")} | {"num_hidden_layers": 3}
    model = make_checkpoint(tmp_path / "model", **CASES["llama"] | small)
    reference = make_head(tmp_path / "head", "specforge", model)
    loaded = load_cuda_model(tmp_path / "model", speculator=EAGLE3, head=str(tmp_path / "head"))
    check_drafts(loaded, reference, TEXTS)


def test_drafts_behind_graphs(tmp_path: Path, stand_in_graphs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With latent attention. Graphs of decode steps and of steps with prompts leave the hidden states of all tokens."""
    reference = make_predicting_checkpoint(tmp_path, "deepseek-v3", **SMALL)
    for name, value in (("TOKENS", (15,)), ("ROWS", (4,)), ("PROMPTS", 3)):
        monkeypatch.setattr(mixed_steps, name, value)
    monkeypatch.setattr(graphs, "WARM_UP_STEPS", 1)
    model = load_cuda_model(tmp_path, max_graph_rows=8, max_graph_tokens=15, speculator=MTP)
    remember_steps(model)
    for size in model.mixed_graphs.missing():
        model.capture_mixed(size)
    for num_rows in (2, 8):
        model.capture(num_rows)
    monkeypatch.setattr(model, "_forward", lambda step: pytest.fail("a step without a graph"))
    check_drafts(model, reference, TEXTS)
    assert sorted(model.graphs.captured) == [2, 8]


class Texts:
    """Requests that run together on a model whose predictor drafts. output: the text of each. drafts: what was drafted behind so
    many tokens of each. num_ahead: steps that were launched before the last one's tokens were read."""

    def __init__(self, model: CpuModel | CudaModel) -> None:
        self._model = model
        spec = LoadModel(1, "tiny", "", "float32", "f", 0, 30, 20, MAX_LEN, 8, [], speculator=MTP)
        kv = make_kv_cache(spec, model.kv_groups, ChunkPool(30, CHUNK_BYTES, 20), 6)
        limits = BatchLimits(8, MAX_LEN, 6, (), "f", "float32")
        self._scheduler = BatchScheduler("tiny", kv, limits, looked_up, has_predictor=True)
        self.output: dict[int, list[int]] = {1: [], 2: []}
        self.drafts: dict[tuple[int, int], list[int]] = {}
        self.num_ahead = 0
        requests = {1: SamplingParams(4, temperature=0.0), 2: SamplingParams(5, temperature=0.8, seed=4, min_tokens=3)}
        for request_id, params in requests.items():
            prompt = np.array(PROMPT[:14] if request_id == 1 else OTHER[:8], np.int32)
            self._scheduler.submit(BatchRequest(request_id, prompt, len(prompt), params))

    def run(self) -> None:
        before: tuple[BatchPlan, Any] | None = None
        while True:
            now = self._start(before)
            if before is not None:
                self._take_in(before[0], before[1].wait(), now is not None)
            elif now is None:
                return
            before = now

    def _start(self, before: Any) -> tuple[BatchPlan, Any] | None:
        """Starts the next step, if one may be started now."""
        if before is not None and isinstance(self._model, CpuModel):
            return None
        try:
            step = self._scheduler.plan(0)
        except TokensNeeded:
            return None
        if step is None:
            return None
        self.num_ahead += before is not None
        if isinstance(self._model, CudaModel):
            launched: Any = self._model.launch(step, self._scheduler.table)
        else:
            result = self._model.execute(step, self._scheduler.table)
            launched = SimpleNamespace(wait=lambda: result)
        self._scheduler.start_step(step)
        return step, launched

    def _take_in(self, step: BatchPlan, result: StepResult, is_ahead: bool) -> None:
        scheduler, proposed = self._scheduler, result.proposed
        outcome = scheduler.finish_step(step, result.ids, result.bad)
        assert not outcome.bad
        told = iter(outcome.ids)
        for request_id, count in zip(outcome.request_ids, outcome.counts or [1] * len(outcome.ids), strict=True):
            self.output[request_id] += [next(told) for _ in range(count)]
        assert (proposed is None) == (step.to_propose is None)
        if proposed is None:
            return
        assert not (is_ahead and proposed.counts.any()), "a step was launched beside drafts"
        scheduler.take_proposals(proposed.slots, proposed.counts, proposed.tokens)
        for slot, count, tokens in zip(proposed.slots.tolist(), proposed.counts.tolist(), proposed.tokens.tolist(), strict=True):
            if count and scheduler.table.request_id[slot]:
                behind = int(scheduler.table.request_id[slot]), int(scheduler.table.num_tokens[slot])
                self.drafts[behind] = tokens[:count]


def test_texts_and_drafts_are_those_of_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With noise, which is that of the drafts' positions; and steps with a part of a prompt, behind which nothing is drafted, are
    launched ahead."""
    make_predicting_checkpoint(tmp_path, "glm4-moe", **SMALL)
    monkeypatch.setattr(proposals, "MOST_PROPOSED", 2)
    on_cpu = load(make_runner(make_memory()), tmp_path, eos=(), speculator=MTP)
    wanted, actual = Texts(on_cpu), Texts(load_cuda_model(tmp_path, speculator=MTP))
    for texts in (wanted, actual):
        texts.run()
    on_cpu.release()
    assert [len(text) for text in wanted.output.values()] == [4, 5]
    assert actual.output == wanted.output
    assert actual.drafts == wanted.drafts
    assert len({request_id for request_id, _ in wanted.drafts}) == 2
    assert actual.num_ahead > 0
