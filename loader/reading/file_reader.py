"""Carries out the planned reads of a weight file. The bytes come from the page cache or directly from the drive, and go either
straight to their place in the weight range or through a staging slot, a buffer of host memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field

import numpy as np

from loader.errors import CheckpointError, ReadFailed
from loader.files.direct_io import BLOCK_BYTES, REFUSALS, Alignment, direct_alignment, is_cached, open_direct
from loader.files.file_calls import CallUnderWay, LeftBehind, is_local
from loader.reading.range_plan import ANY_ALIGNMENT, Read, Span, direct_spans, staged_spans
from loader.reading.sinks import Fence, WeightSink
from loader.reading.staging import StagingRing
from loader.reading.unpack import Unpacker

log = logging.getLogger("loader")


@dataclass(slots=True, frozen=True)
class Fetched:
    """The result of a read that was carried out.

    direct_bytes: bytes read past the page cache. staged_bytes: bytes that went through the staging slot, a buffer of host memory.
    given_bytes: bytes that another rank (device of a split model) had read. All three count bytes of tensors as they are in the
    file.

    fence: passed when the copies of this read's bytes to a device have ended; the caller then gives `slot` back to the ring of
    staging slots. None: there are no copies, and the caller must not give back `slot`."""

    read: Read
    direct_bytes: int
    staged_bytes: int
    slot: memoryview
    fence: Fence | None
    given_bytes: int = 0


@dataclass(slots=True, eq=False)
class Fetching:
    """The state of one reader thread. slot: the staging slot (buffer of host memory) of the thread's current or last read; None
    before the first. call: entered around each file system call of the thread, so that another thread may abandon the call."""

    call: CallUnderWay = field(default_factory=CallUnderWay)
    slot: memoryview | None = None


class FileReader:
    """Reads one open weight file. Several threads may call `fetch` at once. file: the file's name, for errors. fd: the file's
    descriptor. sink: the destination of the weights. ring: the staging slots, buffers of host memory through which bytes go that
    cannot be read straight to their place. stack: closes the descriptors that this reader opens. unpacker: decodes the frames
    (pieces) of packed files."""

    def __init__(self, file: str, fd: int, sink: WeightSink, ring: StagingRing, stack: ExitStack, unpacker: Unpacker) -> None:
        self._file, self._fd, self._sink, self._ring, self._unpacker = file, fd, sink, ring, unpacker
        # A read that was left behind may still write to where it was to bring the bytes: that must be a slot then.
        self._memory = sink.memory if is_local(fd) else None
        self._address = 0 if self._memory is None else np.frombuffer(self._memory, np.uint8).ctypes.data
        self._alignment = direct_alignment(fd)
        # Spans begin on whole pages even where the kernel requires less: others cost a twentieth of the speed (measured).
        self._span_alignment = Alignment(self._alignment.memory_bytes, max(self._alignment.offset_bytes, BLOCK_BYTES))
        self._direct_fd: int | None = None
        self.refused = ""  # why the file can't be read past the page cache; "" if it can
        try:
            self._direct_fd = open_direct(fd)
            stack.callback(os.close, self._direct_fd)
        except OSError as error:
            self._refuse(error)

    def fetch(
        self, read: Read, at: Fetching, given: memoryview | None = None, offer: Callable[[memoryview], None] | None = None
    ) -> Fetched:
        """Carries out a read in the calling thread. On return its weights are in the model's weight range (the memory for all its
        weights), or are being copied to it from a staging slot (a buffer of host memory). The caller gives this slot back to the
        ring once Fetched.fence is passed. at: the state of the thread, updated here.

        For a read that several ranks (devices of a split model) share: given: the read's bytes, if another rank has read them.
        offer: called with the bytes before they are stored, to give them to the other ranks.

        Raises ReadFailed if the drive fails, and CheckpointError if the file ends too early or a frame is damaged; both name file,
        tensor and offset. Raises RuntimeError if the device failed, and LeftBehind if another thread has abandoned the file system
        call. After an error the slot is back in the ring."""
        for begin_bytes, end_bytes in read.places:
            self._sink.prepare(begin_bytes, end_bytes)
        if given is not None and self._sink.memory is not None:
            return self._stored_from(read, given)
        slot = at.slot = self._ring.take()
        direct_fd: int | None = None
        try:
            if given is not None:  # no device may still copy from it when its rank reuses it
                np.copyto(np.frombuffer(slot, np.uint8)[: read.needed_bytes], np.frombuffer(given, np.uint8)[: read.needed_bytes])
                staged = staged_spans(read, ())
            else:
                direct_fd, staged = self._from_file(read, at.call, slot, in_place=offer is None)
                if offer is not None:
                    offer(slot[: read.needed_bytes])
            self._store(read, staged, slot)
            fence = self._sink.fence()
        except LeftBehind:
            self._ring.give_back(slot)
            raise
        except BaseException as error:
            self._take_back(slot)
            if isinstance(error, OSError):
                tensor = read.segments[0].tensor.name
                raise ReadFailed(self._file, tensor, f"can't read at offset {read.begin}: {error.strerror}") from None
            raise
        if fence is None:
            self._ring.give_back(slot)
        direct_bytes = read.num_bytes if direct_fd is not None else 0
        given_bytes = 0 if given is None else read.num_bytes
        return Fetched(read, direct_bytes, sum(span.end - span.begin for span in staged), slot, fence, given_bytes)

    def _stored_from(self, read: Read, given: memoryview) -> Fetched:
        """Stores the bytes of a read in the weight range, if another rank (device of a split model) has read them from the file.
        given: the bytes, in the memory through which ranks share reads. Returns when they are stored."""
        self._store(read, staged_spans(read, ()), given)
        if (fence := self._sink.fence()) is not None:
            fence.wait()
        return Fetched(read, 0, 0, given, None, read.num_bytes)

    def _store(self, read: Read, spans: Iterable[Span], held: memoryview) -> None:
        """Starts moving parts of a read from a buffer to their offsets in the model's weight range. spans: the parts. held: the
        buffer, whose first byte is the first byte of the read."""
        for span in spans:
            staged = held[span.begin - read.begin : span.end - read.begin]
            if span.segment.frame is None:
                self._sink.store(span, staged)
            else:
                self._unpacker.store(span.segment, staged)

    def _from_file(self, read: Read, call: CallUnderWay, slot: memoryview, in_place: bool) -> tuple[int | None, list[Span]]:
        """Reads the bytes of a read from the file: through the page cache if it holds them, otherwise past it. Returns (the
        descriptor that bypassed the page cache, or None; the spans, or parts of the read, that are in the slot and must still be
        stored). call: entered around file system calls. slot: the staging slot, a buffer of host memory. in_place: whether bytes
        may be read directly into the weight range; if not, all of them go to the slot."""
        direct_fd = self._direct_fd
        with call:
            if direct_fd is not None and is_cached(self._fd, read.begin, read.begin + read.needed_bytes):
                direct_fd = None
        try:
            return direct_fd, self._brought(read, call, slot, direct_fd, in_place)
        except OSError as error:
            if direct_fd is None or error.errno not in REFUSALS:
                raise
            self._refuse(error)
        return None, self._brought(read, call, slot, None, in_place)

    def _take_back(self, slot: memoryview) -> None:
        """Gives the staging slot (buffer of host memory) of a failed read back to the ring of free ones, after waiting for copies
        from the slot that were already started."""
        try:
            fence = self._sink.fence()
            if fence is not None:
                fence.wait()
        except RuntimeError as error:  # the load fails with the earlier error
            log.warning("%s: %s", self._file, error)
        self._ring.give_back(slot)

    def _brought(self, read: Read, call: CallUnderWay, slot: memoryview, direct_fd: int | None, in_place: bool) -> list[Span]:
        """Reads the bytes of a read from the file, directly into the weight range where that is possible and into the staging slot
        otherwise. Returns the spans (parts of the read) that are in the slot and must still be stored. call: entered around file
        system calls. direct_fd: a descriptor that bypasses the page cache; None: the page cache is used. in_place: whether bytes
        may be read directly into the weight range; if not, all of them go to the slot."""
        memory, direct = self._memory, list[Span]()
        if memory is not None and in_place:
            direct = direct_spans(read, self._address, ANY_ALIGNMENT if direct_fd is None else self._span_alignment)
        buffers, position = [], read.begin
        for span in direct:
            assert memory is not None
            if span.begin > position:
                buffers.append(slot[position - read.begin : span.begin - read.begin])
            buffers.append(memory[span.place_bytes : span.place_bytes + span.end - span.begin])
            position = span.end
        if read.end > position:
            buffers.append(slot[position - read.begin : read.end - read.begin])
        self._read_all(read, call if memory is None else nullcontext(), direct_fd, buffers)
        return staged_spans(read, direct)

    def _read_all(self, read: Read, call: AbstractContextManager[None], direct_fd: int | None, buffers: list[memoryview]) -> None:
        """Fills the buffers, one after the other, with the read's bytes. call: a context that is entered around each system call.
        direct_fd: a descriptor that bypasses the page cache; None: the page cache is used. The system calls release the interpreter
        lock, so other threads run meanwhile. Raises CheckpointError if the file ends too early."""
        fd = self._fd if direct_fd is None else direct_fd
        done = 0
        while done < read.needed_bytes:
            with call:
                num_bytes = os.preadv(fd, buffers, read.begin + done)
            done += num_bytes
            # A direct read that returns part of a block has reached the end of the file, and no read could continue from there.
            broken = direct_fd is not None and done % self._alignment.offset_bytes
            if done < read.needed_bytes and (broken or not num_bytes):
                at = read.begin + done
                cut = next(segment.tensor for segment in read.segments if segment.end > at)
                missing = cut.offset_bytes + cut.num_bytes - at
                raise CheckpointError(self._file, cut.name, f"the file ends at offset {at}, {missing} bytes too early")
            buffers = _behind(buffers, num_bytes)

    def _refuse(self, error: OSError) -> None:
        """Makes all further reads of this file use the page cache, because the file system has refused a direct read, and logs
        that. error: the refusal."""
        self._direct_fd = None
        self.refused = error.strerror or str(error)
        log.info("%s: no direct reads (%s); reading through the page cache", self._file, error.strerror)


def _behind(buffers: list[memoryview], num_bytes: int) -> list[memoryview]:
    """Returns the buffers without their first num_bytes bytes, which have been filled already."""
    for i, buffer in enumerate(buffers):
        if num_bytes < len(buffer):
            return [buffer[num_bytes:], *buffers[i + 1 :]]
        num_bytes -= len(buffer)
    return []
