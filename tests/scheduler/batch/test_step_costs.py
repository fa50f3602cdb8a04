"""What steps cost is learned: by size, and by the contexts they read."""

from __future__ import annotations

import random

import pytest

from scheduler.batch.step_costs import StepCosts, class_tokens


def device_s(num_tokens: int) -> float:
    """A device that reads weights for 5 ms and computes 10 tokens a millisecond."""
    return 0.005 + 0.0001 * num_tokens


def learned(*sizes: int, rounds: int = 20) -> StepCosts:
    costs = StepCosts()
    for _ in range(rounds):
        for size in sizes:
            costs.note(size, device_s(size))
    return costs


def test_classes_are_four_to_an_octave() -> None:
    tops = sorted({class_tokens(tokens) for tokens in range(1, 129)})
    assert tops == [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128]
    assert all(tokens <= class_tokens(tokens) <= tokens * 1.25 for tokens in range(1, 5000))


def test_nothing_is_known_at_first() -> None:
    costs = StepCosts()
    assert (costs.least(), costs.seconds(8), costs.tokens_within(1.0, 100)) == (0.0, 0.0, 0)


def test_between_known_steps_cost_is_a_straight_line() -> None:
    costs = learned(8, 512)
    assert costs.seconds(96) == pytest.approx(device_s(96), rel=1e-6)
    assert costs.seconds(90) == costs.seconds(96), "of one class"
    assert costs.tokens_within(device_s(100), 1000) == 96, "the end of a class"
    assert costs.tokens_within(device_s(112), 99) == 99, "all that is wanted"
    assert costs.seconds(1) == costs.least() == pytest.approx(device_s(8))
    assert costs.tokens_within(device_s(8) / 2, 1000) == 0


def test_larger_steps_than_known_are_found_soon_and_never_beyond_twice() -> None:
    costs, size, sizes = StepCosts(), 1, []
    for _ in range(40):
        costs.note(size, device_s(size))
        size = max(1, costs.tokens_within(0.015, 1000))
        sizes.append(size)
    assert max(device_s(size) for size in sizes) <= 2 * 0.015
    assert sizes[-20:] == [96] * 20


def test_where_cost_is_a_staircase_a_step_is_as_large_as_its_stair() -> None:
    """Products are made for multiples of so many rows."""
    costs = StepCosts()
    for _ in range(10):
        for size in range(16, 130, 3):
            costs.note(size, 0.005 + 0.0001 * (-(-size // 16) * 16))
    assert costs.tokens_within(0.005 + 0.0001 * 64 + 1e-5, 1000) == 64


def test_a_stall_is_soon_forgotten() -> None:
    costs = learned(8, 128)
    costs.note(8, 3.0)  # larger steps are known to cost less
    assert costs.seconds(8) <= device_s(128) + 1e-9
    costs.note(128, 3.0)
    assert costs.seconds(128) < 1.5 * device_s(128)


def test_stalls_now_and_then_are_no_part_of_what_a_size_costs() -> None:
    """One step in ten takes three times as long. What streams may be stretched to follows from what their steps cost."""
    costs = learned(8, 128)
    for number in range(200):
        costs.note(8, (3 if number % 10 == 0 else 1) * device_s(8))
        assert costs.seconds(8) <= 1.05 * device_s(8)


def test_when_all_steps_get_dearer_fewer_tokens_are_allowed() -> None:
    costs = learned(8, 64, 512)
    before = costs.tokens_within(0.020, 1000)
    for _ in range(10):  # something else runs beside: three times as dear, though only this size was seen so
        costs.note(64, 3 * device_s(64))
    assert costs.tokens_within(0.020, 1000) < before / 2
    for _ in range(30):
        costs.note(64, device_s(64))
    assert costs.tokens_within(0.020, 1000) == pytest.approx(before, rel=0.1)


def test_the_first_step_of_a_size_is_no_measure_of_it() -> None:
    """In it products are made ready. Were it believed, no such step would be allowed again, and it would stay so."""
    costs = learned(1, 2)
    costs.note(4, 0.050)
    assert costs.tokens_within(0.008, 100) >= 4
    costs.note(4, device_s(4))
    assert costs.seconds(4) == pytest.approx(device_s(4))
    costs = learned(1, 2)
    for seconds in (device_s(4), 0.050):  # nor a stall in the second
        costs.note(4, seconds)
    assert costs.seconds(4) == pytest.approx(device_s(4))


def test_the_second_step_of_a_size_is_no_measure_either() -> None:
    """The first is recorded, the second lays out what was: 20 ms each where later ones take 10. The size below costs 8.6."""
    costs = learned(1)
    for seconds in (2 * device_s(2), 1.9 * device_s(2)):
        costs.note(2, seconds)
    assert costs.tokens_within(1.25 * device_s(1), 100) >= 2, "it is tried once more"
    costs.note(2, device_s(2))
    assert costs.seconds(2) == pytest.approx(device_s(2))
    for _ in range(6):
        costs.note(2, 2 * device_s(2))
    assert costs.seconds(2) > 1.2 * device_s(2), "what is firm is believed"


def test_first_steps_of_sizes_far_apart_are_no_measure_of_each_other() -> None:
    """A few small steps, one long prompt: were each held to little more than the one below, 512 tokens would seem to cost 7 ms."""
    costs = StepCosts()
    for size in (1, 64, 512):
        costs.note(size, device_s(size))
    assert costs.seconds(512) == pytest.approx(device_s(512))
    assert costs.tokens_within(0.015, 512) < 100


def test_beyond_the_largest_known_step_cost_goes_on_as_before() -> None:
    costs = learned(8, 64)
    assert costs.seconds(128) == pytest.approx(device_s(128))
    assert costs.tokens_within(device_s(112) + 1e-6, 1000) == 112, "not twice the largest, which would take 17.8 ms"
    assert costs.tokens_within(1.0, 128) == 128
    assert learned(8).tokens_within(2 * device_s(8), 1000) == 16, "of one size nothing tells what more would cost"


def test_what_has_been_too_dear_is_tried_again() -> None:
    """Something else ran beside for a while. Such steps were not taken since."""
    costs, sizes = learned(1, 8), []
    for _ in range(10):
        costs.note(8, 3 * device_s(8))
    assert costs.tokens_within(1.5 * device_s(8), 8) < 8
    for _ in range(5000):
        sizes.append(max(1, costs.tokens_within(1.5 * device_s(8), 8)))
        costs.note(sizes[-1], device_s(sizes[-1]))
    assert sizes[-1] == 8


def contexts_of(num_tokens: int, context: int) -> tuple[float, float]:
    """A chunk's positions, and its pairs."""
    return float(context + num_tokens), num_tokens * (context + num_tokens / 2)


def true_s(num_tokens: int, context: int) -> float:
    read, pairs = contexts_of(num_tokens, context)
    return device_s(num_tokens) + 3e-6 * read + 2e-7 * pairs


def test_contexts_are_told_from_sizes() -> None:
    """Prompts of 2,000 tokens in chunks of several sizes, timed with some noise: any other chunk is foretold, a first one too."""
    costs, rng = StepCosts(2), random.Random(3)
    for size in (32, 48, 64, 48, 96, 64, 32):
        for context in range(0, 2000, size):
            costs.note(size, true_s(size, context) * (1 + 0.05 * rng.random()), contexts_of(size, context))
    for size in (32, 56, 96):
        for context in (0, 700, 1900):
            assert costs.seconds(size, contexts_of(size, context)) == pytest.approx(true_s(size, context), rel=0.12), (
                size,
                context,
            )


def test_chunks_get_smaller_as_contexts_grow() -> None:
    costs = StepCosts(2)
    for size in (16, 32, 64, 96, 64, 32):
        for context in range(0, 2000, size):
            costs.note(size, true_s(size, context), contexts_of(size, context))
    sizes = []
    for context in (0, 500, 1000, 1900):
        size = costs.tokens_within(0.015, 1000, lambda tokens, context=context: contexts_of(tokens, context))  # type: ignore[misc]
        assert 0.8 * 0.015 <= true_s(size, context) <= 1.05 * 0.015
        sizes.append(size)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] >= 1.5 * sizes[-1]


def test_contexts_that_never_differ_teach_nothing_wrong() -> None:
    costs = StepCosts(1)
    for _ in range(100):
        costs.note(8, 0.010, (1000.0,))
    assert costs.seconds(8, (1000.0,)) == pytest.approx(0.010)
    assert costs.seconds(8, (3000.0,)) == pytest.approx(0.010, rel=0.2)


def test_only_sizes_that_were_seen_three_times_are_firm() -> None:
    costs = StepCosts(1)
    assert costs.firm_seconds(8, (0.0,)) == 0.0
    for _ in range(2):
        costs.note(8, 0.010, (0.0,))
    assert costs.seconds(8, (0.0,)) > 0.0
    assert costs.firm_seconds(8, (0.0,)) == 0.0
    costs.note(8, 0.010, (0.0,))
    assert costs.firm_seconds(8, (0.0,)) == pytest.approx(0.010)
    assert costs.firm_seconds(512, (0.0,)) == 0.0, "a size nobody has seen"


@pytest.mark.parametrize("seed", range(3))
def test_times_that_vary_by_chance_are_no_cost_of_contexts(seed: int) -> None:
    """Lets steps take 10 ms whatever they read, give or take a fifth, and up to three times that for one in twenty, as on a busy
    machine. By the latest fit alone, contexts seem to cost up to all of a step, and steps twice what they do."""
    draw = random.Random(seed)
    costs = StepCosts(2, 16)
    for number in range(1500):
        chunk = draw.choice((16, 32, 64, 128))
        stall = draw.uniform(1.5, 3) if draw.random() < 0.05 else 1.0
        costs.note(64 + chunk, 0.010 * max(0.5, draw.gauss(1, 0.2)) * stall, (12_000.0 + 10 * (number % 60), chunk * chunk / 2))
        if number > 500:
            assert costs.seconds(64 + 16, (12_000.0, 16 * 8.0)) == pytest.approx(0.010, rel=0.4)
            assert costs.seconds(64 + 256, (12_000.0, 256 * 128.0)) < 0.016


def test_what_contexts_cost_is_not_forgotten_while_they_stay_the_same() -> None:
    draw = random.Random(0)
    costs = StepCosts(1)
    for number in range(300):
        context = 1000.0 * (number % 50)
        costs.note(8, (0.005 + 1e-7 * context) * draw.gauss(1, 0.01), (context,))
    for _ in range(2000):
        costs.note(8, (0.005 + 1e-7 * 5000) * draw.gauss(1, 0.05), (5000.0,))
    assert costs.seconds(8, (50_000.0,)) == pytest.approx(0.010, rel=0.05)
