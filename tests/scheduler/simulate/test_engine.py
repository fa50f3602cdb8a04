"""The simulated engine against sums done by hand."""

from __future__ import annotations

import pytest

from scheduler.node.events import ModelFacts
from scheduler.simulate.costs import Costs, ModelCosts
from scheduler.simulate.engine import SimulatedEngine
from scheduler.simulate.outcome import RequestOutcome
from scheduler.simulate.trace import TraceRequest
from tests.scheduler.simulate.settings import STEPS

# 100 prompt tokens a second; a step takes 10 ms and 1 ms for each sequence
MEASURED = ModelCosts(prefill_tokens_per_s=100.0, decode_step_s=0.010, decode_s_per_sequence=0.001)
COSTS = Costs(models={"a": MEASURED, "b": MEASURED})


def facts(name: str, max_sequences: int = 8) -> ModelFacts:
    return ModelFacts(name, 1000, 10, 1, 100, max_sequences=max_sequences)


def outcome(request_id: int, model: str = "a", input_tokens: int = 10, output_tokens: int = 11) -> RequestOutcome:
    return RequestOutcome(request_id, TraceRequest(0.0, model, input_tokens, output_tokens))


def engine(*models: ModelFacts, lease_bytes: int = 10**9) -> SimulatedEngine:
    made = SimulatedEngine(COSTS, STEPS)
    made.set_lease(lease_bytes)
    for model in models:
        made.host(model, 1000)
    return made


def run(made: SimulatedEngine) -> dict[int, float]:
    """Request -> when it ended."""
    ends = {}
    for _ in range(1000):
        at = made.next_at()
        if at is None:
            return ends
        made.advance(at)
        ends.update({one.request_id: at for one in made.ended})
        made.ended.clear()
    raise AssertionError("no end")


def test_one_request() -> None:
    made = engine(facts("a"))
    one = outcome(0)
    made.submit(one)
    assert run(made) == {0: pytest.approx(0.11 + 10 * 0.011)}
    assert one.first_token_s == pytest.approx(0.11)


def test_two_sequences_share_the_steps() -> None:
    made = engine(facts("a"))
    made.submit(outcome(0))
    made.submit(outcome(1))
    ends = run(made)
    # both prompts in one step (0.21 s), then ten steps with two sequences in them
    assert ends == {0: pytest.approx(0.21 + 10 * 0.012), 1: pytest.approx(0.21 + 10 * 0.012)}


def test_two_models_share_the_device() -> None:
    made = engine(facts("a"), facts("b"))
    made.submit(outcome(0, "a"))
    made.submit(outcome(1, "b"))
    # each prompt in two chunks, since eight tokens take longer than a turn already: 0.09 and 0.03 s; a's ends with the third step
    ends = run(made)
    assert max(ends.values()) == pytest.approx(2 * (0.09 + 0.03 + 10 * 0.011))
    assert min(ends.values()) > 0.35


def test_a_full_batch_waits() -> None:
    made = engine(facts("a", max_sequences=1))
    both = [outcome(request_id) for request_id in range(2)]
    for one in both:
        made.submit(one)
    assert run(made) == {0: pytest.approx(0.22), 1: pytest.approx(0.44)}
    assert [one.began_s for one in both] == [0.0, pytest.approx(0.22)]


def test_kv_beyond_the_reserve_comes_from_the_lease() -> None:
    def ends(lease_bytes: int) -> dict[int, float]:
        made = engine(facts("a"), lease_bytes=lease_bytes)
        for request_id in range(2):
            made.submit(outcome(request_id, input_tokens=80, output_tokens=11))  # 910 bytes of KV each
        return run(made)

    assert ends(820) == {0: pytest.approx(1.61 + 0.12), 1: pytest.approx(1.61 + 0.12)}
    assert ends(819) == {0: pytest.approx(0.81 + 0.11), 1: pytest.approx(2 * (0.81 + 0.11))}


def test_what_is_dropped_keeps_its_tokens_and_computes_them_again() -> None:
    made = engine(facts("a"))
    one = outcome(0)
    made.submit(one)
    for at in (0.11, 0.11 + 4.5 * 0.011):
        made.advance(at)
    assert made.drop("a") == [one]
    assert one.tokens_done == 5
    assert made.next_at() is None
    made.host(facts("a"), 1000)
    made.submit(one)
    # its prompt and the five tokens it had (0.16 s) make the sixth; five steps are left
    assert run(made) == {0: pytest.approx(0.11 + 4.5 * 0.011 + 0.16 + 5 * 0.011)}
    assert one.first_token_s == pytest.approx(0.11)


def test_restored_kv_is_not_computed_again() -> None:
    made = engine(facts("a"))
    one = outcome(0)
    made.submit(one)
    for at in (0.11, 0.11 + 4.5 * 0.011):
        made.advance(at)
    tokens = made.hosted["a"].kv_tokens()
    assert tokens == {0: 14}  # of the latest token it is computed with the next step
    assert made.kv_bytes() == {"a": 210}  # of all its 21 tokens
    made.drop("a")
    made.host(facts("a"), 1000, tokens)
    made.submit(one)
    assert made.hosted["a"].kv_tokens() == {0: 14}  # and may be saved once more before anything is computed
    assert run(made) == {0: pytest.approx(0.11 + 4.5 * 0.011 + 0.02 + 5 * 0.011)}
