"""Checks that both kinds of divided models must pass, those whose matrices are divided and those whose layers are."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from tests.engine.rank_processes import RankGroup
from tests.engine.split_models import How, execute_alone, logits_of_steps, results_of_steps, waits_of_steps

FLOAT32_TOLERANCE = 2e-4
ON_CPU = How()


def _whole(divided: How) -> How:
    """Returns how one device computes as much of a model as ranks that compute it so."""
    return How(few_steps=divided.few_steps, few_layers=divided.few_layers)


def on_one_device(group: RankGroup, family: str, dtype: str, divided: How = ON_CPU) -> list[np.ndarray]:
    """Returns the logits of steps of the whole model, which rank 0 computes. divided: how it is divided in what is compared."""
    group.start(logits_of_steps, family, dtype, _whole(divided), True, ranks=[0])
    logits: list[np.ndarray] = group.results(ranks=[0])[0][0]
    return logits


def check_logits(group: RankGroup, family: str, hows: Sequence[How], tolerance: float = FLOAT32_TOLERANCE) -> None:
    """Checks that a divided model computes the logits of the whole one, on all ranks that have a head."""
    whole = on_one_device(group, family, "float32", hows[0])
    for logits in divided_logits(group, family, hows):
        for own, expected in zip(logits, whole, strict=True):
            np.testing.assert_allclose(own, expected, rtol=0, atol=tolerance)


def divided_logits(group: RankGroup, family: str, hows: Sequence[How]) -> list[list[np.ndarray]]:
    """Returns the float32 logits of steps of a divided model, of each rank that has a head. Checks that these ranks have exchanged
    the same pieces, and that others have made no logits."""
    group.renew()
    every = group.run(logits_of_steps, family, "float32", list(hows))
    stage_size = group.size // hows[0].num_stages
    assert [pieces for _, pieces in every[:stage_size]] == [every[0][1]] * stage_size
    assert not any(logits for logits, _ in every[stage_size:]), "a stage without a head made logits"
    return [logits for logits, _ in every[:stage_size]]


def check_results(group: RankGroup, hows: Sequence[How]) -> None:
    """Checks that a divided model samples what the whole one does, and tells the same of it."""
    group.start(results_of_steps, "llama", "float32", _whole(hows[0]), True, ranks=[0])
    expected = group.results(ranks=[0])[0][0]
    group.renew()
    every = group.run(results_of_steps, "llama", "float32", list(hows))
    for step, (own, other) in enumerate(zip(every[0][0], expected, strict=True)):
        assert own["ids"] == other["ids"], step
        np.testing.assert_allclose(own["floats"], other["floats"], rtol=0, atol=FLOAT32_TOLERANCE)
    for _, pieces in every[: group.size // hows[0].num_stages]:
        assert pieces == every[0][1]


def check_waits(group: RankGroup, how: How) -> None:
    """Checks that the leader's steps tell how long they waited for a follower, so that the model's costs are learned without what
    other models had the follower do."""
    group.renew()
    leader, _ = group.run(waits_of_steps, how, 0.1)
    for seconds, waited_s in leader[1:]:  # the first step waits until both have loaded
        assert 0.05 < waited_s <= seconds


def check_broken(group: RankGroup, how: How) -> None:
    """Checks that a step raises whose other ranks never come, once the group is broken."""
    group.renew()
    group.start(execute_alone, how, ranks=[0])
    time.sleep(0.2)  # in most runs the rank waits by now
    group.broken[0] = 1
    assert group.results(ranks=[0]) == ["GroupBroken"]
