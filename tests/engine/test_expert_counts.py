"""What experts are said to have computed is what their router chose, and nothing else: no padding, no warming, no capture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from engine.cpu.model import CpuModel
from engine.loading.runner import TorchRunner
from loader.shapes.model_shape import Division
from loader.sizes.slices import split
from scheduler.batch.plan import SequenceTable
from tests.engine.model_bench import CASES, load, make_checkpoint, make_table, plan, put, runner_with_kernels
from tests.engine.predictor_checkpoint import make_predicting_checkpoint
from tests.engine.rank_processes import Rank, RankGroup
from tests.engine.split_models import How, drawn_copies, load_share, shape_of, table_of
from tests.engine.stand_in_graphs import remember_steps, stand_in_graphs

__all__ = ["stand_in_graphs"]  # a fixture

PROMPT, OTHER = (np.random.default_rng(seed).integers(2, 211, 40).tolist() for seed in (5, 6))
LENGTHS = (40, 17)  # of these, so many tokens are computed
MIXTURES = ("mixtral", "qwen3-moe", "glm4-moe", "deepseek-v2-groups", "gpt-oss", "llama4", "gemma4", "qwen3.5-moe")


runner = pytest.fixture(scope="module")(runner_with_kernels)


def chosen_by(whole: Any, *prompts: list[int]) -> dict[int, list[int]]:
    """Returns how many of the prompts' tokens each expert of each layer gets from transformers' routers."""
    found: dict[int, torch.Tensor] = {}
    hooks = []
    for name, module in whole.named_modules():
        if name.endswith((".mlp.gate", ".router")):
            layer = int(name.split("layers.")[1].split(".")[0])

            def count(_module: Any, _read: Any, made: Any, layer: int = layer) -> None:
                num_experts = made[0].shape[1]
                chosen = made[2].flatten() if len(made) == 3 else torch.where(made[0])[1]  # llama4: what is not 0
                found[layer] = found.get(layer, 0) + torch.bincount(chosen, minlength=num_experts)

            hooks.append(module.register_forward_hook(count))
    with torch.inference_mode():
        for prompt in prompts:
            whole(torch.tensor([prompt]))
    for hook in hooks:
        hook.remove()
    return {layer: counts.tolist() for layer, counts in sorted(found.items())}


def news(model: Any, wait: bool = True) -> dict[int, list[int]]:
    counts = model.expert_counts
    new = counts.news(wait)
    return {} if new is None else dict(zip(counts.layers, new.tolist(), strict=True))


def run_steps(model: Any, table: SequenceTable) -> None:
    """Computes LENGTHS tokens of the two prompts: in chunks, in mixed steps, and one at a time, most with padding."""
    put(table, 2, PROMPT)
    put(table, 5, OTHER)
    for step in (plan((2, 0, 30)), plan((2, 30, 1), (5, 0, 11)), *(plan((2, at, 1), (5, at - 20, 1)) for at in range(31, 37))):
        model.execute(step, table)
    model.execute(plan((2, 37, 3)), table)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "reference"])
@pytest.mark.parametrize("family", MIXTURES)
def test_each_pair_counts_once(
    runner: TorchRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, compiled: bool
) -> None:
    whole = make_checkpoint(tmp_path, **CASES[family])
    model = load(runner, tmp_path)
    if not compiled:
        monkeypatch.setattr(model._ops, "kernels", None)
    run_steps(model, make_table(groups=model.kv_groups))
    wanted = chosen_by(whole, PROMPT[: LENGTHS[0]], OTHER[: LENGTHS[1]])
    assert len(wanted) > 1 or family == "glm4-moe"
    assert news(model) == wanted
    assert model.expert_counts is not None
    assert model.expert_counts.news(wait=True) is None, "nothing was computed since"
    run_steps(model, make_table(groups=model.kv_groups))
    assert news(model) == wanted, "recorded steps add to the same counts"
    model.release()


def test_a_recording_that_computes_nothing_counts_nothing(runner: TorchRunner, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, **CASES["qwen3-moe"])
    model = load(runner, tmp_path)
    table = make_table(groups=model.kv_groups)
    run_steps(model, table)
    assert news(model)
    assert model.num_uncaptured
    while model.num_uncaptured:
        model.capture_next()
    assert news(model) == {}
    model.release()


def test_a_model_that_comes_back_counts_on(runner: TorchRunner, tmp_path: Path) -> None:
    """Its recorded steps add to where they always did."""
    make_checkpoint(tmp_path, **CASES["mixtral"])
    model = load(runner, tmp_path, name="back")
    table = make_table(groups=model.kv_groups)
    run_steps(model, table)
    first = news(model)
    model.release()
    again = load(runner, tmp_path, name="back")
    assert again is model
    assert news(again) == {}
    run_steps(again, make_table(groups=again.kv_groups))
    assert news(again) == first
    again.release()


def test_a_model_without_experts_counts_nothing(runner: TorchRunner, tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    model = load(runner, tmp_path)
    assert model.expert_counts is None
    model.release()


def test_a_layer_that_drafts_counts_as_the_one_behind_the_last(runner: TorchRunner, tmp_path: Path) -> None:
    make_predicting_checkpoint(tmp_path, "glm4-moe")
    model = load(runner, tmp_path, speculator="mtp")
    table = make_table(groups=model.kv_groups)
    put(table, 2, PROMPT)
    model.execute(plan((2, 0, 20)), table)
    last = model.shape.num_layers
    first = news(model)
    assert sum(first[1]) == 20 * 4
    assert sum(first[last]) == 0, "no step asked it to draft"
    model.execute(replace(plan((2, 20, 10)), to_propose=np.array([3], np.int32)), table)
    second = news(model)
    assert sum(second[1]) == 10 * 4
    assert sum(second[last]) == (10 + 2) * 4, "it reads the step's tokens, then two of the three that it drafts"
    model.release()


# ---- split models


def counts_of_steps(own: Rank, family: str, dtype: str, how: How, whole: bool = False) -> dict[int, list[int]] | None:
    """Returns what a rank counts in some steps; None if it counts nothing."""
    model: CpuModel = load_share(own, family, dtype, how, whole)
    table = table_of(model)
    for step in (plan((2, 0, 20), (3, 0, 9)), plan((2, 20, 1), (3, 9, 30)), plan((2, 21, 1), (3, 39, 1))):
        model.logits(step, table)
    return None if model.expert_counts is None else news(model)


def of_one_device(group: RankGroup, family: str) -> dict[int, list[int]]:
    group.renew()
    group.start(counts_of_steps, family, "float32", How(), True, ranks=[0])
    counts: dict[int, list[int]] = group.results(ranks=[0])[0]
    group.renew()
    return counts


@pytest.mark.parametrize("family", ["mixtral", "qwen2-moe"])
def test_each_rank_counts_its_own_experts(family: str) -> None:
    two = RankGroup(2)
    whole = of_one_device(two, family)
    assert {sum(row) for row in whole.values()} == {62 * (2 if family == "mixtral" else 3)}
    for hows in ((How(expert_parts=2),) * 2, (How(expert_parts=2), How(compiled=False, recorded=False, expert_parts=2))):
        first, second = two.run(counts_of_steps, family, "float32", list(hows))
        assert {layer: first[layer] + second[layer] for layer in first} == whole
        two.renew()
    two.close()


def test_an_expert_of_several_ranks_counts_on_the_first() -> None:
    two = RankGroup(2)
    whole = of_one_device(two, "qwen2-moe")
    assert two.run(counts_of_steps, "qwen2-moe", "float32", [How(), How()]) == [whole, None]
    two.close()


@pytest.mark.parametrize("family", ["mixtral", "gpt-oss"])
def test_each_rank_counts_what_it_computes_with_copies(family: str) -> None:
    two = RankGroup(2)
    whole = of_one_device(two, family)
    shape = shape_of(family, "float32")
    experts, copies = shape.experts, drawn_copies(shape, 2, 1)
    assert experts is not None
    how = How(expert_parts=2, copies=copies)
    for hows in ((how, how), (how, replace(how, compiled=False, recorded=False))):
        every = two.run(counts_of_steps, family, "float32", list(hows))
        assert {layer: np.add(*(one[layer] for one in every)).tolist() for layer in whole} == whole
        for layer, total in whole.items():
            for part, counts in enumerate(one[layer] for one in every):
                (copy,) = copies[layer][part]
                assert counts[copy] > 0 or total[copy] < 4
                assert abs(counts[copy] - total[copy] / 2) < max(4.0, total[copy] / 4), "its tokens are divided evenly"
                home = range(part * experts.num_experts // 2, (part + 1) * experts.num_experts // 2)
                assert all(expert in home or expert == copy or not counts[expert] for expert in range(experts.num_experts))
        two.renew()
    two.close()


def test_which_ranks_count() -> None:
    from engine.layers.expert_counts import has_counts

    shape = shape_of("qwen2-moe", "float32")
    divisions = {Division(4, 2): [0, 2], Division(4, 4): [0, 1, 2, 3], Division(4): [0], Division(4, 2, 2): [0, 1, 2, 3]}
    for division, counting in divisions.items():
        assert [rank for rank in range(4) if has_counts(split(shape, rank, division))] == counting
    assert has_counts(shape)
    assert not has_counts(shape_of("llama", "float32"))


# ---- on a GPU, with interpreted kernels


def interpreted(folder: Path, **options: Any) -> Any:
    pytest.importorskip("triton")
    from tests.engine.cuda_bench import load_cuda_model

    return load_cuda_model(folder, **options)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy warns of infinities, a GPU does not
@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU kernels are not interpreted")
def test_neither_warming_nor_captures_nor_padding_count(tmp_path: Path, stand_in_graphs: SimpleNamespace) -> None:
    whole = make_checkpoint(tmp_path, **(CASES["qwen3-moe"] | {"num_hidden_layers": 2}))
    model = interpreted(tmp_path, max_graph_rows=4, max_graph_tokens=16)
    remember_steps(model)
    model.launch_all()
    for num_rows in (1, 2, 4):
        assert model.capture(num_rows) == num_rows
    while model.num_uncaptured:
        model.capture_next()
    assert news(model) == {}
    row = model._model.layers[1].mlp.experts.counts
    table = make_table(groups=model.kv_groups)
    for slot, tokens in ((0, PROMPT), (1, OTHER), (4, PROMPT)):
        put(table, slot, tokens)
    for step in (plan((0, 0, 5), (1, 0, 2), (4, 0, 3)), plan((0, 5, 1), (1, 2, 1), (4, 3, 1)), plan((0, 6, 1), (1, 3, 6))):
        model.execute(step, table)
    assert news(model) == chosen_by(whole, PROMPT[:7], OTHER[:9], PROMPT[:4])
    model.release()
    model.restore()
    again = model._model.layers[1].mlp.experts.counts
    assert again.data_ptr() == row.data_ptr(), "graphs hold the address"


class Fence:
    """Stands in for a point on a CUDA stream."""

    made: list[Fence]

    def __init__(self, stream: object) -> None:
        self.passed = self.waited = False
        self.made.append(self)

    def done(self) -> bool:
        return self.passed

    def wait(self) -> None:
        self.waited = True


def test_a_gpu_tells_counts_when_a_copy_of_them_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from engine.cuda import expert_counts

    Fence.made = []
    monkeypatch.setattr(expert_counts, "EventFence", Fence)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda device: None)
    counts = expert_counts.DeviceExpertCounts(shape_of("qwen2-moe", "float32"), torch.device("cpu"))
    counts._is_cuda = True
    row = counts.row(2)
    row += torch.tensor([1, 0, 3, 0])
    assert counts.news(wait=False) is None, "the copy is under way"
    row[0] += 5
    assert counts.news(wait=False) is None
    Fence.made[0].passed = True
    new = counts.news(wait=False)
    assert new is not None
    assert new.tolist() == [[1, 0, 3, 0]], "as they were when the copy was launched"
    assert len(Fence.made) == 1
    assert counts.news(wait=False) is None
    row[3] += 1
    new = counts.news(wait=True)
    assert new is not None
    assert new.tolist() == [[5, 0, 0, 1]], "of now, not of the copy before"
    assert [fence.waited for fence in Fence.made] == [False, False, True]
