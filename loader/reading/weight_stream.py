"""Reads a checkpoint's tensors, in the order of the layers, into a model's weight range.

All files are opened before the first byte is read, so a load never reads a mixture of old and new files if files are replaced
meanwhile. A few threads read. The caller's thread waits for them, reports progress and checks for a cancellation.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue

from loader.errors import CheckpointChanged
from loader.files.file_calls import LEAVE_AFTER_S, LOOK_EVERY_S, FileCalls, LeftBehind, ReadCancelled
from loader.files.safetensors import Header, read_header
from loader.files.weight_files import FileInfo
from loader.formats.plain import PLAIN
from loader.formats.weight_format import WeightFormat
from loader.models.catalog import Checkpoint
from loader.models.checked_again import check_unchanged, open_unchanged, scanned_again
from loader.models.drafters import joined, renamed
from loader.reading.file_reader import Fetched, Fetching, FileReader
from loader.reading.landings import Landings, Places
from loader.reading.range_plan import Read, plan_reads
from loader.reading.read_order import ReadOrder
from loader.reading.shared_reads import SharedReads
from loader.reading.sinks import WeightSink
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder, Unpacker
from loader.shapes.model_shape import DeviceShare, ModelShape
from loader.sizes import layout, slices
from loader.threads import Thread

log = logging.getLogger("loader")

# The reader threads of each load. Two reads keep a drive busy; a third one fills the gaps between them where they do not end
# together.
NUM_READERS = 3
MIB = 1 << 20
NUMPY_DECODER = Decoder()


@dataclass(slots=True)
class OpenCheckpoint:
    """A checked checkpoint whose weight files are open. shape: the shape of the model, or of the device's share of a split model,
    that is loaded. files: the model's files that were opened, either plain or packed ones. headers, descriptors: file name ->
    header, and file name -> descriptor, also for a draft head's files."""

    checkpoint: Checkpoint
    shape: ModelShape
    files: tuple[FileInfo, ...]
    headers: dict[str, Header]
    descriptors: dict[str, int]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors in the open files, as they are stored."""
        return sum(tensor.num_bytes for header in self.headers.values() for tensor in header.tensors)

    @property
    def is_packed(self) -> bool:
        return any(header.source is not None for header in self.headers.values())

    @property
    def has_plain_files_beside(self) -> bool:
        """Returns whether the open files are packed ones and the model has plain files too."""
        return self.is_packed and self.files != self.checkpoint.files

    @property
    def packed_reason(self) -> str:
        """A sentence for the log that says whether packed or plain files are read, and why; "": the model has no packed files. Only
        for a load that had no choice between packed and plain files; for all others SourceChoice.reason says what was chosen."""
        if self.is_packed:
            return "read its packed files: there are no plain ones"
        if self.shape.split is not None and self.checkpoint.packed_files:
            return "read its plain files: shares of a model are read from packed ones only where there are no others"
        why = self.checkpoint.packed_reason
        return f"read its plain files: the packed ones can't stand for them ({why})" if why else ""


def open_checkpoint(
    path: str | Path,
    fingerprint: str,
    stack: ExitStack,
    in_place: bool = True,
    wants_packed: Callable[[Checkpoint], bool] = lambda checkpoint: False,
    predicts: bool = False,
    head: str = "",
    share: DeviceShare | None = None,
    name: str = "",
) -> OpenCheckpoint:
    """Checks a model's folder again, opens its weight files and returns them; `stack` closes them.

    fingerprint: the fingerprint with which the model was registered; "" accepts any. in_place: whether reads may write directly
    into the weight range, whose layout then follows the files; if not, every parameter is aligned to 64 bytes. wants_packed: called
    if the folder has both plain and packed files; returns whether to open the packed ones.

    predicts: whether the model's own predictor, the layer that predicts one token further, is also read. head: the folder of a
    draft head that is also read; "": there is none. With a head, `fingerprint` is that of model and head together. share: the
    device's share of the model that is read, from plain files if there are any; None: the whole model. name: the name by which the
    model is served, for the log; "": the folder's name.

    Raises CheckpointError for files that are not valid, and CheckpointChanged if the files differ from the registered ones or are
    incomplete. Raises UnsupportedModel, which names `parallel`, for a share of a model that cannot be divided in this way."""
    checkpoint = scanned_again(path, "" if head else fingerprint, "model", name)
    shape = checkpoint.predicting if predicts and not head else checkpoint.shape
    if shape is None:
        raise CheckpointChanged(f"{path}: is no model {'that predicts further tokens ' if predicts else ''}any more")
    may_be_packed = checkpoint.packed_files and share is None
    files = checkpoint.packed_files if may_be_packed and wants_packed(checkpoint) else checkpoint.files
    further: tuple[FileInfo, ...] = ()
    if head:
        both = joined(checkpoint, scanned_again(head, "", "head"))
        if fingerprint and both.fingerprint != fingerprint:
            raise CheckpointChanged(f"{path}: files changed since the model was registered, or those of its head {head}")
        shape, further = both.shape, both.files
    if share is not None:
        shape = slices.split(shape, *share)
    headers, descriptors = {}, {}
    for info in (*files, *further):
        fd = open_unchanged(path, info, "model")
        stack.callback(os.close, fd)
        header = read_header(fd, info.name)
        headers[info.name], descriptors[info.name] = renamed(header, info.name) if info in further else header, fd
    return OpenCheckpoint(checkpoint, shape if in_place else replace(shape, block_offsets=()), files, headers, descriptors)


@dataclass(slots=True)
class ReadReport:
    """The amounts that a load has read, in bytes of tensors as they are in the files.

    num_bytes: bytes that this load has read from the files: for a whole model those of all tensors, for a share of a split model
    those of the reads that this device carried out itself. given_bytes: bytes of the share that other devices have read for this
    one.

    direct_bytes: bytes read past the page cache. staged_bytes: bytes that went through a staging slot, a buffer of host memory.
    refused: file -> why it could not be read past the page cache."""

    num_bytes: int
    direct_bytes: int = 0
    staged_bytes: int = 0
    given_bytes: int = 0
    refused: dict[str, str] = field(default_factory=dict)


def planned_reads(
    source: OpenCheckpoint, dtype: str, ring: StagingRing, weight_format: WeightFormat = PLAIN, shares: bool = False
) -> list[Read]:
    """Returns the reads that `stream_weights` carries out, in the order of its plan. dtype, weight_format: the dtype and format in
    which the weights are held. ring: the staging slots (buffers of host memory), whose size limits a read. shares: whether the
    ranks (devices) of a split model share reads. Raises CheckpointError for a tensor that is missing or has another shape."""
    slots = layout.weight_layout(source.shape, dtype, weight_format)
    readers = layout.readers(source.shape, weight_format) if shares else {}
    return plan_reads(source.headers, slots, dtype, ring.slot_bytes, readers)


def stream_weights(
    source: OpenCheckpoint,
    dtype: str,
    sink: WeightSink,
    ring: StagingRing,
    progress: Callable[[int, int], None],
    cancelled: Callable[[], bool],
    weight_format: WeightFormat = PLAIN,
    landed: Callable[[Places], None] = lambda places: None,
    decoder: Decoder = NUMPY_DECODER,
    shared: Sequence[SharedReads] = (),
) -> ReadReport:
    """Reads a checkpoint's weights into the sink's weight range, which is laid out by layout.weight_layout. Bytes that cannot be
    read directly into the weight range pass through the staging slots (buffers of host memory) of `ring`.

    weight_format: how matrices are held; they are converted as they arrive. decoder: decodes packed files. shared: the memories
    through which the ranks (devices) of a split model share reads (shared_by); the caller must call shared_reads.leave for them
    afterwards. progress(bytes done, all bytes): called by the calling thread between reads. cancelled(): called by the calling
    thread; returns whether to stop. landed(places): called by the calling thread or a reader thread when the ranges `places` of the
    weight range have been filled.

    Reads begin in the order of the plan, except for shared ones, and end in any order. When this function returns or raises, no
    copy to a device is in progress. If the load is cancelled or fails, reads that do not return are abandoned, with their staging
    slots.

    Raises CheckpointError, which names file, tensor and offset, for weights that cannot be used; CheckpointChanged if the files
    were replaced; ReadCancelled if the load was cancelled; RuntimeError if the device failed."""
    reads = planned_reads(source, dtype, ring, weight_format, bool(shared))
    planned = sum(read.num_bytes for read in reads)
    total = source.num_bytes if source.shape.split is None else planned
    done = total - planned  # tensors that follow from others are not read
    report = ReadReport(total)
    with ExitStack() as stack:
        calls = stack.enter_context(FileCalls(source.checkpoint.name, cancelled))
        unpacker = Unpacker(sink, decoder)
        opened, descriptors = calls.opened, source.descriptors.items()
        files = calls.run(lambda: {file: FileReader(file, fd, sink, ring, opened, unpacker) for file, fd in descriptors})
        landings = Landings(reads, sink)
        readers = stack.enter_context(_Readers(reads, files, ring, lambda read: landed(landings.of(read)), shared))
        for _ in reads:
            fetched = readers.next_done(cancelled)
            done += fetched.read.num_bytes
            report.direct_bytes += fetched.direct_bytes
            report.staged_bytes += fetched.staged_bytes
            report.given_bytes += fetched.given_bytes
            progress(done, total)
            if cancelled():
                tensor = fetched.read.segments[-1].tensor
                raise ReadCancelled(f"{tensor.file}: read of tensor {tensor.name} was cancelled")
        sink.finish()
        calls.run(lambda: _check_unchanged(source))
    report.num_bytes -= report.given_bytes
    report.refused = {name: reader.refused for name, reader in files.items() if reader.refused}
    log.info(
        "%s: read %.1f MiB, %.1f of it past the page cache, %.1f through staging slots%s%s",
        source.checkpoint.name,
        report.num_bytes / MIB,
        report.direct_bytes / MIB,
        report.staged_bytes / MIB,
        "" if ring.huge_pages else " without huge pages (the system allows none)",
        f"; {report.given_bytes / MIB:.1f} MiB more were read by other ranks" if report.given_bytes else "",
    )
    return report


def _check_unchanged(source: OpenCheckpoint) -> None:
    for info in source.files:
        check_unchanged(source.descriptors[info.name], info, "model")


class _Readers:
    """The threads that carry out the reads of a load; each takes the next read in order. A context manager. landed: called with
    each read whose weights are in the weight range. shared: the memories through which the ranks (devices) of a split model share
    reads.

    On leaving the context the threads end after their current read. A thread whose read does not return within LEAVE_AFTER_S
    seconds is abandoned; it then touches nothing but its staging slot, a buffer of host memory. Reader threads do not wait for
    copies to a device. The caller's thread waits for them, and then gives the staging slot back."""

    def __init__(
        self,
        reads: list[Read],
        files: dict[str, FileReader],
        ring: StagingRing,
        landed: Callable[[Read], None],
        shared: Sequence[SharedReads],
    ) -> None:
        self._files, self._ring, self._landed = files, ring, landed
        self._left = ReadOrder(reads, shared)
        self._done: SimpleQueue[Fetched | Exception | Fetching] = SimpleQueue()  # Fetching: that thread has ended
        self._failed: dict[int, Exception] = {}  # by the read's index in the plan
        self._stopped = False
        self._alive = {Fetching() for _ in range(min(NUM_READERS, len(reads)))}
        self._threads = {at: Thread(target=self._run, args=(at,), name=f"reader {i}") for i, at in enumerate(self._alive)}

    def __enter__(self) -> _Readers:
        try:
            for thread in self._threads.values():
                thread.start()
        except MemoryError:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the threads and waits for them. Meanwhile the staging slots (buffers) of finished reads are given back to the ring
        of free ones, because a thread may be waiting for a slot."""
        self._stopped, leave_s = True, time.monotonic() + LEAVE_AFTER_S
        while self._alive:
            try:
                item = self._done.get(timeout=LEAVE_AFTER_S)
            except Empty:
                item = None
                self._has_lost_threads()
            if isinstance(item, Fetching):
                self._alive.discard(item)
            elif isinstance(item, Fetched) and item.fence is not None:
                try:
                    self._arrive(item)
                except RuntimeError as error:  # the error that ended the load is being raised already
                    log.warning("%s: %s", item.read.file, error)
            if time.monotonic() >= leave_s:
                self._leave_behind()
        for thread in self._threads.values():
            thread.join()

    def _leave_behind(self) -> None:
        """Abandons the threads whose file system call has not returned, and replaces their staging slots (buffers of host memory).
        All other threads end on their own."""
        left = [at for at in self._alive if at.call.leave()]
        for at in left:
            self._forget(at)
        if left:
            log.warning("%d reads do not return: the file system does not answer; they are left behind", len(left))

    def _forget(self, at: Fetching) -> None:
        """Stops waiting for a reader thread. at: the thread's state. If the thread has a staging slot (buffer of host memory), a
        further one is mapped, because the thread may never give its own back."""
        self._alive.discard(at)
        del self._threads[at]
        if at.slot is not None:
            self._ring.replace(at.slot)

    def _has_lost_threads(self) -> bool:
        """Returns whether threads have ended, or were never started, without reporting that in `_done`; this happens if memory has
        run out. Such threads are not waited for any more, and their staging slots (buffers) are replaced."""
        ended = [at for at in self._alive if not self._threads[at].is_alive()]
        if not ended or not self._done.empty():
            return False
        for at in ended:
            self._forget(at)
        return True

    def next_done(self, cancelled: Callable[[], bool]) -> Fetched:
        """Waits until any read has ended, including the copies of its bytes to a device, and returns that read's result. If reads
        have failed, raises the error of the one that comes first in the plan. Raises ReadCancelled if cancelled() returns True
        while no read has ended."""
        item = self._next(cancelled)
        while isinstance(item, Fetching):
            self._alive.discard(item)
            item = self._next(cancelled)
        if isinstance(item, Exception):
            self.__exit__()
            raise self._failed[min(self._failed)]
        if item.fence is not None:
            self._arrive(item)
            self._landed(item.read)
        return item

    def _next(self, cancelled: Callable[[], bool]) -> Fetched | Exception | Fetching:
        while True:
            try:
                return self._done.get(timeout=LOOK_EVERY_S)
            except Empty:
                if cancelled():
                    raise ReadCancelled(f"{', '.join(self._files)}: the reads were cancelled") from None
                if self._has_lost_threads():
                    raise MemoryError(f"{', '.join(self._files)}: a thread that reads has ended") from None

    def _arrive(self, fetched: Fetched) -> None:
        assert fetched.fence is not None
        try:
            fetched.fence.wait()
        finally:  # a device that failed no longer reads from the slot
            self._ring.give_back(fetched.slot)

    def _run(self, at: Fetching) -> None:
        try:
            while (turn := self._left.next(lambda: self._stopped)) is not None:
                try:
                    fetched = self._files[turn.read.file].fetch(turn.read, at, turn.given, turn.offer)
                    self._left.end(turn)
                    if fetched.fence is None:
                        self._landed(turn.read)
                    self._done.put(fetched)
                except LeftBehind:
                    return
                except Exception as error:
                    self._failed[turn.place] = error
                    self._done.put(error)
                    return
        finally:
            self._done.put(at)
