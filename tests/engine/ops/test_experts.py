"""The CPU kernels of mixtures of experts give the results of their reference implementation, whatever the routing."""

from __future__ import annotations

import random as draws
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.cpu import experts as grouped_experts
from engine.cpu.products import array, four_bits
from engine.cpu.programs.program import Recorder, Scratch, recording
from engine.cpu.programs.replay import Replay
from engine.ops import reference
from engine.ops.ops import ClampedSwiglu, ExpertMatrices, Mxfp4Matrix, SigmoidRouting
from loader.shapes import expert_copies
from loader.shapes.model_shape import ExpertCopies, ExpertShape, SplitShape
from tests.engine.cpu_ops import ops
from tests.engine.gpt_oss_checkpoint import draw_mxfp4
from tests.engine.ops.twins import both, compiled_as_called, random, same, share_everything

pytest.importorskip("numba")
kernels = compiled_as_called  # in place of the folder's fixture


def layer(dtype: torch.dtype, num_experts: int, width: int, inner: int, chosen: int, normalised: bool = True) -> ExpertMatrices:
    gate_up = random(num_experts, 2 * inner, width, dtype=dtype, scale=width**-0.5)
    return ExpertMatrices(gate_up, random(num_experts, width, inner, dtype=dtype, scale=inner**-0.5), chosen, normalised)


def clamped_layer(dtype: torch.dtype, num_experts: int, width: int, inner: int, chosen: int, in_mxfp4: bool) -> ExpertMatrices:
    """Returns experts as gpt-oss has them."""
    plain = layer(dtype, num_experts, width, inner, chosen)
    biases = random(num_experts, 2 * inner, dtype=dtype), random(num_experts, width, dtype=dtype)
    gate_up, down = plain.gate_up, plain.down
    if in_mxfp4:
        generator = torch.Generator().manual_seed(width)
        sizes = ((2 * inner, width), (width, inner))
        gate_up, down = (Mxfp4Matrix(*draw_mxfp4(num_experts, *size, generator)) for size in sizes)
    return ExpertMatrices(gate_up, down, chosen, True, *biases, ClampedSwiglu(1.5, 1.702))


def batch_of(slots: Any) -> Any:
    """Returns of a step's inputs what the operation reads: the slots of its tokens, below 0 for padding."""
    return SimpleNamespace(groups=[SimpleNamespace(slots=np.asarray(slots, np.int64))])


def counted(x: Tensor, scores: Tensor, experts: ExpertMatrices, shared: Tensor | None, slots: Any) -> tuple[Tensor, Tensor]:
    """Returns the experts' output, and what they have added to the counts, in which anything may stand before."""
    before = torch.arange(experts.num_experts if experts.turns is None else experts.num_own)
    counts = before.clone()
    return ops.experts(x, scores, replace(experts, counts=counts), shared, batch_of(slots)), counts - before


@pytest.mark.parametrize("seed", range(20))
def test_any_sizes_and_any_routing(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int) -> None:
    draw = draws.Random(seed)
    ops.set_num_threads(draw.choice([1, 2]))
    share_everything(monkeypatch)
    num_experts, num_tokens = draw.choice([1, 2, 5, 16, 60, 128]), draw.choice([1, 2, 3, 7, 16, 33, 90])
    width, inner = draw.choice([16, 48, 77, 130]), draw.choice([1, 4, 24, 50, 64])
    experts = layer(dtype, num_experts, width, inner, draw.randint(1, min(8, num_experts)), draw.random() < 0.5)
    if draw.random() < 0.3:
        experts = replace(experts, gelu=True, factors=random(num_experts, dtype=dtype).abs())
    has_shared = draw.random() < 0.4
    scores = random(num_tokens, num_experts + has_shared, dtype=dtype, scale=draw.choice([0.3, 3.0])).clone()
    if draw.random() < 0.3:  # all tokens pass through the same experts
        scores[:] = scores[0].clone()
    slots = np.arange(num_tokens)
    slots[[draw.random() < 0.2 for _ in range(num_tokens)]] = -1
    x = random(num_tokens, width, dtype=dtype)
    shared = random(num_tokens, width, dtype=dtype) if has_shared else None
    (found, counts), (wanted, expected) = both(monkeypatch, lambda: counted(x, scores, experts, shared, slots))
    same(found, wanted)
    assert torch.equal(counts, expected)
    assert counts.sum() == (slots >= 0).sum() * experts.num_chosen
    assert not found[torch.from_numpy(slots) < 0].any()


def draw_rule(draw: draws.Random, num_groups: int, size: int) -> SigmoidRouting:
    """Returns a rule for num_groups groups of `size` experts, whose correction changes the choice of many tokens."""
    correction = random(num_groups * size, dtype=torch.float32, scale=0.3)
    return SigmoidRouting(correction, num_groups, draw.randint(1, num_groups), draw.choice([1.0, 2.5]), draw.random() < 0.4)


@pytest.mark.parametrize("seed", range(12))
def test_any_routing_by_sigmoid(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int) -> None:
    draw = draws.Random(seed)
    ops.set_num_threads(1)
    num_groups, size, num_tokens = draw.choice([1, 2, 3, 8]), draw.choice([2, 3, 20]), draw.choice([1, 7, 40])
    rule = draw_rule(draw, num_groups, size)
    chosen = draw.randint(1, min(8, rule.num_chosen_groups * size))
    experts = replace(layer(dtype, num_groups * size, 16, 4, chosen, draw.random() < 0.5), sigmoid=rule)
    x = random(num_tokens, 16, dtype=dtype)
    shared = random(num_tokens, 16, dtype=dtype).flip(0) if draw.random() < 0.7 else None
    router = random(num_groups * size, 16, dtype=torch.float32, scale=draw.choice([0.1, 0.5]))
    slots = np.arange(num_tokens)
    slots[[draw.random() < 0.2 for _ in range(num_tokens)]] = -1
    scores = ops.linear_float32(x, router)
    assert torch.equal(scores, x.float() @ router.T)
    (found, counts), (wanted, expected) = both(monkeypatch, lambda: counted(x, scores, experts, shared, slots))
    same(found, wanted)
    assert torch.equal(counts, expected)
    assert counts.sum() == (slots >= 0).sum() * experts.num_chosen
    assert not found[torch.from_numpy(slots) < 0].any()


@pytest.mark.parametrize(("num_groups", "num_chosen_groups", "normalised"), [(1, 1, True), (4, 2, True), (8, 3, False)])
def test_routing_by_sigmoid_is_that_of_transformers(num_groups: int, num_chosen_groups: int, normalised: bool) -> None:
    from transformers import Glm4MoeConfig
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter

    config = Glm4MoeConfig(
        hidden_size=16,
        n_routed_experts=32,
        num_experts_per_tok=6,
        n_group=num_groups,
        topk_group=num_chosen_groups,
        norm_topk_prob=normalised,
        routed_scaling_factor=2.5,
    )
    router, x = Glm4MoeTopkRouter(config), random(200, 16, dtype=torch.float32)
    correction = random(32, dtype=torch.float32, scale=0.3)
    with torch.no_grad():
        router.weight.copy_(random(32, 16, dtype=torch.float32, scale=0.5))
        router.e_score_correction_bias.copy_(correction)
        logits, weights, experts = router(x)
    chosen, found = reference.route_by_sigmoid(
        logits, 6, normalised, SigmoidRouting(correction, num_groups, num_chosen_groups, 2.5)
    )
    wanted = torch.zeros(200, 32).scatter_(1, experts, weights)
    torch.testing.assert_close(torch.zeros(200, 32).scatter_(1, chosen, found), wanted)
    plain = reference.route_by_sigmoid(logits, 6, normalised, SigmoidRouting(torch.zeros(32), 1, 1, 2.5))[0]
    assert (plain.sort().values != chosen.sort().values).any(dim=1).float().mean() > 0.3, "correction and groups change the choice"


@pytest.mark.parametrize(("num_groups", "num_chosen_groups"), [(1, 1), (4, 2), (8, 3)])
def test_routing_by_softmax_in_groups_is_that_of_transformers(num_groups: int, num_chosen_groups: int) -> None:
    from transformers import DeepseekV2Config
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter

    config = DeepseekV2Config(
        hidden_size=16,
        num_attention_heads=4,
        n_routed_experts=32,
        num_experts_per_tok=6,
        topk_method="group_limited_greedy",
        n_group=num_groups,
        topk_group=num_chosen_groups,
        routed_scaling_factor=16.0,
    )
    router, x = DeepseekV2TopkRouter(config), random(200, 16, dtype=torch.float32)
    with torch.no_grad():
        router.weight.copy_(random(32, 16, dtype=torch.float32, scale=0.5))
        logits, weights, experts = router(x)
    rule = SigmoidRouting(torch.zeros(32), num_groups, num_chosen_groups, 16.0, by_softmax=True)
    chosen, found = reference.route_by_sigmoid(logits, 6, False, rule)
    wanted = torch.zeros(200, 32).scatter_(1, experts, weights)
    torch.testing.assert_close(torch.zeros(200, 32).scatter_(1, chosen, found), wanted)
    if num_chosen_groups < num_groups:
        plain = reference.route_by_sigmoid(logits, 6, False, replace(rule, num_groups=1, num_chosen_groups=1))[0]
        assert (plain.sort().values != chosen.sort().values).any(dim=1).float().mean() > 0.3, "groups change the choice"


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("in_mxfp4", [True, False], ids=["mxfp4", "plain"])
@pytest.mark.parametrize(("num_tokens", "num_experts", "width", "inner"), [(1, 3, 96, 32), (23, 4, 64, 160), (70, 2, 544, 64)])
def test_clamped_experts_with_biases(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_tokens: int,
    num_experts: int,
    width: int,
    inner: int,
    in_mxfp4: bool,
    num_threads: int,
) -> None:
    ops.set_num_threads(num_threads)
    share_everything(monkeypatch)
    experts = clamped_layer(dtype, num_experts, width, inner, 2, in_mxfp4)
    x, scores = random(num_tokens, width, dtype=dtype), random(num_tokens, num_experts, dtype=dtype, scale=2.0)
    found, wanted = both(monkeypatch, lambda: ops.experts(x, scores, experts, None, batch_of(range(num_tokens))))
    same(found / 4, wanted / 4)  # these sums are some four times as large as other cases'


def test_mxfp4_is_widened_exactly(dtype: torch.dtype) -> None:
    """Every code with every scale but NaN, by the kernel, the reference and transformers."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks = torch.arange(256, dtype=torch.uint8).view(16, 16).repeat(255, 1, 1).view(1, 255, 16, 16)
    scales = torch.arange(255, dtype=torch.uint8).view(1, 255, 1).repeat(1, 1, 16)
    wanted = reference.mxfp4_values(blocks[0], scales[0], dtype)
    assert torch.equal(convert_moe_packed_tensors(blocks, scales, dtype=dtype)[0].T.contiguous(), wanted)
    found = torch.empty_like(wanted)
    ops.kernels.widen_four_bits(*four_bits(Mxfp4Matrix(blocks, scales)), array(found))
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 4])
def test_mxfp4_is_exact_in_products(dtype: torch.dtype, num_rows: int) -> None:
    """Every code with every scale whose numbers have exponents of their own, multiplied with 1 or -1 at one place, else with 0."""
    scales = torch.arange(2, 253, dtype=torch.uint8).view(1, -1, 1)
    num_outputs, places = scales.shape[1], (0, 1, 30, 31)[:num_rows]
    for low in range(16):
        blocks = ((torch.arange(16) + low) % 16 * 16 + low).to(torch.uint8).repeat(1, num_outputs, 1, 1)
        x, found = torch.zeros(num_rows, 32, dtype=dtype), torch.empty(num_rows, num_outputs, dtype=dtype)
        for row, place in enumerate(places):
            x[row, place] = -1.0 if row % 2 else 1.0
        firsts, bias = np.array((0, num_rows), np.int32), np.empty((1, 0), array(x).dtype)
        matrices = four_bits(Mxfp4Matrix(blocks, scales))
        ops.kernels.grouped_four_bits_linear(array(x), *matrices, bias, firsts, num_rows, 1, array(found))
        wanted = x.double() @ reference.mxfp4_values(blocks[0], scales[0], torch.float32).double().t()
        assert torch.equal(found.double(), wanted)


def test_a_weighted_sum_of_what_each_expert_makes() -> None:
    """The reference, computed once more in float64 and token by token."""
    experts = layer(torch.float32, 5, 12, 7, 2, normalised=False)
    x, scores, shared = (random(4, width, dtype=torch.float32).double() for width in (12, 6, 12))
    wanted = torch.sigmoid(scores[:, 5:]) * shared
    for token in range(4):
        weights = torch.softmax(scores[token, :5], 0)
        for expert in weights.topk(2).indices:
            gate, up = (experts.gate_up[expert].double() @ x[token]).chunk(2)
            wanted[token] += weights[expert] * (experts.down[expert].double() @ (torch.nn.functional.silu(gate) * up))
    found = ops.experts(x.float(), scores.float(), experts, shared.float(), batch_of(range(4)))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_of_equal_scores_the_lower_experts_are_chosen(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    experts = layer(dtype, 6, 16, 8, 3)
    scores = torch.tensor([[1, 2, 2, 2, 2, 0], [0, 0, 0, 0, 0, 0]]).to(dtype)
    chosen, weights = reference.route(scores, 3, True)
    assert chosen.tolist() == [[1, 2, 3], [0, 1, 2]]
    assert weights.sum(1).tolist() == pytest.approx([1.0, 1.0])
    x = random(2, 16, dtype=dtype)
    (found, counts), (wanted, expected) = both(monkeypatch, lambda: counted(x, scores, experts, None, [0, 1]))
    same(found, wanted)
    assert counts.tolist() == expected.tolist() == [1, 2, 2, 1, 0, 0]


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("by_sigmoid", [False, True])
def test_a_row_that_is_not_finite_spoils_no_other(dtype: torch.dtype, bad: float, normalised: bool, by_sigmoid: bool) -> None:
    experts = layer(dtype, 4, 16, 8, 2, normalised)
    x, scores = random(20, 16, dtype=dtype).clone(), random(20, 4, dtype=dtype).clone()
    if by_sigmoid:
        rule = SigmoidRouting(torch.zeros(4), 2, 1, 1.0)
        experts, scores = replace(experts, sigmoid=rule), scores.float()
    right = ops.experts(x, scores, experts, None, batch_of(range(20)))
    x[3], scores[3] = bad, torch.nan
    found = ops.experts(x, scores, experts, None, batch_of(range(20)))
    others = torch.arange(20) != 3
    same(found[others], right[others])
    assert not torch.isfinite(found[3]).any()


def test_experts_that_nobody_chose_are_not_read(dtype: torch.dtype) -> None:
    experts = layer(dtype, 8, 32, 16, 2)
    scores = torch.zeros(30, 8, dtype=dtype)
    scores[:, 2], scores[:20, 5], scores[20:, 7] = 2.0, 1.0, 1.0
    for unread in (0, 1, 3, 4, 6):
        experts.gate_up[unread], experts.down[unread] = torch.nan, torch.nan
    assert torch.isfinite(ops.experts(random(30, 32, dtype=dtype), scores, experts, None, batch_of(range(30)))).all()


@pytest.mark.parametrize(("num_tokens", "in_mxfp4"), [(2, False), (80, False), (2, True), (80, True)])
def test_a_recorded_step_follows_another_routing(dtype: torch.dtype, num_tokens: int, in_mxfp4: bool) -> None:
    """The calls of one step, made again, compute any other: also where experts have more rows than the grouped product takes, whose
    kernels are called by Python."""
    ops.set_num_threads(1)
    width = 64 if in_mxfp4 else 40
    experts = clamped_layer(dtype, 6, width, 32, 2, in_mxfp4) if in_mxfp4 else layer(dtype, 6, width, 24, 2)
    slots, counts = np.arange(num_tokens), torch.zeros(6, dtype=torch.int64)
    x, scores = random(num_tokens, width, dtype=dtype).clone(), random(num_tokens, 6, dtype=dtype).clone()
    recorder = Recorder(Scratch())
    with recording(recorder), torch.inference_mode():
        out: Tensor = ops.experts(x, scores, replace(experts, counts=counts), None, batch_of(slots))
    assert recorder.missed == ""
    assert counts.sum() == 2 * num_tokens
    assert len(recorder.calls) == (6 if num_tokens == 2 else 8)
    for seed in range(3):
        scores.copy_(torch.randn(scores.shape, generator=torch.Generator().manual_seed(seed)) * 2 * seed)
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        slots[-1] = -seed
        before = counts.clone()
        with torch.inference_mode():
            for call in recorder.calls:
                call.kernel(*call.args)
        wanted, new = counted(x, scores, experts, None, slots)
        same(out, wanted)
        assert torch.equal(counts - before, new)


def part_of(experts: ExpertMatrices, first: int, end: int) -> ExpertMatrices:
    """What a rank has that has the experts [first, end)."""

    def own(of_all: Any) -> Any:
        if isinstance(of_all, Mxfp4Matrix):
            return Mxfp4Matrix(of_all.blocks[first:end], of_all.scales[first:end])
        return None if of_all is None else of_all[first:end]

    whole = experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias
    gate_up, down, gate_up_bias, down_bias = map(own, whole)
    parts = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return replace(experts, **parts, first_own=first, num_routed=experts.num_experts)


def poison(like: Tensor, num_rows: int, width: int) -> Tensor:
    """Stands for memory that nothing has been written to."""
    return like.new_full((num_rows, width), torch.nan)


KINDS = ["plain", "clamped", "mxfp4", "weighs inputs", "gelu with factors", "sigmoid"]


@pytest.mark.parametrize("num_tokens", [1, 3, 90])
@pytest.mark.parametrize("kind", KINDS)
def test_what_ranks_make_of_their_own_experts_adds_up(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kind: str, num_tokens: int
) -> None:
    """Also where a rank has no expert that any token is routed to, and whatever stands in memory that is not filled."""
    ops.set_num_threads(1)
    experts = layer(dtype, 8, 64, 32, 2)
    if kind in ("clamped", "mxfp4"):
        experts = clamped_layer(dtype, 8, 64, 32, 2, kind == "mxfp4")
    elif kind == "weighs inputs":
        experts = replace(experts, weighs_inputs=True)
    elif kind == "gelu with factors":
        experts = replace(experts, gelu=True, factors=random(8, dtype=dtype).abs())
    elif kind == "sigmoid":
        experts = replace(experts, sigmoid=SigmoidRouting(random(8, dtype=torch.float32, scale=0.3), 4, 2, 1.5))
    scores = random(num_tokens, 8, dtype=torch.float32 if kind == "sigmoid" else dtype, scale=2.0).clone()
    scores[:, 5:] -= 20.0
    slots = np.arange(num_tokens)
    slots[2:5] = -1
    x, total = random(num_tokens, 64, dtype=dtype), torch.zeros(num_tokens, 64)
    wanted, of_all = counted(x, scores, experts, None, slots)
    monkeypatch.setattr(grouped_experts, "empty", poison)
    for first, end in ((0, 3), (3, 4), (4, 6), (6, 8)):
        own = part_of(experts, first, end)
        (found, counts), (expected, also) = both(monkeypatch, partial(counted, x, scores, own, None, slots))
        same(found, expected)
        assert counts.tolist() == also.tolist() == of_all.tolist(), "every rank routes all tokens"
        if kind != "sigmoid":
            assert first < 6 or not found.any()
        total += found
    tolerance = 1e-5 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(total, wanted.float(), rtol=tolerance, atol=tolerance)


def held_by(experts: ExpertMatrices, share: SplitShape, layer: int) -> ExpertMatrices:
    """What a rank has of a layer whose experts the ranks have copies of."""
    sizes = ExpertShape(experts.num_experts, experts.num_chosen, 0, experts.normalised)
    held = list(share.experts_of(share.expert_part, layer, experts.num_experts))

    def own(of_all: Any) -> Any:
        if isinstance(of_all, Mxfp4Matrix):
            return Mxfp4Matrix(of_all.blocks[held], of_all.scales[held])
        return None if of_all is None else of_all[held]

    whole = experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias
    gate_up, down, gate_up_bias, down_bias = map(own, whole)
    parts = {"gate_up": gate_up, "down": down, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
    turns = torch.tensor(expert_copies.turns(share, layer, sizes), dtype=torch.int32)
    return replace(experts, **parts, num_routed=experts.num_experts, turns=turns)


def drawn_table(draw: draws.Random, num_experts: int, num_parts: int) -> ExpertCopies:
    """Returns copies for each part of the experts of a few layers."""
    num_own = num_experts // num_parts
    number, every = draw.randint(0, num_experts - num_own), range(num_experts)
    others = [[one for one in every if one // num_own != part] for part in range(num_parts)]
    return tuple(tuple(tuple(sorted(draw.sample(own, number))) for own in others) for _ in range(3))


@pytest.mark.parametrize("seed", range(16))
def test_what_ranks_make_with_copies_of_experts_adds_up(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seed: int) -> None:
    """Whatever table says who holds which expert, whatever tokens are padding, and whatever stands in memory that is not filled."""
    draw = draws.Random(seed)
    ops.set_num_threads(draw.choice([1, 2]))
    num_parts, num_tokens, kind = draw.choice([1, 2, 4]), draw.choice([1, 3, 17, 90]), draw.choice(KINDS)
    num_experts, num_chosen = draw.choice([4, 8]), draw.randint(1, 4)
    experts, size = layer(dtype, num_experts, 64, 32, num_chosen), 1
    if kind in ("clamped", "mxfp4"):
        size = 4  # as in test_clamped_experts_with_biases: sums of such layers are some four times as large as others'
        experts = clamped_layer(dtype, num_experts, 64, 32, num_chosen, kind == "mxfp4")
    elif kind == "weighs inputs":
        experts = replace(experts, weighs_inputs=True)
    elif kind == "gelu with factors":
        experts = replace(experts, gelu=True, factors=random(num_experts, dtype=dtype).abs())
    elif kind == "sigmoid":
        experts = replace(experts, sigmoid=SigmoidRouting(random(num_experts, dtype=torch.float32, scale=0.3), 2, 2, 1.5))
    scores = random(num_tokens, num_experts, dtype=torch.float32 if kind == "sigmoid" else dtype, scale=2.0).clone()
    if draw.random() < 0.5:
        scores[:, 1] += 20.0  # an expert that all tokens pass through
    slots = np.array(draw.sample(range(1000), num_tokens))
    slots[[draw.random() < 0.2 for _ in range(num_tokens)]] = -1
    x, total = random(num_tokens, 64, dtype=dtype), torch.zeros(num_tokens, 64)
    wanted, of_all = counted(x, scores, experts, None, slots)
    table, number, computed = drawn_table(draw, num_experts, num_parts), draw.randrange(3), torch.zeros(num_experts).long()
    monkeypatch.setattr(grouped_experts, "empty", poison)
    for rank in range(num_parts):
        share = SplitShape(rank, num_parts, expert_parts=num_parts, copies=table)
        own = held_by(experts, share, number)
        (found, counts), (expected, also) = both(monkeypatch, partial(counted, x, scores, own, None, slots))
        same(found / size, expected / size)
        assert counts.tolist() == also.tolist()
        computed[list(share.experts_of(rank, number, num_experts))] += counts
        total += found
    assert torch.equal(computed, of_all), "each pair is computed by one rank"
    tolerance = 1e-5 if dtype is torch.float32 else 6e-2
    torch.testing.assert_close(total, wanted.float(), rtol=tolerance, atol=tolerance)


def check_that_a_recorded_step_follows(experts: ExpertMatrices, dtype: torch.dtype, num_tokens: int) -> None:
    """Checks that a step recorded with one routing computes what other scores, in the same memory, ask for. experts: a rank's, of
    six experts that are 40 wide."""
    x, scores = random(num_tokens, 40, dtype=dtype).clone(), random(num_tokens, 6, dtype=dtype).clone()
    recorder = Recorder(Scratch())
    with recording(recorder), torch.inference_mode():
        out: Tensor = ops.experts(x, scores, experts, None, batch_of(range(num_tokens)))
    assert recorder.missed == ""
    assert num_tokens > 2 or Replay(recorder.calls).is_native
    for favoured in (0, 2, 3, 5):
        scores.normal_(generator=torch.Generator().manual_seed(favoured))
        scores[:, favoured] += 4.0
        with torch.inference_mode():
            for call in recorder.calls:
                call.kernel(*call.args)
        same(out, ops.experts(x, scores, experts, None, batch_of(range(num_tokens))))


@pytest.mark.parametrize("num_tokens", [2, 80])
def test_a_recorded_step_with_copies_follows_another_routing(dtype: torch.dtype, num_tokens: int) -> None:
    ops.set_num_threads(1)
    share = SplitShape(0, 2, expert_parts=2, copies=(((4, 5), (0, 1)),))
    experts = replace(held_by(layer(dtype, 6, 40, 24, 2), share, 0), counts=torch.zeros(5, dtype=torch.int64))
    check_that_a_recorded_step_follows(experts, dtype, num_tokens)


@pytest.mark.parametrize("num_tokens", [2, 80])
def test_a_recorded_step_of_a_rank_follows_another_routing(dtype: torch.dtype, num_tokens: int) -> None:
    ops.set_num_threads(1)
    experts = part_of(layer(dtype, 6, 40, 24, 2), 2, 4)
    check_that_a_recorded_step_follows(experts, dtype, num_tokens)
