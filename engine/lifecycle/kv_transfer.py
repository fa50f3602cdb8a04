"""Copies KV blocks between a device and slots of the host tier, and makes the index of saved blocks that the daemon keeps.

Saved blocks lie end to end in the slots, in the order of the index. A block may begin in one slot and end in the next.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.memory.transfers import Piece, copies_several, transfer
from engine.serve.identity import kv_identity, weights_identity
from engine.serve.served_models import ServedModel
from loader.packing import checksum
from scheduler.batch import kv_saving
from scheduler.batch.kv_cache import KVCache
from scheduler.batch.plan import BoolArray, IntArray
from scheduler.batch.prefix_cache import KEY_BYTES

log = logging.getLogger("engine")


class KVIndex(msgspec.Struct, frozen=True, array_like=True):
    """The index of a model's saved KV, for E blocks and G KV groups; encoded, it is Evicted.kv_index.
    fingerprint, kv_dtype: texts that identify the weights and the kind of KV (weights_identity, kv_identity).
    keys: the blocks' keys, end to end.
    num_tokens: int32 [E], tokens in each block.
    present: uint8 [E, G], 1 if the block of this group is saved.
    checksums: uint64, the checksum of each saved block: one for each 1 in `present`, row by row."""

    fingerprint: str
    kv_dtype: str
    block_tokens: int
    block_bytes: list[int]  # bytes of a block of each group
    keys: bytes
    num_tokens: bytes
    present: bytes
    checksums: bytes


_decoder = msgspec.msgpack.Decoder(KVIndex)


@dataclass(slots=True)
class KVTransfer:
    """The copying of E blocks of KV, each of G KV groups of one model, between the device and the host tier. `run`, which may be
    called in any thread, does the copying.
    save: True: from the device to the host tier; False: back to the device.
    blocks [E, G]: numbers of blocks on the device, -1 where a group has none.
    pieces, expected, checksums: lists with one entry for each number in `blocks` that is not -1, row by row. pieces: the pieces of
    the block, each with its address on the device and its memory in a slot. expected: the checksum that the index gives for the
    block; the list is empty if `save`. checksums: the checksum of the bytes that `run` has copied.
    num_lost_tokens: number of computed tokens of running requests whose KV is not saved."""

    served: ServedModel
    keys: list[bytes]
    num_tokens: list[int]
    blocks: IntArray
    save: bool
    pieces: list[list[Piece]]
    memory: ChunkMemory | None  # None for a null model, which has no KV to copy
    slots_used: list[int] = field(default_factory=list)  # the given slots that are filled, in order
    num_lost_tokens: int = 0
    expected: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    seconds: float = 0.0
    error: BaseException | None = None

    @property
    def num_bytes(self) -> int:
        return sum(memoryview(held).nbytes for pieces in self.pieces for _, held in pieces)

    def run(self) -> None:
        started_s = time.perf_counter()
        try:
            sums = iter(self._copied([piece for pieces in self.pieces for piece in pieces]))
            self.checksums = [checksum.combined([next(sums) for _ in pieces]) for pieces in self.pieces]
        except BaseException as error:
            self.error = error
        self.seconds = time.perf_counter() - started_s

    def _copied(self, pieces: list[Piece]) -> list[int]:
        if self.memory is None:
            return [0] * len(pieces)
        copy = self.memory.copy_out if self.save else self.memory.copy_in
        return transfer(copy, pieces, several=copies_several(self.memory, out=self.save))


def saving(served: ServedModel, slots: Sequence[int], tier: HostTier | None, memory: ChunkMemory | None) -> KVTransfer:
    """Returns a transfer, not yet run, that saves KV of an evicted model to `slots` of the host tier, as much as they hold: first
    that of its running requests, then that of waiting ones, then other cached prefixes. The transfer copies nothing if `tier` is
    None. Raises IndexError for a slot that does not exist."""
    slot_bytes = tier.slot_bytes if tier is not None else 0
    found = kv_saving.select(served.scheduler, len(slots) * slot_bytes)
    pieces = _pieces(served.scheduler.kv, found.blocks, slots, tier, memory) if tier is not None and slots else []
    num_bytes = sum(len(host) for parts in pieces for _, host in parts)
    used = list(slots[: -(-num_bytes // slot_bytes)]) if num_bytes else []
    done = KVTransfer(served, found.keys, found.num_tokens, found.blocks, True, pieces, memory, used)
    done.num_lost_tokens = found.num_lost_tokens
    return done


def index_of(done: KVTransfer) -> bytes:
    """Returns the encoded index of the blocks that a transfer has saved; b"" if there are none, or if the transfer failed. A later
    LoadModel that contains the index restores the blocks."""
    if not done.keys or done.error is not None:
        return b""
    spec, kv = done.served.spec, done.served.scheduler.kv
    return msgspec.msgpack.encode(
        KVIndex(
            weights_identity(spec),
            kv_identity(spec),
            kv.block_tokens,
            [group.block_bytes for group in kv.groups],
            b"".join(done.keys),
            np.array(done.num_tokens, np.int32).tobytes(),
            (done.blocks >= 0).astype(np.uint8).tobytes(),
            np.array(done.checksums, np.uint64).tobytes(),
        )
    )


def restoring(served: ServedModel, tier: HostTier | None, memory: ChunkMemory | None) -> KVTransfer | None:
    """Returns a transfer, not yet run, that copies a model's saved KV from slots of the host tier (LoadModel.kv_slots) into free
    blocks; None if there is nothing to restore. None is also returned, and the reason logged, if the index is invalid or belongs to
    other weights."""
    spec, kv = served.spec, served.scheduler.kv
    if not spec.kv_index or tier is None:
        return None
    try:
        index = _decoder.decode(spec.kv_index)
        keys = [index.keys[at : at + KEY_BYTES] for at in range(0, len(index.keys), KEY_BYTES)]
        num_tokens = np.frombuffer(index.num_tokens, np.int32)
        present = np.frombuffer(index.present, np.uint8).reshape(len(keys), len(kv.groups)).astype(np.bool_)
        sums = np.frombuffer(index.checksums, np.uint64)
        ours = (weights_identity(spec), kv_identity(spec), kv.block_tokens)
        same = (index.fingerprint, index.kv_dtype, index.block_tokens) == ours
        if not same or index.block_bytes != [group.block_bytes for group in kv.groups]:
            raise ValueError("it is of other weights or blocks")
        if len(num_tokens) != len(keys) or len(sums) != np.count_nonzero(present):
            raise ValueError("its parts differ in length")
        blocks = kv_saving.make_room(kv, present)
        try:
            pieces = _pieces(kv, blocks, spec.kv_slots, tier, memory)
        except (ValueError, IndexError):
            kv_saving.take_back(kv, keys, num_tokens.tolist(), blocks, np.zeros(len(blocks), np.bool_))
            raise
    except (msgspec.DecodeError, ValueError, IndexError) as error:
        log.warning("saved KV of %s is not used: %s", spec.model, error)
        return None
    num = len(blocks)
    expected = sums[: len(pieces)].tolist()
    return KVTransfer(served, keys[:num], num_tokens[:num].tolist(), blocks, False, pieces, memory, expected=expected)


def restored(done: KVTransfer) -> int:
    """Adds the blocks that a transfer has restored intact to the cached prefixes, and frees its other blocks. Called after `run`.
    Returns the number of tokens in the blocks added."""
    kv = done.served.scheduler.kv
    present = done.blocks >= 0
    same: BoolArray = np.zeros(present.shape, np.bool_)
    if done.error is None:
        same[present] = np.array(done.checksums, np.uint64) == np.array(done.expected, np.uint64)
    else:
        log.warning("saved KV of %s is lost: %s", done.served.spec.model, done.error)
    good: BoolArray = np.logical_and.reduce(same | ~present, axis=1)
    if done.error is None and not good.all():
        text = "saved KV of %s: %d of %d blocks have changed and are not used"
        log.warning(text, done.served.spec.model, np.count_nonzero(~good), len(good))
    return kv_saving.take_back(kv, done.keys, done.num_tokens, done.blocks, good)


def _pieces(kv: KVCache, blocks: IntArray, slots: Sequence[int], tier: HostTier, memory: ChunkMemory | None) -> list[list[Piece]]:
    """Cuts saved blocks, which lie end to end in the slots, at the ends of slots. For each number in blocks [E, G] (E saved blocks,
    G KV groups) that is not -1, row by row, returns the block's pieces: (address on the device, the slot's memory). Raises
    ValueError if the slots are too few, and IndexError for a slot that does not exist."""
    arena = 0 if memory is None else memory.arena.data_ptr()
    sizes = [group.block_bytes for group in kv.groups]
    views = [tier.slot(slot) for slot in slots]
    size, at = tier.slot_bytes, 0
    found = []
    for e, g in zip(*np.nonzero(blocks >= 0), strict=True):
        address, left = arena + int(blocks[e, g]) * sizes[g], sizes[g]
        parts: list[Piece] = []
        while left:
            if at // size >= len(views):
                raise ValueError(f"{len(slots)} slots are too few for {np.count_nonzero(blocks >= 0)} blocks")
            num = min(left, size - at % size)
            parts.append((address, views[at // size][at % size : at % size + num]))
            address, left, at = address + num, left - num, at + num
        found.append(parts)
    return found
