"""When the engine tells the daemon what experts have computed, and that nothing is told twice or lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.loop.expert_news import TELL_EVERY_S, ExpertNews
from engine.protocol import ExpertTokens


class Counts:
    """The counts of a share with the experts 2 and 3 of 4. slow: the device has not told yet if nobody waits."""

    layers, num_experts, own = (1, 3), 4, range(2, 4)

    def __init__(self) -> None:
        self.new, self.slow = np.zeros((2, 2), np.int64), False
        self.waits: list[bool] = []

    def news(self, wait: bool) -> Any:
        self.waits.append(wait)
        if not self.new.any() or (self.slow and not wait):
            return None
        new, self.new = self.new, np.zeros((2, 2), np.int64)
        return new


class Desk:
    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.counts = {name: Counts() for name in "ab"}
        self.by_name = {"a": self._hosted("a"), "dense": SimpleNamespace(hosted=SimpleNamespace(expert_counts=None))}
        self.followed = {"b": SimpleNamespace(expert_counts=self.counts["b"])}
        self.news = ExpertNews(SimpleNamespace(by_name=self.by_name, followed=self.followed), self.sent.append)  # type: ignore[arg-type]

    def _hosted(self, name: str) -> Any:
        return SimpleNamespace(hosted=SimpleNamespace(expert_counts=self.counts[name]))

    def step(self, name: str, tokens: int = 1) -> None:
        if name in self.counts:
            self.counts[name].new[0, 1] += tokens
        self.news.stepped(name)

    def told(self) -> list[tuple[str, list[int]]]:
        told = [(one.model, np.frombuffer(one.counts, "<i8").tolist()) for one in self.sent]
        self.sent.clear()
        return told


@pytest.fixture
def desk() -> Desk:
    return Desk()


def test_a_message_says_which_experts_of_which_layers(desk: Desk) -> None:
    desk.step("a", 7)
    desk.news.tell(100.0, wait=True)
    assert desk.sent == [ExpertTokens("a", [1, 3], 4, 2, np.array([0, 7, 0, 0], "<i8").tobytes())]


def test_it_is_told_every_few_seconds_and_only_if_a_step_has_run(desk: Desk) -> None:
    assert desk.news.wait_s(100.0) is None
    desk.step("a")
    desk.step("b", 2)
    assert desk.news.wait_s(100.0) == 0.0
    desk.news.tell(100.0, wait=False)
    assert sorted(desk.told()) == [("a", [0, 1, 0, 0]), ("b", [0, 2, 0, 0])]
    desk.step("a")
    assert desk.news.wait_s(100.5) == TELL_EVERY_S - 0.5
    desk.news.tell(100.5, wait=False)
    assert desk.told() == []
    desk.news.tell(100.0 + TELL_EVERY_S, wait=True)
    assert desk.told() == [("a", [0, 1, 0, 0])]
    assert desk.news.wait_s(200.0) is None, "nothing has run since"


def test_what_the_device_has_not_told_is_asked_for_again(desk: Desk) -> None:
    desk.counts["a"].slow = True
    desk.step("a")
    desk.news.tell(100.0, wait=False)
    assert desk.told() == []
    assert desk.news.wait_s(100.25) == 0.0, "at the next occasion, not seconds later"
    desk.step("a")
    desk.news.tell(100.25, wait=True)
    assert desk.told() == [("a", [0, 2, 0, 0])]


def test_a_step_after_the_copy_is_told_once_nothing_runs(desk: Desk) -> None:
    desk.step("a")
    desk.news.tell(100.0, wait=False)
    desk.counts["a"].new[0, 0] += 3  # of a step that ran while the counts were on their way
    assert desk.told() == [("a", [0, 1, 0, 0])]
    assert desk.news.wait_s(101.0) == TELL_EVERY_S - 1.0
    desk.news.tell(103.0, wait=True)
    assert desk.told() == [("a", [3, 0, 0, 0])]


def test_a_model_that_leaves_tells_the_rest(desk: Desk) -> None:
    desk.step("a")
    desk.news.tell(100.0, wait=True)
    desk.told()
    desk.step("a", 5)
    desk.news.tell_last("a")
    assert desk.told() == [("a", [0, 5, 0, 0])]
    assert desk.news.wait_s(100.0) is None
    asked = len(desk.counts["a"].waits)
    desk.news.tell_last("a")
    assert len(desk.counts["a"].waits) == asked, "the device is not waited for in vain"


def test_a_model_that_is_gone_is_not_asked(desk: Desk) -> None:
    desk.step("a")
    del desk.by_name["a"]
    desk.news.tell(100.0, wait=True)
    assert desk.told() == []
    assert not desk.counts["a"].waits


def test_models_without_experts_have_no_news(desk: Desk) -> None:
    desk.step("dense")
    desk.step("unknown")
    assert desk.news.wait_s(100.0) is None
