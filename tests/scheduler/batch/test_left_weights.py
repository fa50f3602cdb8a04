"""Free chunks that hold a dead engine's weights: free for everybody, chosen last, and lost as a whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.plan import IntArray

CHUNKS = 24


def chunks_of(*numbers: int) -> IntArray:
    return np.array(numbers, np.int32)


def pool(resident_limit: int | None = None) -> ChunkPool:
    made = ChunkPool(CHUNKS, 1 << 16, lease_chunks=CHUNKS, resident_limit=resident_limit)
    made.leave("a", chunks_of(7, 3, 4))
    made.leave("b", chunks_of(10, 11))
    return made


def test_they_come_back_in_the_weights_order() -> None:
    made = pool()
    assert made.take_left("a").tolist() == [7, 3, 4]
    assert (made.num_weights, list(made.left)) == (3, ["b"])
    with pytest.raises(KeyError):
        made.take_left("a")
    made.give_back_weights(chunks_of(7, 3, 4))
    assert not made.free[made.take_left("b")].any()


@pytest.mark.parametrize("chunks", [(4, 5), (CHUNKS,), (-1,), ()])
def test_what_cannot_be_left_is_refused(chunks: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="weights of c: chunks"):
        pool().leave("c", chunks_of(*chunks))


def test_chunks_that_lie_together_may_be_worth_more_than_blank_ones() -> None:
    made = pool()
    assert set(made.take_weights(CHUNKS - 5).tolist()).isdisjoint({3, 4, 7, 10, 11})
    assert list(made.left) == ["a", "b"]
    assert made.hold(1).tolist()[0] in (3, 4, 7, 10, 11)
    assert len(made.left) == 1, "one chunk of a model is as good as all"


def test_memory_goes_back_to_the_system_last_from_them() -> None:
    made = pool(resident_limit=6)
    own = made.take_weights(2)
    made.give_back_weights(own)
    assert [first for first, _ in made.take_discards()] == [own[-1]]
    assert list(made.left) == ["a", "b"]
    made.resident_limit = 4
    gone = {first + at for first, length in made.take_discards() for at in range(length)}
    assert list(made.left) == ["b"]
    assert gone.isdisjoint({10, 11})


@given(st.lists(st.tuples(st.sampled_from("whtfl"), st.integers(0, 9)), max_size=30))
def test_nothing_is_left_in_chunks_that_others_were_given(steps: list[tuple[str, int]]) -> None:
    made, owned = pool(), list[IntArray]()
    for kind, num in steps:
        free = int(np.count_nonzero(made.free))
        if kind in "wh" and num <= free:
            blank = int(np.count_nonzero(made.choosable(0)))
            before = dict(made.left)
            owned.append(made.take_weights(num) if kind == "w" else made.hold(num))
            assert num > blank or made.left == before, "blank chunks were enough"
        elif kind == "t" and made.left:
            owned.append(made.take_left(next(iter(made.left))))
        elif kind == "f" and owned:
            made.release_hold(owned.pop(num % len(owned)))
        elif kind == "l":
            made.take_discards()
        left = [chunk for chunks in made.left.values() for chunk in chunks.tolist()]
        assert len(left) == len(set(left)) == int(np.count_nonzero(made._is_left))
        assert made.free[left].all()
        assert made.resident[left].all()
        taken = [chunk for chunks in owned for chunk in chunks.tolist()]
        assert len(taken) == len(set(taken)) == CHUNKS - int(np.count_nonzero(made.free))
