"""Models whose layers are divided among stages compute what they compute on one device: in processes that are the ranks of a
group. The states that stages pass on lose nothing, so stages of one device each give the same bits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.engine.rank_processes import RankGroup
from tests.engine.split_models import FAMILIES, QUANTISED, How, execute_alone, logits_of_steps, results_of_steps, write_quantised

FLOAT32_TOLERANCE = 2e-4
TWO = How(num_stages=2)
RECORDED, ONE_BY_ONE, PLAIN = TWO, replace(TWO, recorded=False), replace(TWO, compiled=False)
UNDIVIDED = ("gemma4", "gemma4-moe")  # their layers have inputs of their own
DIVIDED = [family for family in FAMILIES if family not in UNDIVIDED]


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


def _check_logits(group: RankGroup, family: str, hows: Sequence[How], tolerance: float = FLOAT32_TOLERANCE) -> None:
    group.start(logits_of_steps, family, "float32", How(), True, ranks=[0])
    whole = group.results(ranks=[0])[0][0]
    group.renew()
    every = group.run(logits_of_steps, family, "float32", list(hows))
    stage_size = group.size // hows[0].num_stages
    for logits, pieces in every[:stage_size]:
        assert pieces == every[0][1]
        for own, expected in zip(logits, whole, strict=True):
            np.testing.assert_allclose(own, expected, rtol=0, atol=tolerance)
    for logits, _ in every[stage_size:]:
        assert logits == [], "a stage without a head made logits"


def _check_results(group: RankGroup, hows: Sequence[How]) -> None:
    group.start(results_of_steps, "llama", "float32", How(), True, ranks=[0])
    expected = group.results(ranks=[0])[0][0]
    group.renew()
    every = group.run(results_of_steps, "llama", "float32", list(hows))
    for step, (own, other) in enumerate(zip(every[0][0], expected, strict=True)):
        assert own["ids"] == other["ids"], step
        np.testing.assert_allclose(own["floats"], other["floats"], rtol=0, atol=FLOAT32_TOLERANCE)


@pytest.mark.parametrize("family", DIVIDED)
def test_two_stages_compute_the_bits_of_one_device(two: RankGroup, family: str) -> None:
    _check_logits(two, family, (RECORDED, RECORDED), tolerance=0.0)


@pytest.mark.parametrize("family", DIVIDED)
def test_a_stage_for_each_layer(three: RankGroup, family: str) -> None:
    _check_logits(three, family, [replace(how, num_stages=3) for how in (RECORDED, PLAIN, ONE_BY_ONE)])


@pytest.mark.parametrize("family", ["llama-biases", "gemma2", "qwen3.5", "deepseek-v3-moe", "gpt-oss", "llama4"])
def test_the_layers_of_a_stage_may_be_divided_too(four: RankGroup, family: str) -> None:
    _check_logits(four, family, (RECORDED, RECORDED, PLAIN, ONE_BY_ONE))


@pytest.mark.parametrize("family", ["qwen2-moe", "deepseek-v3-moe"])
def test_the_experts_of_a_stage_may_be_divided(four: RankGroup, family: str) -> None:
    _check_logits(four, family, [replace(RECORDED, expert_parts=2)] * 4)


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_stages_compute_the_bits_of_one_device(two: RankGroup, tmp_path: Path, name: str) -> None:
    _check_logits(two, write_quantised(name, tmp_path), (RECORDED, RECORDED), tolerance=0.0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3-moe"])
def test_bfloat16_stages_compute_the_bits_of_one_device(two: RankGroup, family: str) -> None:
    two.start(logits_of_steps, family, "bfloat16", How(), True, ranks=[0])
    whole = two.results(ranks=[0])[0][0]
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
    _check_results(two, hows)


def test_stages_of_several_join_whatever_the_leader_executes(four: RankGroup) -> None:
    _check_results(four, (RECORDED, ONE_BY_ONE, PLAIN, RECORDED))


@pytest.mark.parametrize("how", [RECORDED, PLAIN], ids=["recorded", "plain"])
def test_a_step_of_a_broken_group_raises(two: RankGroup, how: How) -> None:
    two.renew()
    two.start(execute_alone, how, ranks=[0])
    time.sleep(0.2)  # in most runs the rank waits by now
    two.broken[0] = 1
    assert two.results(ranks=[0]) == ["GroupBroken"]
