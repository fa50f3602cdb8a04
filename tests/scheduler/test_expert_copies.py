"""Which experts several devices hold: the hottest ones, where that evens out the work of the devices."""

from __future__ import annotations

import random

import numpy as np
import pytest

from scheduler.expert_copies import MIN_TOKENS, Table, choose, imbalance, numbers


def loads_of(row: list[int], parts: tuple[tuple[int, ...], ...]) -> list[float]:
    """The tokens of each part if each expert's are divided evenly among its holders."""
    num_own = len(row) // len(parts)
    held = [{*range(part * num_own, (part + 1) * num_own), *further} for part, further in enumerate(parts)]
    holders = [sum(expert in one for one in held) for expert in range(len(row))]
    return [sum(row[expert] / holders[expert] for expert in one) for one in held]


def check(table: Table, num_experts: int, num_parts: int, layers: list[bool]) -> int:
    """Checks what the loader demands of a table, and returns the number of copies."""
    assert [bool(parts) for parts in table] == layers
    number = max(len(further) for parts in table for further in parts)
    num_own = num_experts // num_parts
    for parts in table:
        assert not parts or len(parts) == num_parts
        for part, further in enumerate(parts):
            assert list(further) == sorted(set(further))
            assert all(0 <= expert < num_experts and expert // num_own != part for expert in further)
    return number


def test_the_hottest_expert_of_the_busiest_part_gets_holders() -> None:
    row = [900, 100, 100, 100, 100, 100, 100, 100]
    table = choose([row], 2, 1)
    assert check(table, 8, 2, [True]) == 1
    assert table[0][1] == (0,)
    assert max(loads_of(row, table[0])) <= 850.0


def test_an_expert_with_all_tokens_is_held_by_all_parts() -> None:
    (parts,) = choose([[8000, 0, 0, 0, 0, 0, 0, 0]], 4, 4)
    assert all(0 in further for further in parts[1:])
    assert loads_of([8000, 0, 0, 0, 0, 0, 0, 0], parts) == [2000.0] * 4


def test_a_copy_that_would_only_move_the_work_is_not_made() -> None:
    """Half of expert 0 would make the other part the busiest; expert 1 does not. Nobody gains by a copy for the first part."""
    row = [1000, 300, 500, 500]
    assert loads_of(row, ((), (0,))) == [800.0, 1500.0]
    assert choose([row], 2, 1) == (((), (1,)),)


def test_no_more_copies_are_chosen_than_help() -> None:
    row = [1000, 100, 100, 100, 100, 100, 100, 100]
    few, many = (choose([row] * 3, 4, most) for most in (1, 6))
    assert check(few, 8, 4, [True] * 3) == 1
    assert check(many, 8, 4, [True] * 3) < 6
    assert max(loads_of(row, many[0])) <= max(loads_of(row, few[0])) <= 1.06 * sum(row) / 4


@pytest.mark.parametrize(
    ("rows", "num_parts", "most"),
    [
        ([[200] * 8], 2, 2),  # even
        ([[210, 190] * 4], 2, 2),  # nearly
        ([[2 * MIN_TOKENS - 10, 10] * 4], 4, 4),  # among the experts of a part alone
        ([[MIN_TOKENS - 1, 0, 0, 0] * 2], 8, 2),  # too few to tell
        ([[0] * 8], 2, 2),
        ([[4000, 0, 0, 0]], 2, 0),
        ([[4000, 0, 0, 0]], 1, 2),
        ([None, None], 2, 2),
        ([], 2, 2),
    ],
)
def test_without_a_clear_imbalance_there_are_none(rows: list[list[int] | None], num_parts: int, most: int) -> None:
    assert choose(rows, num_parts, most) == ()


def test_only_layers_that_are_uneven_get_copies() -> None:
    table = choose([None, [200] * 8, [3000, 0, 0, 0, 0, 0, 0, 0]], 2, 2)
    assert table == ((), ((), ()), ((), (0,)))


@pytest.mark.parametrize("seed", range(30))
def test_any_counts(seed: int) -> None:
    draw = random.Random(seed)
    num_parts, num_own, num_layers = draw.choice([2, 3, 4, 8]), draw.choice([1, 2, 8]), draw.randint(1, 5)
    num_experts, most = num_parts * num_own, draw.choice([1, 2, 3, 8, 16])
    rows = [[int(1000 * draw.paretovariate(0.8)) for _ in range(num_experts)] for _ in range(num_layers)]
    table = choose(list(rows), num_parts, most)
    home = np.arange(num_experts) // num_own == np.arange(num_parts)[:, None]
    before = imbalance(np.array(rows, float), np.broadcast_to(home, (num_layers, num_parts, num_experts)))
    loads = [loads_of(row, parts) for row, parts in zip(rows, table, strict=False)]
    if not table:
        return
    assert check(table, num_experts, num_parts, [True] * num_layers) <= min(most, num_experts - num_own)
    after = sum(map(max, loads)) / (sum(map(sum, rows)) / num_parts)
    assert after <= before - 0.05
    assert draw.choice([choose(list(rows), num_parts, most)]) == table, "the same counts give the same copies"


def test_which_numbers_are_tried() -> None:
    assert [numbers(most) for most in (0, 1, 2, 3, 7, 16)] == [(), (1,), (1, 2), (1, 2, 3), (1, 2, 4, 7), (1, 2, 4, 8, 16)]
