"""Writes the account of what host memory holds, so that the next daemon can use that memory (daemon/process/account.py).

The account is written after each decision of the scheduler that changes it, and before the decision is carried out. So a slot that
is about to be written is never in the account, whenever the daemon is killed. A load verifies the checksum of every copy that it
uses.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

import msgspec

from daemon.process.account import Account
from daemon.process.formats import Format
from scheduler.node.host_tier import HostCopy, KeptWeights, SavedKV

log = logging.getLogger("hearthd.engine")
FORMAT = Format(version=1, reads_from=1, readable_from=1)


class _StoredCopy(msgspec.Struct, array_like=True):
    """A copy of weights, or saved KV, in host memory, as the account stores it. layout: identifies how the weights lie in memory
    (Registry.layout_id). slots: the slots that hold the copy. num_tokens: the tokens of saved KV. index: for saved KV, the engine's
    description of its blocks; b"" for a copy of weights."""

    model: str
    layout: str
    fingerprint: str
    slots: tuple[int, ...]
    num_bytes: int
    checksum: int
    index: bytes
    num_tokens: int


class _Content(msgspec.Struct):
    version: int
    slot_bytes: int
    copies: list[msgspec.Raw]
    readable_from: int = 0  # see Format


class _Decoded(msgspec.Struct):
    version: int
    slot_bytes: int
    copies: list[_StoredCopy]
    readable_from: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Decoded)


class HostCopies(Protocol):
    """The methods of the node scheduler that tell which copies are in host memory. host_revision: a number that changes whenever
    the copies change."""

    @property
    def host_revision(self) -> int: ...

    def host_copies(self) -> list[tuple[str, HostCopy]]: ...


class HostAccount:
    """Keeps the account of what host memory holds up to date, and reads the one that an earlier daemon left. account: the memory in
    which it is kept. slot_bytes: the size of a slot. copies: the scheduler, which knows what each slot holds. layout_of: returns
    for a model's name a text that identifies how its weights lie in memory (Registry.layout_id)."""

    def __init__(self, account: Account, slot_bytes: int, copies: HostCopies, layout_of: Callable[[str], str]) -> None:
        self._account, self._slot_bytes, self._copies, self._layout_of = account, slot_bytes, copies, layout_of
        self._revision = -1  # revision of the last written account
        self._encoded: dict[int, tuple[HostCopy, msgspec.Raw]] = {}  # by id() of the copy: an index may have megabytes

    def found(self) -> list[tuple[str, HostCopy]]:
        """Returns the copies that an earlier daemon has left, as (model, copy), for models whose weights still have the same
        layout. Returns [] if the copies were written by an incompatible version of hearthd, or with another slot size."""
        data = self._account.read()
        if not data:
            return []
        try:
            content = _decoder.decode(data)
        except msgspec.DecodeError:
            content = _Decoded(0, 0, [])
        if not FORMAT.reads(content.version, content.readable_from) or content.slot_bytes != self._slot_bytes:
            log.info("host memory of before the restart is not used: another version of hearthd, or another chunk_bytes, filled it")
            return []
        return [(one.model, _host_copy(one)) for one in content.copies if one.layout and one.layout == self._layout_of(one.model)]

    def look(self) -> None:
        """Writes the account of what host memory holds, for the next daemon, if that has changed since the last call. Called after
        each event that the scheduler has handled, before the scheduler's decisions are carried out. A failure to write is only
        logged."""
        if self._copies.host_revision != self._revision:
            self._revision = self._copies.host_revision
            try:
                self._account.write(self._encode())
            except OSError as error:
                log.warning("what host memory holds cannot be noted for the next hearthd: %s", error)

    def _encode(self) -> bytes:
        before, self._encoded = self._encoded, {}
        for model, copy in self._copies.host_copies():
            known = before.get(id(copy))
            raw = msgspec.Raw(_encoder.encode(_struct(model, copy, self._layout_of(model)))) if known is None else known[1]
            self._encoded[id(copy)] = (copy, raw)
        return _encoder.encode(
            _Content(FORMAT.version, self._slot_bytes, [raw for _, raw in self._encoded.values()], FORMAT.readable_from)
        )


def _struct(model: str, copy: HostCopy, layout: str) -> _StoredCopy:
    checksum = copy.checksums[0] if isinstance(copy, KeptWeights) and len(copy.checksums) == 1 else 0  # no share is used again
    index, num_tokens = (copy.index, copy.num_tokens) if isinstance(copy, SavedKV) else (b"", 0)
    return _StoredCopy(model, layout, copy.fingerprint, copy.slots, copy.num_bytes, checksum, index, num_tokens)


def _host_copy(one: _StoredCopy) -> HostCopy:
    if one.index:
        return SavedKV(one.fingerprint, one.slots, one.num_bytes, index=one.index, num_tokens=one.num_tokens)
    return KeptWeights(one.fingerprint, one.slots, one.num_bytes, checksums=(one.checksum,))
