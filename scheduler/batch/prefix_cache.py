"""Maps token prefixes to the full blocks that hold their KV.

A block's key is the hash of its parent's key and its own token ids; the chain starts from a seed of tenant, the
request's salt, model fingerprint and KV dtype, so that two tenants or two salts never share a key. Blocks that no sequence holds
stay cached; the least recently used is dropped first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

import numpy as np

from scheduler.batch.plan import BoolArray, IntArray

KEY_BYTES = 16
SERIAL_BYTES = 3


def prefix_seed(*parts: str) -> bytes:
    """Returns the key from which the chain of a sequence's block keys starts. parts: whatever keeps KV apart, such as tenant and
    salt. Each part is length-prefixed, so that no two lists of parts give the same bytes."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    for part in parts:
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def extend_keys(keys: list[bytes], seed: bytes, tokens: IntArray, block_tokens: int, num_blocks: int) -> None:
    """Appends keys until `keys` has those of the first `num_blocks` full blocks. seed: the sequence's `prefix_seed`, the parent of
    its first block. tokens: int32, at least num_blocks * block_tokens of them."""
    start = len(keys)
    if start >= num_blocks:
        return
    data = tokens[start * block_tokens : num_blocks * block_tokens].tobytes()
    size = block_tokens * tokens.itemsize
    parent = keys[-1] if keys else seed
    for offset in range(0, len(data), size):
        parent = hashlib.blake2b(parent + data[offset : offset + size], digest_size=KEY_BYTES).digest()
        keys.append(parent)


def tail_key(parent: bytes, tokens: IntArray, serial: int) -> bytes:
    """Returns the key of a partial block: it holds `tokens`, fewer than fill a block, and follows the block whose key is `parent`.
    serial: several sequences with the same tokens each have a partial block of their own; the serial numbers 0, 1, ... give these
    blocks different keys."""
    data = tokens.astype(np.int32).tobytes() + serial.to_bytes(SERIAL_BYTES)  # no full block's data has such a length
    return hashlib.blake2b(parent + data, digest_size=KEY_BYTES).digest()


class PrefixCache:
    """The cached blocks of one KV group by key, and the order in which blocks that no sequence holds are dropped. Reference counts
    are in the block pool."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, bytes] = {}
        self._unheld: dict[int, None] = {}  # insertion order: least recently used first

    @property
    def num_unheld(self) -> int:
        """Number of cached blocks that no sequence holds."""
        return len(self._unheld)

    def are_known(self, keys: Sequence[bytes]) -> BoolArray:
        """Returns [len(keys)]: for each key, whether its block is cached."""
        block_of = self._block_of
        return np.array([key in block_of for key in keys], np.bool_)

    def known(self, keys: Iterable[bytes]) -> list[int]:
        """Returns the cached blocks of `keys`, in the order of the keys; keys without a cached block are left out."""
        return [self._block_of[key] for key in keys if key in self._block_of]

    def match(self, keys: Sequence[bytes]) -> list[int]:
        """Returns the blocks of the longest cached prefix of `keys`, in order."""
        blocks = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def block_of(self, key: bytes) -> int:
        """Returns the block of a key; -1 if it is not cached."""
        return self._block_of.get(key, -1)

    def recent_keys(self) -> list[bytes]:
        """Returns the keys of blocks that nobody holds, the most recently used first."""
        return [self._key_of[block] for block in reversed(self._unheld)]

    def add(self, key: bytes, block: int) -> None:
        """Records that `block`, which a sequence holds, has the content that `key` names. Does nothing if the key or the block is
        known already."""
        if key not in self._block_of and block not in self._key_of:
            self._block_of[key] = block
            self._key_of[block] = key

    def hold(self, blocks: Iterable[int]) -> None:
        """Records that a sequence holds these blocks, so that they are not dropped."""
        for block in blocks:
            self._unheld.pop(block, None)

    def keep(self, blocks: Iterable[int]) -> list[int]:
        """Records that no sequence holds `blocks` any more. Those whose content is known stay cached, and the first of them will be
        dropped first. Returns the others, which the caller must free."""
        unknown = []
        for block in blocks:
            if block in self._key_of:
                self._unheld[block] = None
            else:
                unknown.append(block)
        return unknown

    def give_up(self, num: int) -> list[int]:
        """Drops up to `num` blocks that no sequence holds, the least recently used first, and returns them."""
        blocks: list[int] = []
        for block in self._unheld:
            if len(blocks) == num:
                break
            blocks.append(block)
        self.forget(blocks)
        return blocks

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Records that the content of block sources[i] is now in block targets[i]. The order in which cached blocks are dropped
        does not change."""
        moved = dict(zip(sources, targets, strict=True))
        keys = [(moved[block], key) for block in sources if (key := self._key_of.pop(block, None)) is not None]
        for block, key in keys:
            self._block_of[key], self._key_of[block] = block, key
        if not self._unheld.keys().isdisjoint(moved):
            self._unheld = {moved.get(block, block): None for block in self._unheld}

    def forget(self, blocks: Iterable[int]) -> None:
        """Removes blocks and their keys from the cache, because their contents are not trusted or their memory is needed."""
        for block in blocks:
            key = self._key_of.pop(block, None)
            if key is not None:
                del self._block_of[key]
            self._unheld.pop(block, None)
