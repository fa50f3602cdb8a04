"""Busy models of one simulated device share it by turns, as an engine's do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from scheduler.batch.step_limits import PATIENT_STEPS
from scheduler.node.events import ModelFacts
from scheduler.simulate import engine as engine_module
from scheduler.simulate.costs import Costs, ModelCosts
from scheduler.simulate.engine import SimulatedEngine
from scheduler.simulate.outcome import RequestOutcome
from scheduler.simulate.steps import ModelSteps, StepSeconds, StepSettings
from scheduler.simulate.trace import TraceRequest
from tests.scheduler.simulate.settings import STEPS

# A step takes 8 ms, 0.5 ms for each sequence and 0.25 ms for each token of a prompt; a turn is 10.625 ms, 1.25 of the least step.
FIXED_S, EACH_S, TOKEN_S = 0.008, 0.0005, 0.00025
MEASURED = ModelCosts(prefill_tokens_per_s=1 / TOKEN_S, decode_step_s=FIXED_S, decode_s_per_sequence=EACH_S)
ROWS_OF_A_TURN = 5  # 10.5 ms
CHUNK_OF_A_TURN = 8  # 10 ms; the next class of sizes that has room takes 10.5 with a sequence beside it


def engine(*names: str, settings: StepSettings = STEPS) -> SimulatedEngine:
    made = SimulatedEngine(Costs(models=dict.fromkeys(names, MEASURED)), settings)
    made.set_lease(10**12)
    for name in names:
        made.host(ModelFacts(name, 1000, 1, 1, 4096, max_sequences=64), 0)
    return made


def submit(made: SimulatedEngine, request_id: int, model: str, input_tokens: int, output_tokens: int) -> RequestOutcome:
    outcome = RequestOutcome(request_id, TraceRequest(0.0, model, input_tokens, output_tokens))
    made.submit(outcome)
    return outcome


def run(made: SimulatedEngine, until: float = float("inf")) -> dict[int, float]:
    """Request -> when it ended."""
    ends: dict[int, float] = {}
    while (at := made.next_at()) is not None and at <= until:
        made.advance(at)
        ends |= {one.request_id: at for one in made.ended}
        made.ended.clear()
    return ends


def test_decode_steps_of_two_models_interleave() -> None:
    made = engine("a", "b")
    submit(made, 0, "a", 1, 400)
    submit(made, 1, "b", 1, 400)
    for at in (0.5, 1.0, 2.0, 3.0):
        made.advance(at)
        assert abs(made.hosted["a"].steps - made.hosted["b"].steps) <= 1
        assert made.hosted["a"].steps == pytest.approx(at / (2 * (FIXED_S + EACH_S)), abs=3)
    ends = run(made)
    assert abs(ends[0] - ends[1]) <= 2 * (FIXED_S + EACH_S)


def test_models_of_unlike_steps_have_equal_time() -> None:
    costs = Costs(models={"short": MEASURED, "long": replace(MEASURED, decode_step_s=4 * FIXED_S + 3 * EACH_S)})
    made = SimulatedEngine(costs, STEPS)
    for name in ("short", "long"):
        made.host(ModelFacts(name, 1000, 1, 1, 4096), 0)
        submit(made, len(made.hosted), name, 1, 2000)
    made.advance(10.0)
    assert made.hosted["short"].steps == pytest.approx(4 * made.hosted["long"].steps, rel=0.03)


def test_alone_a_prompt_is_one_step_whatever_a_turn_is() -> None:
    made = engine("a", "b")  # b is there and has nothing to do
    long = submit(made, 0, "a", 400, 1)
    assert run(made) == {0: pytest.approx(FIXED_S + 400 * TOKEN_S)}
    assert long.first_token_s == pytest.approx(FIXED_S + 400 * TOKEN_S)


def test_alone_a_prompt_stretches_the_steps_beside_it() -> None:
    """Twice a step of 9 ms has room for 36 tokens and the two sequences; the class of sizes below that ends at 32."""
    made = engine("a")
    for request_id in range(2):
        submit(made, request_id, "a", 1, 1000)
    made.advance(1.0)
    long = submit(made, 2, "a", 400, 10)
    began = made.next_at()  # the end of the step under way
    assert began is not None
    run(made)
    assert long.first_token_s is not None
    chunks = [30] * 13 + [10]
    assert sum(chunks) == 400
    assert long.first_token_s - began == pytest.approx(sum(FIXED_S + 2 * EACH_S + TOKEN_S * tokens for tokens in chunks))


def test_a_long_prompt_takes_its_chunks_turns_beside_another_models_streams() -> None:
    made = engine("a", "b")
    for request_id in range(2):
        submit(made, request_id, "a", 1, 1000)
    made.advance(1.0)
    long = submit(made, 2, "b", 400, 1)
    began = made.next_at()  # the end of the step under way
    run(made)
    assert began is not None
    assert long.first_token_s is not None
    steps_s = FIXED_S + 2 * EACH_S
    chunks = 400 / made.hosted["b"].costs.prompt_tokens(1, 0, 1)
    taken_s = long.first_token_s - began
    assert taken_s > FIXED_S * chunks + 400 * TOKEN_S + 0.8 * chunks * steps_s  # a's steps go on between the chunks
    held = made.hosted["b"].costs.seconds(0, made.hosted["b"].costs.prompt_tokens(1, 0, 1))
    assert held <= 2 * 0.010625


def test_two_prompts_do_not_both_go_beyond_their_turns_between_two_steps_of_a_third() -> None:
    """16 tokens take 12 ms, not more than a quarter above the smallest chunk; where one had that, the other's come by eights."""
    made = engine("a", "b", "c")
    submit(made, 0, "c", 1, 1000)
    made.advance(1.0)
    for request_id, model in enumerate("ab", 1):
        submit(made, request_id, model, 16, 1)
    chunks: list[tuple[str, int]] = []
    while made.hosted["a"].sequences or made.hosted["b"].sequences:
        at = made.next_at()
        assert at is not None
        step = made._under_way
        if isinstance(step, engine_module._Step):
            chunks += [(step.hosted.facts.name, tokens) for _, tokens in step.chunks]
        made.advance(at)
    first, second = ("a", "b") if chunks[0][0] == "a" else ("b", "a")
    assert chunks == [(first, 16), (second, CHUNK_OF_A_TURN), (second, CHUNK_OF_A_TURN)]


def test_no_more_sequences_run_than_fit_a_turn_while_another_model_is_busy() -> None:
    made = engine("a", "b")
    submit(made, 100, "b", 1, 10_000)
    made.advance(0.1)
    for request_id in range(ROWS_OF_A_TURN + 2):
        submit(made, request_id, "a", 1, 500)
    made.advance(0.5)
    assert made.waiting() == {"a": 2}
    alone = engine("a")
    for request_id in range(ROWS_OF_A_TURN + 2):
        submit(alone, request_id, "a", 1, 500)
    alone.advance(0.5)
    assert alone.waiting() == {}


def test_two_floods_pool_their_turns() -> None:
    """A third model's stream waits no longer, and in one step of two turns more is done than in two of one."""
    steps = engine("a").hosted["a"].costs
    assert steps.max_rows(1) == ROWS_OF_A_TURN
    assert steps.seconds(steps.max_rows(2)) <= 2 * 1.25 * (FIXED_S + EACH_S)
    assert steps.max_rows(2) > 2 * ROWS_OF_A_TURN
    made = engine("a", "b", "c")
    submit(made, 1000, "c", 1, 10_000)
    for request_id in range(120):
        submit(made, request_id, "ab"[request_id % 2], 1, 2000)
    made.advance(3.0)
    for name in "ab":
        assert made.hosted[name].rows(2) == steps.max_rows(2) <= len(made.hosted[name].decoding)


def test_who_waits_behind_streams_is_let_in_after_some_steps() -> None:
    made = engine("a", "b")
    submit(made, 100, "b", 1, 100_000)
    for request_id in range(ROWS_OF_A_TURN):
        submit(made, request_id, "a", 1, 100_000)
    made.advance(1.0)
    submit(made, 50, "a", 1, 1000)
    made.advance(1.1)
    assert made.waiting() == {"a": 1}
    made.advance(1.1 + 2 * 2 * PATIENT_STEPS * (FIXED_S + ROWS_OF_A_TURN * EACH_S))
    assert made.waiting() == {}
    assert made.first_tokens[-1].request_id == 50


def test_what_comes_while_rounds_are_under_way_waits_for_one_step() -> None:
    made = engine("a", "b")
    submit(made, 0, "a", 1, 4000)
    submit(made, 1, "b", 1, 4000)
    made.advance(5.0)
    far = made.next_at()
    assert far is not None
    assert far > 10.0
    submit(made, 2, "a", 1, 1)
    soon = made.next_at()
    assert soon is not None
    assert 5.0 <= soon <= 5.0 + FIXED_S + EACH_S


def test_rounds_are_what_single_steps_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences end when they would, give or take a few steps of each model, over many that come at random."""

    def once() -> dict[int, float]:
        draw = random.Random(3)
        made, ends = engine("a", "b", "c"), {}
        at = 0.0
        for request_id in range(150):
            at += draw.expovariate(2.0)
            ends |= run(made, at)
            made.advance(at)
            submit(made, request_id, draw.choice("abc"), draw.randint(16, 128), draw.randint(16, 128))
        return ends | run(made)

    rounds = once()
    monkeypatch.setattr(engine_module, "_FEWEST_ROUNDS", 10**9)
    steps = once()
    assert rounds.keys() == steps.keys()
    apart = [rounds[request_id] - ended_s for request_id, ended_s in steps.items()]
    assert sorted(map(abs, apart))[int(0.9 * len(apart))] <= 12 * (FIXED_S + 2 * EACH_S)
    assert abs(sum(apart) / len(apart)) <= 3 * (FIXED_S + 2 * EACH_S)


def test_a_prompt_goes_on_where_there_is_no_room() -> None:
    """Steps that are longer than a turn whatever is in them."""
    steps = ModelSteps(StepSettings(0.001, 2.0, 512), StepSeconds(0.1, 0.05, 0.0, 0.05))
    assert steps.max_rows(1) == 1
    assert steps.prompt_tokens(1, 1, 1) == 8


def test_waits_for_other_devices_make_steps_larger() -> None:
    """The average wait counts as a fixed cost of each step, which more rows share, as in an engine."""
    steps = ModelSteps(StepSettings(0.02, 2.0, 512), StepSeconds(0.01, 0.001, 0.0, 0.001))
    rows, tokens = steps.max_rows(1), steps.prompt_tokens(1, 1, 1)
    for _ in range(100):
        steps.note_wait(0.04)
    assert steps.turns_s(1) == pytest.approx(1.25 * 0.051, rel=0.1), "the cheapest step is longer than a turn now"
    assert steps.max_rows(1) > rows
    assert steps.prompt_tokens(1, 1, 1) >= tokens
    assert steps.seconds(1, 0) == pytest.approx(0.011), "a step itself takes as long as before"
    for _ in range(200):
        steps.note_wait(0.0)
    assert abs(steps.max_rows(1) - rows) <= 2
