"""Copies a model's weights to the host tier while they are read from disk, and loads them from there the next time."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

from engine.contracts.loads import LoadCancelled, LoadTask
from engine.memory.chunk_memory import ChunkMemory, DeviceCopy
from engine.memory.host_tier import HostTier
from engine.memory.out_of_memory import lacks_memory
from engine.memory.transfers import NUM_THREADS, Piece, Several, TransferCancelled, copies_several, starts_several, transfer
from engine.memory.weight_arrivals import WeightArrivals
from engine.memory.weight_gate import WeightGate
from engine.memory.weight_range import WeightRange
from loader.packing import checksum
from loader.threads import Thread

log = logging.getLogger("engine")


class WeightCopies:
    """Copies weights between one device and the host tier. tier: None if this engine was given no host tier."""

    def __init__(self, memory: ChunkMemory, tier: HostTier | None) -> None:
        self._memory, self._tier = memory, tier

    def take(self, task: LoadTask, weights: WeightRange, gate: WeightGate | None = None) -> bool:
        """Fills the mapped range `weights` with the copy in spec.source_slots of the host tier, and returns True. Returns False if
        there are no such slots, or if the copy cannot be used, which task.source_rejected then explains. gate: notified of the
        bytes that have arrived; None: no step waits for them. Raises LoadCancelled if the load is cancelled."""
        spec = task.spec
        if not spec.source_slots:
            return False
        if self._tier is None:
            task.source_rejected = "this engine was given no host tier"
            return False
        started_s = time.perf_counter()

        def landed(piece: Piece) -> None:
            if gate is not None:
                begin_bytes = piece[0] - weights.address
                gate.landed(begin_bytes, begin_bytes + len(piece[1]))

        try:
            sums = transfer(
                self._memory.copy_in,
                self._pieces(self._tier, spec.source_slots, weights),
                task.cancelled,
                lambda num_bytes: task.progress(num_bytes, weights.num_bytes),
                landed,
                several=copies_several(self._memory, out=False),
            )
        except (ValueError, IndexError) as error:
            task.source_rejected = str(error)
            return False
        except TransferCancelled:
            raise LoadCancelled(f"copy of {spec.model} from the host tier was cancelled") from None
        task.copy_seconds += time.perf_counter() - started_s
        found = checksum.combined(sums)
        if found != spec.checksum:
            task.source_rejected = f"the copy in the host tier has checksum {found:#x}, not {spec.checksum:#x}"
            return False
        task.kept, task.checksum, task.weights_checksum = True, found, found
        return True

    @contextmanager
    def keeping(self, task: LoadTask, weights: WeightRange, places: Iterable[tuple[int, int]]) -> Iterator[KeptCopy | None]:
        """Returns a context manager for the read of a model's weights. Its value is a KeptCopy, which copies the weights to
        spec.keep_slots of the host tier and must be notified of the bytes that have arrived; None if spec.keep_slots is empty. If
        the context ends without an error, the copy is complete and task.kept is set, unless memory was lacking for it. After the
        context, nothing writes to the slots. places: the ranges [begin, end) of the weight range, in bytes, that the read fills.

        Raises LoadCancelled if the load is cancelled, and ValueError or IndexError for slots that cannot hold the copy."""
        spec = task.spec
        if not spec.keep_slots:
            yield None
            return
        if self._tier is None:
            raise ValueError(f"model {spec.model}: keep_slots given, but this engine was given no host tier")
        pieces = self._pieces(self._tier, spec.keep_slots, weights)
        several = starts_several(self._memory, out=True)
        kept = KeptCopy(self._memory.copy_out, pieces, places, self._tier.slot_bytes, task.cancelled, several)
        try:
            yield kept
            started_s = time.perf_counter()
            try:
                sums = kept.finish()
            except Exception as error:
                if not lacks_memory(error):
                    raise
                line = str(error).partition("\n")[0]
                log.warning("the weights of %s are not kept in the host tier: %s", spec.model, line)
                return
        except TransferCancelled:
            raise LoadCancelled(f"copy of {spec.model} to the host tier was cancelled") from None
        finally:
            kept.stop()
        task.copy_seconds += time.perf_counter() - started_s  # only the copies after the last read; the others ran during the reads
        task.kept, task.checksum = True, checksum.combined(sums)
        task.weights_checksum = task.checksum

    @staticmethod
    def _pieces(tier: HostTier, slots: list[int], weights: WeightRange) -> list[Piece]:
        addresses = range(weights.address, weights.address + weights.num_bytes, tier.slot_bytes)
        return list(zip(addresses, tier.pieces(slots, weights.num_bytes), strict=True))


class KeptCopy:
    """Copies a weight range to slots of the host tier, piece by piece, while the weights are read. Piece i (slot_bytes bytes, fewer
    at the end) is copied to the i-th slot as soon as the read has filled it. Threads of its own do the copying, so neither the
    readers nor a running step wait for it.
    places: the parts of the range that the read fills, as [begin, end) in bytes.
    cancelled: called between copies; the copying ends when it returns True.
    several: a function that copies several pieces in one call; None: pieces are copied one by one."""

    def __init__(
        self,
        copy_out: Callable[[int, Any], DeviceCopy],
        pieces: Sequence[Piece],
        places: Iterable[tuple[int, int]],
        slot_bytes: int,
        cancelled: Callable[[], bool],
        several: Several | None,
    ) -> None:
        self._copy_out, self._pieces, self._cancelled, self._several = copy_out, pieces, cancelled, several
        self._arrivals = WeightArrivals(_by_piece(places, slot_bytes), len(pieces))
        self._lock = threading.Lock()
        self._start()

    def landed(self, begin_bytes: int, end_bytes: int) -> None:
        """Records that the bytes of the weight range from begin_bytes to before end_bytes have arrived. Called from any thread,
        once for each byte."""
        with self._lock:
            whole = self._arrivals.landed(begin_bytes, end_bytes)
        for piece in whole:
            self._ready.put(piece)

    def begin_anew(self) -> None:
        """Starts the copy again from the beginning, because the weights will be read again from another source. `landed` must not
        be called meanwhile."""
        self.stop()
        self._arrivals.begin_anew()
        self._start()

    def finish(self) -> list[int]:
        """Waits for the last copies, and returns the checksum of each piece. Called once all bytes have arrived. Raises
        TransferCancelled if the copying was cancelled, or the error of a copy."""
        assert max(self._arrivals.left_bytes, default=0) <= 0
        self._join()
        if self._error is not None:
            raise self._error
        return self._sums

    def stop(self) -> None:
        """Stops copying, whether or not the copy is complete, and waits for the threads to end. Idempotent."""
        self._stopped = True
        self._join()

    def _start(self) -> None:
        self._stopped, self._sums = False, list[int]()
        self._error: Exception | None = None
        self._ready: SimpleQueue[int | None] = SimpleQueue()  # indices into `pieces`; None: no more
        for piece, left in enumerate(self._arrivals.left_bytes):
            if not left:  # the read fills nothing in this piece
                self._ready.put(piece)
        thread = Thread(target=self._run, name="keep weights")
        thread.start()
        self._thread = thread

    def _run(self) -> None:
        def cancelled() -> bool:
            return self._stopped or self._cancelled()

        try:
            self._sums = transfer(self._copy_out, self._pieces, cancelled, next_piece=self._ready.get, several=self._several)
        except Exception as error:
            self._error = error

    def _join(self) -> None:
        for _ in range(NUM_THREADS):
            self._ready.put(None)
        self._thread.join()


def _by_piece(places: Iterable[tuple[int, int]], piece_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Yields the parts into which byte ranges of a weight range are cut at multiples of piece_bytes: (begin, end, index of the
    piece), in bytes. places: the ranges, as (begin, end) in bytes."""
    for begin, end in places:
        for piece in range(begin // piece_bytes, -(-end // piece_bytes)):
            yield max(begin, piece * piece_bytes), min(end, (piece + 1) * piece_bytes), piece
