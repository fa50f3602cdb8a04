"""Which blocks a prompt finds again."""

from __future__ import annotations

import numpy as np

from scheduler.batch.block_pool import BlockPool
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.group_cache import GroupCache
from scheduler.batch.prefix_cache import PrefixCache, extend_keys, prefix_seed, tail_key


def keys_of(tokens: list[int], num_blocks: int, salt: str = "", fingerprint: str = "f", dtype: str = "float32") -> list[bytes]:
    keys: list[bytes] = []
    extend_keys(keys, prefix_seed(salt, fingerprint, dtype), np.array(tokens, np.int32), 4, num_blocks)
    return keys


def test_keys_name_the_whole_prefix() -> None:
    tokens = list(range(12))
    assert keys_of(tokens, 3)[:2] == keys_of(tokens, 2)
    changed = [99, *tokens[1:]]
    assert not set(keys_of(tokens, 3)) & set(keys_of(changed, 3)), "every later key depends on the first block"


def test_keys_can_be_extended_later() -> None:
    tokens = np.arange(12, dtype=np.int32)
    keys = keys_of(tokens.tolist(), 1)
    extend_keys(keys, prefix_seed("", "f", "float32"), tokens, 4, 3)
    assert keys == keys_of(tokens.tolist(), 3)


def test_seed_separates_salt_model_and_dtype() -> None:
    seeds = {prefix_seed(*parts) for parts in [("", "f", "b"), ("f", "", "b"), ("a", "f", "b"), ("", "fb", ""), ("", "f", "c")]}
    assert len(seeds) == 5
    tokens = list(range(8))
    assert not set(keys_of(tokens, 2, salt="a")) & set(keys_of(tokens, 2, salt="b"))


def test_as_many_sequences_as_a_batch_may_hold_have_keys_of_their_own() -> None:
    """Checks that saving them ends: it counts the serial number up until a key is free."""
    tokens = np.array([7, 8, 9], np.int32)
    assert len({tail_key(b"parent", tokens, serial) for serial in range(4096)}) == 4096


def test_match_ends_at_the_first_gap() -> None:
    cache = PrefixCache()
    keys = keys_of(list(range(16)), 4)
    for key, block in zip(keys, (7, 8, 9), strict=False):
        cache.add(key, block)
    assert cache.match(keys) == [7, 8, 9]
    cache.forget([8])
    assert cache.match(keys) == [7]
    assert cache.match(keys_of([5] * 16, 4)) == []


def test_the_older_of_two_equal_blocks_stays() -> None:
    cache = PrefixCache()
    cache.add(b"k", 1)
    cache.add(b"k", 2)
    assert cache.match([b"k"]) == [1]
    assert cache.keep([2]) == [2], "the other is not kept"


def test_least_recently_used_goes_first() -> None:
    cache = PrefixCache()
    for block in (1, 2, 3):
        cache.add(bytes([block]), block)
    assert cache.keep([1, 2, 3]) == []
    cache.hold([1])
    cache.keep([1])
    assert cache.give_up(2) == [2, 3]
    assert cache.num_unheld == 1
    assert cache.match([bytes([1])]) == [1]


def make_cache(num_chunks: int = 2) -> GroupCache:
    return GroupCache(BlockPool(ChunkPool(num_chunks, 64), 16, num_chunks), 4)


def test_the_end_of_a_sequence_is_given_up_before_its_beginning() -> None:
    kv = make_cache()
    keys = keys_of(list(range(32)), 8)
    blocks = kv.allocate(8)
    assert blocks is not None
    kv.learn(keys, blocks)
    kv.release(blocks)
    assert kv.num_cached_blocks == 8
    taken = kv.allocate(3)
    assert taken is not None
    assert kv.prefixes.match(keys) == blocks[:5].tolist()


def test_a_shared_block_is_not_given_up() -> None:
    kv = make_cache()
    keys = keys_of(list(range(32)), 8)
    blocks = kv.allocate(8)
    assert blocks is not None
    kv.learn(keys, blocks)
    kv.release(blocks)
    shared = kv.share(keys[:4])
    again = kv.share(keys[:2])
    assert kv.pool.refcount[shared].tolist() == [2, 2, 1, 1]
    assert kv.allocate(5) is None
    assert kv.allocate(4) is not None
    kv.release(again)
    kv.release(shared)
    assert kv.num_cached_blocks == 4
    kv.pool.check()


def test_poisoned_blocks_are_not_found_but_shared_ones_are() -> None:
    kv = make_cache()
    keys = keys_of(list(range(16)), 4)
    blocks = kv.allocate(4)
    assert blocks is not None
    kv.learn(keys, blocks)
    other = kv.share(keys[:2])
    kv.discard(blocks)
    assert kv.prefixes.match(keys) == other.tolist()
    assert kv.num_held_blocks == 2
