"""Models whose layers are divided among stages compute what they compute on one device: in processes that are the ranks of a
group. The states that stages pass on lose nothing, so stages of one device each give the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.rank_processes import RankGroup
from tests.engine.split_checks import FLOAT32_TOLERANCE, check_broken, check_logits, check_results, on_one_device
from tests.engine.split_models import FAMILIES, QUANTISED, How, logits_of_steps, write_gemma4, write_quantised

TWO = How(num_stages=2)
RECORDED, ONE_BY_ONE, PLAIN = TWO, replace(TWO, recorded=False), replace(TWO, compiled=False)
FOUR = [family for family in FAMILIES if family != "gemma4"]  # which can have two stages at most
OF_EACH_KIND = ["llama-biases", "gemma2", "qwen3.5", "deepseek-v3-moe", "gpt-oss", "llama4", "gemma4-unified", "gemma4"]


@pytest.fixture(scope="module")
def two() -> Iterator[RankGroup]:
    made = RankGroup(2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def three() -> Iterator[RankGroup]:
    made = RankGroup(3)
    yield made
    made.close()


@pytest.fixture(scope="module")
def four() -> Iterator[RankGroup]:
    made = RankGroup(4)
    yield made
    made.close()


@pytest.mark.parametrize("family", FAMILIES)
def test_two_stages_compute_the_bits_of_one_device(two: RankGroup, family: str) -> None:
    """Allows rounding for gemma4: a stage has fewer columns of the projection to all layers' inputs, and on some processors torch
    then adds in another order."""
    check_logits(two, family, (RECORDED, RECORDED), tolerance=FLOAT32_TOLERANCE if family == "gemma4" else 0.0)


@pytest.mark.parametrize("family", FOUR)
def test_four_stages_compute_what_one_device_does(four: RankGroup, family: str) -> None:
    """Most have a single layer, and none of some of the model's KV groups."""
    check_logits(four, family, [replace(how, num_stages=4) for how in (RECORDED, PLAIN, ONE_BY_ONE, RECORDED)])


@pytest.mark.parametrize("family", ["llama-biases", "gemma2", "qwen3.5", "gemma4-moe", "deepseek-v3-moe"])
def test_stages_may_have_different_numbers_of_layers(three: RankGroup, family: str) -> None:
    check_logits(three, family, [replace(how, num_stages=3) for how in (RECORDED, PLAIN, ONE_BY_ONE)])


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_the_layers_of_a_stage_may_be_divided_too(four: RankGroup, family: str) -> None:
    check_logits(four, family, (RECORDED, RECORDED, PLAIN, ONE_BY_ONE))


def test_stages_behind_the_second_make_inputs_of_their_layers(four: RankGroup, tmp_path: Path) -> None:
    """From files, and from embeddings that two stages have passed on."""
    check_logits(four, write_gemma4(tmp_path), [replace(how, num_stages=4) for how in (RECORDED, PLAIN, ONE_BY_ONE, RECORDED)])


@pytest.mark.parametrize("family", ["qwen2-moe", "deepseek-v3-moe"])
def test_the_experts_of_a_stage_may_be_divided(four: RankGroup, family: str) -> None:
    check_logits(four, family, [replace(RECORDED, expert_parts=2)] * 4)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_stages_compute_the_bits_of_one_device(two: RankGroup, tmp_path: Path, name: str) -> None:
    check_logits(two, write_quantised(name, tmp_path), (RECORDED, RECORDED), tolerance=0.0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_bfloat16_stages_compute_the_bits_of_one_device(two: RankGroup, family: str) -> None:
    whole = on_one_device(two, family, "bfloat16")
    two.renew()
    for own, expected in zip(two.run(logits_of_steps, family, "bfloat16", [TWO, TWO])[0][0], whole, strict=True):
        np.testing.assert_array_equal(own, expected)


@pytest.mark.parametrize(
    "hows",
    [(RECORDED, RECORDED), (RECORDED, ONE_BY_ONE), (ONE_BY_ONE, RECORDED), (PLAIN, RECORDED)],
    ids=["recorded", "leader recorded", "other recorded", "other compiled"],
)
def test_the_other_stage_joins_whatever_the_leader_executes(two: RankGroup, hows: tuple[How, ...]) -> None:
    """Masks, edits, log-probabilities of tokens and of prompts take other roads through the leader than plain sampling."""
    check_results(two, hows)


def test_stages_of_several_join_whatever_the_leader_executes(four: RankGroup) -> None:
    check_results(four, (RECORDED, ONE_BY_ONE, PLAIN, RECORDED))


@pytest.mark.parametrize("how", [RECORDED, PLAIN], ids=["recorded", "plain"])
def test_a_step_of_a_broken_group_raises(two: RankGroup, how: How) -> None:
    check_broken(two, how)
