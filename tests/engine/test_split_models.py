"""Models that are split over devices compute what they compute on one: in processes that are the ranks of a group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from loader.architectures.decoder import Decoder
from loader.architectures.registry import ARCHITECTURES
from loader.architectures.wrapper import Wrapper
from tests.engine.rank_processes import RankGroup
from tests.engine.split_checks import check_broken, check_logits, check_results, check_waits, on_one_device
from tests.engine.split_models import (
    FAMILIES,
    MIXTURES,
    QUANTISED,
    How,
    drawn_copies,
    logits_of_steps,
    shape_of,
    write_mxfp4,
    write_quantised,
)


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    made = RankGroup(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankGroup]:
    made = RankGroup(4)  # more than there are KV heads
    yield made
    made.close()


RECORDED, ONE_BY_ONE, PLAIN = How(), How(recorded=False), How(compiled=False)
PLAIN_ONE_BY_ONE = How(compiled=False, recorded=False)  # as long as kernels are being compiled


def test_all_decoders_of_the_registry_are_divided_here() -> None:
    """Wrappers are divided as the decoders in them are: their tensors differ from these in nothing but names."""
    shapes = {shape.architecture: shape for shape in (shape_of(family, "float32") for family in FAMILIES)}
    assert shapes.keys() == {name for name, one in ARCHITECTURES.items() if isinstance(one, Decoder)}
    for one in ARCHITECTURES.values():
        if isinstance(one, Wrapper):
            shape = replace(shapes[one.text.name], tensor_prefix="model.language_model.")
            assert replace(one.decoder_of(shape), names=one.text.names) == one.text == ARCHITECTURES[one.text.name]


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_one_device(two: RankGroup, family: str) -> None:
    check_logits(two, family, (RECORDED, RECORDED))


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_shares_compute_what_one_device_does(two: RankGroup, tmp_path: Path, name: str) -> None:
    check_logits(two, write_quantised(name, tmp_path), (RECORDED, ONE_BY_ONE))


@pytest.mark.parametrize("family", MIXTURES)
def test_each_rank_may_have_some_of_the_experts(two: RankGroup, family: str) -> None:
    check_logits(two, family, (replace(RECORDED, expert_parts=2),) * 2)


@pytest.mark.parametrize("family", MIXTURES)
def test_ranks_may_have_copies_of_each_others_experts(two: RankGroup, family: str) -> None:
    copies = drawn_copies(shape_of(family, "float32"), 2, 1)
    check_logits(two, family, [replace(how, expert_parts=2, copies=copies) for how in (RECORDED, ONE_BY_ONE)])


@pytest.mark.parametrize(("family", "parts", "number"), [("qwen2-moe", 4, 2), ("gpt-oss", 4, 3), ("deepseek-v3-moe", 2, 3)])
def test_an_expert_may_have_several_copies(four: RankGroup, family: str, parts: int, number: int) -> None:
    """Also where each rank has all experts, where experts are divided too, and with plain operations."""
    copies = drawn_copies(shape_of(family, "float32"), parts, number)
    hows = [replace(how, expert_parts=parts, copies=copies) for how in (RECORDED, ONE_BY_ONE, PLAIN, RECORDED)]
    check_logits(four, family, hows)


def test_ranks_with_other_experts_may_compute_in_different_ways(two: RankGroup) -> None:
    """Also from single steps, and with plain operations."""
    check_logits(two, "qwen2-moe", [replace(how, expert_parts=2) for how in (PLAIN_ONE_BY_ONE, ONE_BY_ONE)])
    two.renew()
    check_logits(two, "llama4", [replace(how, expert_parts=2) for how in (RECORDED, PLAIN)])


@pytest.mark.parametrize("family", ["qwen2-moe", "gemma4-moe"])
def test_all_ranks_route_by_the_scores_of_the_first(two: RankGroup, family: str) -> None:
    for expert_parts in (1, 2):
        first, other = (How(expert_parts=expert_parts, misrouting=is_other) for is_other in (False, True))
        check_logits(two, family, (first, other))
        two.renew()


@pytest.mark.parametrize("family", ["llama4", "gemma4-moe", "glm4-moe-lite"])
def test_each_of_several_ranks_may_have_some_of_the_experts(four: RankGroup, family: str) -> None:
    check_logits(four, family, [replace(how, expert_parts=4) for how in (RECORDED, ONE_BY_ONE, PLAIN, RECORDED)])


@pytest.mark.parametrize("family", ["qwen2-moe", "deepseek-v3-moe", "llama4", "gpt-oss", "qwen3.5-moe"])
def test_experts_and_their_inner_dimensions_may_both_be_divided(four: RankGroup, family: str) -> None:
    check_logits(four, family, [replace(how, expert_parts=2) for how in (RECORDED, RECORDED, RECORDED, PLAIN)])


def test_experts_in_mxfp4_may_be_divided_in_both_ways(four: RankGroup, tmp_path: Path) -> None:
    check_logits(four, write_mxfp4(tmp_path), [replace(RECORDED, expert_parts=2)] * 4)


@pytest.mark.parametrize("hows", [(RECORDED, ONE_BY_ONE), (PLAIN_ONE_BY_ONE, RECORDED)], ids=["recorded", "compiled"])
def test_ranks_may_compute_in_different_ways(two: RankGroup, hows: tuple[How, ...]) -> None:
    """One records its steps, with other padding, and one does not; one has compiled kernels, and one does not yet."""
    check_logits(two, "llama-biases", hows)


@pytest.mark.parametrize("family", ["llama-biases", "phi3", "olmo2", "gemma4"])
def test_there_may_be_more_ranks_than_kv_heads(four: RankGroup, family: str) -> None:
    check_logits(four, family, (ONE_BY_ONE, RECORDED, PLAIN, PLAIN_ONE_BY_ONE))


@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-next", "gpt-oss"])
def test_heads_of_each_kind_may_be_divided_among_several(four: RankGroup, family: str) -> None:
    """Those of the gated delta rule, whose inputs are stored in two ways, and those with sinks."""
    check_logits(four, family, (RECORDED, PLAIN, ONE_BY_ONE, RECORDED))


@pytest.mark.parametrize("family", ["deepseek-v3", "deepseek-v2"])
def test_latents_are_whole_on_each_of_several_ranks(four: RankGroup, family: str) -> None:
    check_logits(four, family, (RECORDED, ONE_BY_ONE, PLAIN, RECORDED))


@pytest.mark.parametrize("family", ["llama", "gemma2", "olmo2"])
def test_bfloat16_agrees_to_its_precision(two: RankGroup, family: str) -> None:
    exact, whole = (on_one_device(two, family, dtype) for dtype in ("float32", "bfloat16"))
    two.renew()
    every = two.run(logits_of_steps, family, "bfloat16", [RECORDED, ONE_BY_ONE if family == "llama" else PLAIN])
    of_rounding = [np.abs(own - expected).mean() for own, expected in zip(whole, exact, strict=True)]
    for logits, pieces in every:
        assert pieces == every[0][1]
        for own, expected, usual in zip(logits, exact, of_rounding, strict=True):
            assert np.abs(own - expected).mean() < 1.5 * usual


@pytest.mark.parametrize(
    "hows",
    [(RECORDED, RECORDED), (RECORDED, ONE_BY_ONE), (ONE_BY_ONE, RECORDED), (PLAIN_ONE_BY_ONE, RECORDED)],
    ids=["recorded", "leader recorded", "follower recorded", "follower compiled"],
)
def test_followers_join_whatever_the_leader_executes(two: RankGroup, hows: tuple[How, ...]) -> None:
    """Masks, edits, log-probabilities of tokens and of prompts take other roads through the leader than plain sampling."""
    check_results(two, hows)


def test_several_followers_join_whatever_the_leader_executes(four: RankGroup) -> None:
    check_results(four, (RECORDED, PLAIN, ONE_BY_ONE, RECORDED))


def test_a_step_tells_how_long_it_waited_for_a_follower(two: RankGroup) -> None:
    check_waits(two, How())


@pytest.mark.parametrize("how", [RECORDED, PLAIN_ONE_BY_ONE], ids=["recorded", "plain"])
def test_a_step_of_a_broken_group_raises(two: RankGroup, how: How) -> None:
    check_broken(two, how)
