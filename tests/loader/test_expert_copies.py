"""Tests which device computes which tokens of an expert that several devices hold."""

from __future__ import annotations

from collections import Counter

from loader.shapes.expert_copies import turns
from loader.shapes.model_shape import ExpertCopies, ExpertShape, SplitShape

EXPERTS = ExpertShape(8, 2, 16, True)
COPIES: ExpertCopies = ((), ((2, 7), (0, 1), (1, 2), (2, 5)))  # of layer 1: expert 2 is held by all four


def shares(copies: ExpertCopies = COPIES, inner: int = 1) -> list[SplitShape]:
    return [SplitShape(rank, 4 * inner, expert_parts=4, copies=copies) for rank in range(4 * inner)]


def test_each_token_of_an_expert_has_one_holder() -> None:
    tables = [turns(share, 1, EXPERTS) for share in shares()]
    for expert in range(8):
        num_holders = [table[expert][0] for table in tables]
        assert num_holders == [num_holders[0]] * 4
        numbers = [table[expert][1] for table in tables if table[expert][1] >= 0]
        assert sorted(numbers) == list(range(num_holders[0]))
    assert [table[2][0] for table in tables] == [4] * 4
    assert [[number for number, (_, turn, _) in enumerate(table) if turn >= 0] for table in tables] == [
        [0, 1, 2, 7],
        [0, 1, 2, 3],
        [1, 2, 4, 5],
        [2, 5, 6, 7],
    ]
    for table in tables:
        assert [at for _, turn, at in table if turn >= 0] == [0, 1, 2, 3], "in the order of the matrices"
        assert all(at == -1 for _, turn, at in table if turn < 0)


def test_single_tokens_are_not_all_computed_by_the_first_holder() -> None:
    """The numbers of the holders begin at another one with each expert and layer."""
    copies: ExpertCopies = tuple(((4, 5), (0, 1), (0, 1), (4, 5)) for _ in range(16))
    first = Counter[int]()
    for layer in range(16):
        for part, share in enumerate(shares(copies)):
            first[part] += sum(turn == 0 for _, turn, _ in turns(share, layer, EXPERTS)[:2])
    assert set(first) >= {0, 1, 2}
    assert max(first.values()) <= 12


def test_devices_with_slices_of_the_same_experts_compute_the_same_tokens() -> None:
    every = shares(inner=2)
    for rank in range(0, 8, 2):
        assert turns(every[rank], 1, EXPERTS) == turns(every[rank + 1], 1, EXPERTS)


def test_without_copies_each_expert_has_its_own_holder() -> None:
    table = turns(shares(())[1], 1, EXPERTS)
    assert table == [(1, -1, -1)] * 2 + [(1, 0, 0), (1, 0, 1)] + [(1, -1, -1)] * 4
