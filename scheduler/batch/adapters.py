"""Tracks the LoRA adapters of one model: which adapters are in device memory, at which index and in which chunks, and which
requests wait for an adapter.

An adapter takes a run of adjacent chunks out of the lease, the chunks that all models share for KV, so adapters and KV share one
pool without a part being set aside for either (the idea is S-LoRA's, https://arxiv.org/abs/2311.03285). An adapter that no running
sequence uses is idle: it is dropped when KV or another adapter needs its chunks, the least recently used first. No memory is
touched here.
"""

from __future__ import annotations

from collections.abc import Callable, KeysView
from dataclasses import dataclass

import numpy as np

from scheduler.batch.chunk_pool import ChunkPool, free_runs
from scheduler.batch.plan import IntArray
from scheduler.batch.request import BatchRequest
from scheduler.batch.step_limits import PATIENT_STEPS

MAX_ADAPTERS = 64  # most adapters of one model in memory; the device's tables have a column for each


@dataclass(slots=True, eq=False)
class ResidentAdapter:
    """An adapter in device memory. key: identifies its files. number: its index in the model's tables. num_rows: how many running
    sequences use it. last_used: a counter, larger for an adapter that was used later. is_new: whether none of the requests that
    waited for it has run yet; its chunks are then not given to another adapter, because two adapters could otherwise displace each
    other again and again. is_retired: whether it is dropped when the last sequence that uses it ends."""

    key: str
    number: int
    chunks: IntArray
    num_rows: int = 0
    last_used: int = 0
    is_new: bool = False
    is_retired: bool = False


class Adapters:
    """The adapters of one model that are in device memory, at most `most`, and the requests that wait for an adapter. The owner
    sets the attribute `dropped`, a function: dropped(number) is called when the adapter with this index is dropped, after which its
    memory must not be read."""

    def __init__(self, chunks: ChunkPool, most: int = MAX_ADAPTERS) -> None:
        self._chunks, self._most = chunks, most
        self.resident: dict[str, ResidentAdapter] = {}
        self.dropped: Callable[[int], None] = lambda number: None
        self._free_numbers = list(range(most - 1, -1, -1))
        # Requests whose adapter is not resident: key -> request id -> request, both in the order in which they came.
        self._waiting: dict[str, dict[int, BatchRequest]] = {}
        self._key_of: dict[int, str] = {}  # waiting request -> its adapter
        self._without_room: dict[str, int] = {}  # adapters that were refused a place and have none yet -> how often
        self._uses = 0

    # ---- in memory

    @property
    def num_chunks(self) -> int:
        """Number of chunks that hold adapters."""
        return sum(len(adapter.chunks) for adapter in self.resident.values())

    @property
    def num_used_chunks(self) -> int:
        """Number of chunks of adapters that running sequences use and that are therefore not dropped."""
        return sum(len(adapter.chunks) for adapter in self.resident.values() if adapter.num_rows)

    def is_resident(self, key: str) -> bool:
        return key in self.resident

    def take(self, key: str) -> ResidentAdapter:
        """Counts one more sequence that uses a resident adapter, and returns the adapter; it stays in memory as long as a sequence
        uses it. Raises KeyError if it is not resident."""
        adapter = self.resident[key]
        self._uses += 1
        adapter.num_rows, adapter.last_used, adapter.is_new = adapter.num_rows + 1, self._uses, False
        return adapter

    def leave(self, key: str) -> None:
        """Records that a sequence which used an adapter has left its slot. If no other sequence uses the adapter, its chunks may be
        given to others; if it is retired (`retire`), it is dropped."""
        self.undo(key)
        adapter = self.resident[key]
        if adapter.is_retired and not adapter.num_rows:
            self._drop(adapter)
        elif not adapter.num_rows:
            self._chunks.version += 1

    def undo(self, key: str) -> None:
        """Reverts one call of `take`, for a request that was not admitted after all. Unlike after `leave`, requests that wait for
        memory are not tried again."""
        self.resident[key].num_rows -= 1

    def retire(self, key: str) -> None:
        """Drops a resident adapter once the last sequence that uses it has ended, because no further request will name it. Does
        nothing if it is not resident."""
        if key not in self._waiting:
            self._stops_waiting(key)
        adapter = self.resident.get(key)
        if adapter is None:
            return
        adapter.is_retired = True
        if not adapter.num_rows and not adapter.is_new:
            self._drop(adapter)

    def keep(self, key: str) -> bool:
        """Cancels an earlier `retire` of an adapter, because requests will name it again. Returns whether the adapter is resident;
        if it is not, nothing is done."""
        adapter = self.resident.get(key)
        if adapter is not None:
            adapter.is_retired = False
        return adapter is not None

    def gone(self, request: BatchRequest) -> None:
        """Records that a queued request was aborted: its adapter may from now on be dropped for another one (sets
        ResidentAdapter.is_new to False)."""
        if (adapter := self.resident.get(request.adapter)) is not None:
            adapter.is_new = False

    def place(self, key: str, num_chunks: int, make_room: Callable[[int], int] = lambda num_chunks: 0) -> ResidentAdapter | None:
        """Takes num_chunks adjacent chunks from the lease (the chunks that all models share for KV) for an adapter that is not
        resident, and returns the adapter with its index; None, and nothing is taken, if there is no room now. Idle adapters of this
        model are dropped if necessary. make_room(num_chunks): a function that makes other owners give chunks back, and returns how
        many."""
        self._without_room.setdefault(key, 0)
        if not self._free_numbers and not self._drop_idle(new_ones=False):
            return None
        while (run := self._run_of(key, num_chunks)) is None:
            if not (self._drop_idle(new_ones=False) or make_room(num_chunks)):
                self._without_room[key] += 1
                return None
        self._stops_waiting(key)
        self._chunks.take(run, reserved=False)
        adapter = self.resident[key] = ResidentAdapter(key, self._free_numbers.pop(), run)
        self._uses += 1
        adapter.last_used = self._uses
        return adapter

    def give_up_idle(self, num_chunks: int, new_ones: bool = True) -> int:
        """Drops idle adapters, the least recently used first, until num_chunks chunks are free or no idle adapter is left. Returns
        how many chunks became free. new_ones: whether adapters with is_new may be dropped, too: True to make room for KV, False to
        make room for an adapter."""
        given = 0
        while given < num_chunks and (freed := self._drop_idle(new_ones)):
            given += freed
        return given

    def is_overdue(self, key: str) -> bool:
        """Returns whether requests wait for an adapter that has found no chunks in PATIENT_STEPS tries."""
        return key in self._waiting and self._without_room.get(key, 0) >= PATIENT_STEPS

    def give_up_all(self) -> None:
        """Drops every adapter, also those that sequences use; these sequences must not run again."""
        for key in list(self._without_room):
            self._chunks.release_kept((self, key))
        for adapter in list(self.resident.values()):
            self._drop(adapter)

    def _stops_waiting(self, key: str) -> None:
        """Records that nothing waits any more for room for this adapter: resets its count of unsuccessful tries, and releases the
        chunks that are kept for it."""
        self._without_room.pop(key, None)
        self._chunks.release_kept((self, key))

    def _run_of(self, key: str, num_chunks: int) -> IntArray | None:
        """Returns num_chunks adjacent free chunks from the shortest sufficient run of free chunks. Returns None if there is no such
        run, or if fewer chunks may still be taken from the lease (the chunks that all models share for KV). Chunks that are kept
        for another adapter count as taken."""
        chunks, free = self._chunks, self._chunks.choosable(num_chunks)
        own = chunks.keeps_for((self, key))
        if (chunks.room_chunks if own else chunks.drawable_chunks) < num_chunks:
            return None
        runs = free_runs(free if own else chunks.drawable(free))
        runs = runs[runs[:, 1] >= num_chunks]
        if not len(runs):
            return None
        first = int(runs[np.argmin(runs[:, 1]), 0])
        return np.arange(first, first + num_chunks, dtype=np.int32)

    def _drop_idle(self, new_ones: bool) -> int:
        """Drops from memory the least recently used adapter that no sequence uses. Returns how many chunks it had; 0 if there is no
        such adapter. new_ones: whether adapters with ResidentAdapter.is_new may be dropped, too."""
        idle = [adapter for adapter in self.resident.values() if not adapter.num_rows and (new_ones or not adapter.is_new)]
        if not idle:
            return 0
        adapter = min(idle, key=lambda adapter: adapter.last_used)
        self._drop(adapter)
        return len(adapter.chunks)

    def _drop(self, adapter: ResidentAdapter) -> None:
        del self.resident[adapter.key]
        self._free_numbers.append(adapter.number)
        self._chunks.give_back(adapter.chunks, reserved=False)
        self.dropped(adapter.number)

    # ---- requests that wait for an adapter

    @property
    def num_waiting(self) -> int:
        return len(self._key_of)

    @property
    def num_without_room(self) -> int:
        """Number of waiting requests whose adapter has been read from disk but found no room in device memory. For all other
        waiting requests, the adapter has still to be read."""
        return sum(len(self._waiting.get(key, ())) for key in self._without_room)

    @property
    def wanted(self) -> KeysView[str]:
        """Keys of the adapters that requests wait for, in the order in which the waiting began."""
        return self._waiting.keys()

    def wait(self, request: BatchRequest) -> None:
        self._waiting.setdefault(request.adapter, {})[request.request_id] = request
        self._key_of[request.request_id] = request.adapter

    def get(self, request_id: int) -> BatchRequest | None:
        """Returns the request of this id if it waits for its adapter, else None."""
        key = self._key_of.get(request_id)
        return None if key is None else self._waiting[key][request_id]

    def withdraw(self, request_id: int) -> bool:
        """Removes a waiting request; returns False if no request of this id waits."""
        key = self._key_of.pop(request_id, None)
        if key is None:
            return False
        del self._waiting[key][request_id]
        if not self._waiting[key]:
            del self._waiting[key]
            self._stops_waiting(key)
        return True

    def requests(self) -> list[BatchRequest]:
        """Returns all waiting requests, adapter by adapter."""
        return [request for waiting in self._waiting.values() for request in waiting.values()]

    def take_waiting(self, key: str) -> list[BatchRequest]:
        """Removes and returns the requests that wait for this adapter, in the order in which they came."""
        self._stops_waiting(key)
        found = list(self._waiting.pop(key, {}).values())
        for request in found:
            del self._key_of[request.request_id]
        return found
