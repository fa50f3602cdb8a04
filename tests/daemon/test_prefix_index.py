"""The memory of which replica has computed which prompts."""

from __future__ import annotations

from daemon.requests import prefix_index
from daemon.requests.prefix_index import BLOCK_TOKENS, PrefixIndex

SEED = ("tenant", "", "")


def tokens(num_blocks: int, first: int = 0) -> list[int]:
    return list(range(first, first + num_blocks * BLOCK_TOKENS))


def test_the_longest_prefix_of_each_replica_is_found() -> None:
    index = PrefixIndex()
    index.note("a", SEED, tokens(2), "a")
    index.note("a", SEED, tokens(4), "a#2")
    assert index.find("a", SEED, [*tokens(3), 7]) == (("a", 2 * BLOCK_TOKENS), ("a#2", 3 * BLOCK_TOKENS))
    assert index.find("a", SEED, tokens(4)[:-1]) == (("a", 2 * BLOCK_TOKENS), ("a#2", 3 * BLOCK_TOKENS))


def test_a_prefix_counts_only_from_the_start_and_for_whoever_may_share_it() -> None:
    index = PrefixIndex()
    index.note("a", SEED, tokens(4), "a")
    assert index.find("a", SEED, tokens(3, first=BLOCK_TOKENS)) == ()
    assert index.find("a", ("other", "", ""), tokens(4)) == ()
    assert index.find("a", SEED, tokens(1)[:-1]) == ()
    assert index.find("b", SEED, tokens(4)) == ()


def test_a_replica_that_has_left_is_forgotten() -> None:
    index = PrefixIndex()
    index.note("a", SEED, tokens(2), "a")
    index.note("a", SEED, tokens(2), "a#2")
    index.forget("a#2")
    index.forget("never seen")
    assert index.find("a", SEED, tokens(2)) == (("a", 2 * BLOCK_TOKENS),)
    index.forget("a")
    assert index.find("a", SEED, tokens(2)) == ()
    assert not index._blocks
    assert not index._bits


def test_what_was_used_longest_ago_goes_first(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(prefix_index, "MOST_BLOCKS", 4)
    index = PrefixIndex()
    index.note("a", SEED, tokens(2, first=10_000), "a")
    index.note("a", SEED, tokens(2, first=20_000), "a")
    index.note("a", SEED, tokens(2, first=10_000), "a")
    index.note("a", SEED, tokens(2, first=30_000), "a")
    assert index.find("a", SEED, tokens(2, first=20_000)) == ()
    assert index.find("a", SEED, tokens(2, first=10_000)) == (("a", 2 * BLOCK_TOKENS),)
