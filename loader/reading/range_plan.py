"""Plans the reads of a load, in the order of the layers: which bytes of which file are read, and at which offset in the model's
weight range they belong. A read is divided into segments; each segment has an offset in the weight range.

A read consists of whole blocks of 4 KiB, so that it can bypass the page cache. If a segment lies at the same offset within a block
in the weight range as in the file, its whole blocks are read directly into the weight range (layout.weight_layout arranges that for
large tensors). All other bytes go through a staging slot, where they have the same offset as in the read: the blocks at a tensor's
ends, tensors at another offset within a block, and tensors that are converted.

In a split model each rank (device) has a share of the weights, and reads only the share's rows and long runs of its columns. If its
runs of columns are short, it reads whole rows and stores only its part of each row. A packed file consists of frames that are
compressed separately; only the frames that hold something of the share are read. Ranks that need the same bytes, because they have
parts of the same rows or the same whole matrices, plan the same reads, and may share them (loader/reading/shared_reads.py).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from loader.architectures.architecture import Cut
from loader.errors import CheckpointError
from loader.files.direct_io import BLOCK_BYTES, Alignment
from loader.files.packed import Frame
from loader.files.safetensors import DTYPE_BYTES, Header, TensorRef
from loader.formats.packed_rows import PANEL_ROWS
from loader.formats.weight_format import SCALE_BYTES, WeightSlot, without_ones
from loader.shapes.dtypes import DTYPE_OF, FP8, ITEM_BYTES, SCALES_IN

# Shorter runs of columns are read together with the bytes between them: a few long reads are faster than many short ones.
MIN_RUN_BYTES = 256 << 10
# Smaller tensors that all ranks have whole (norms, biases) are read by each rank, together with what lies beside them in the file.
MIN_SHARED_BYTES = 1 << 20
MIN_DIRECT_BYTES = 32 << 10  # shorter spans are as cheap to copy, and a system call accepts 1,024 pieces at most
ANY_ALIGNMENT = Alignment(1, 1)
QUANTIZED, SCALES, PACKED = "int8", "scales", "packed"


@dataclass(slots=True, frozen=True)
class Segment:
    """Consecutive whole elements of one tensor: bytes [begin, end) of its file, which belong at the offset place_bytes of the
    model's weight range (the memory for all its weights).

    target: what the elements are converted to: the engine's dtype if it differs from the stored one, else "". These are special
    values:

        "int8"                rows that are quantised; their scales belong at the offset scales_at_bytes of the weight range
        "scales"              all scales of a matrix, which are held in float32
        FP8, E8M0             codes that are stored unchanged but must be checked
        a value of SCALES_IN  scales of INT4 weights
        name of a Relayout    numbers that are rearranged
        "packed"              rows that are packed

    For the target "scales": each stored row fills `repeats` rows of memory, and the scales take held_bytes bytes in all. inverse:
    whether their inverses are held. kept: the part of them that is held (WeightSlot.kept).

    stage: the part of a forward pass that first needs the tensor (WeightSlot.stage).

    frame: the frame of a packed file of which the segment consists; None: the file is plain. contents: for a frame, the segments of
    its decoded values that are stored, in order; their begin and end are counted as though the file held the tensor unpacked.

    whole: the location of the whole tensor if its numbers are rearranged (loader/formats/relayout.py) or packed, else None. The
    segment's numbers are then scattered over this location, and place_bytes is counted as though they lay end to end (for packed
    rows, as in WeightSlot.offset_bytes).

    columns: the part of each row that is kept, with the tensor regarded as a matrix whose rows have `columns.whole` elements; the
    segment then consists of whole rows. None: all columns are kept."""

    tensor: TensorRef
    begin: int
    end: int
    place_bytes: int
    target: str = ""
    scales_at_bytes: int = -1
    stage: int = 0
    repeats: int = 0
    held_bytes: int = 0
    frame: Frame | None = None
    contents: tuple[Segment, ...] = ()
    whole: WeightSlot | None = None
    inverse: bool = False
    columns: Cut | None = None
    kept: Cut | None = None

    @property
    def width(self) -> int:
        """The number of elements along the tensor's last axis."""
        return self.tensor.shape[-1]

    @property
    def unit_bytes(self) -> tuple[int, int]:
        """The size of the smallest unit that must not be divided: (bytes in the file, bytes in the weight range). A unit is an
        element; a row, if it is quantised, packed or only partly kept; all scales of a matrix; or the rows that are rearranged
        together."""
        if self.whole is not None and (relayout := self.whole.relayout) is not None:
            unit_rows = relayout.unit_rows(self.tensor.shape)
            unit_bytes = unit_rows * math.prod(self.tensor.shape[1:]) * DTYPE_BYTES[self.tensor.dtype]
            return unit_bytes, self.whole.num_bytes // (self.whole.shape[0] // unit_rows)
        if self.whole is not None and (packed := self.whole.packed) is not None:
            return self.width * DTYPE_BYTES[self.tensor.dtype], packed.row_body_bytes
        if self.target == SCALES:
            return math.prod(self.tensor.shape) * DTYPE_BYTES[self.tensor.dtype], self.held_bytes
        item = DTYPE_BYTES[self.tensor.dtype]
        if self.target == QUANTIZED:
            return self.width * item, self.width if self.columns is None else self.columns.length
        held_item = ITEM_BYTES[self.target] if self.target else item
        if self.columns is not None:
            return self.columns.whole * item, self.columns.length * held_item
        return item, held_item

    @property
    def places(self) -> list[tuple[int, int]]:
        """The ranges [begin, end) of the weight range that the segment fills, in bytes: one for its values and, if they are
        quantised, one for their scales. For a tensor that is rearranged, the range is the part of the tensor's range that the
        segment would fill if its numbers lay end to end. For packed rows the ranges do not include escapes, whose offset is known
        only when the rows are packed."""
        if self.frame is not None:
            return [place for content in self.contents for place in content.places]
        if self.whole is not None and (packed := self.whole.packed) is not None:
            first, last = self.rows
            return packed.ranges(first // PANEL_ROWS, -(-last // PANEL_ROWS))
        unit, held_unit = self.unit_bytes
        num_units = (self.end - self.begin) // unit
        places = [(self.place_bytes, self.place_bytes + num_units * held_unit)]
        if self.target == QUANTIZED:
            places.append((self.scales_at_bytes, self.scales_at_bytes + num_units * SCALE_BYTES))
        return places

    @property
    def is_whole_frame(self) -> bool:
        """Returns whether the segment is a frame of a packed file whose values are all stored in the weight range, one after the
        other."""
        if self.frame is None or len(self.contents) > 1 or self.columns is not None:
            return False
        return self.contents[0].end - self.contents[0].begin == self.frame.num_bytes

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [first, last) of a packed matrix that the segment has. Only for a segment whose rows stay packed in memory."""
        assert self.whole is not None
        assert self.whole.packed is not None
        first, (unit, _) = self.whole.packed.row_at(self.place_bytes), self.unit_bytes
        return first, first + (self.end - self.begin) // unit


@dataclass(slots=True, frozen=True)
class Span:
    """A part of a segment of a read: bytes [begin, end) of the segment's file. place_bytes: the offset in the model's weight range
    (the memory for all its weights) at which the part belongs."""

    segment: Segment
    begin: int
    end: int

    @property
    def place_bytes(self) -> int:
        return self.segment.place_bytes + self.begin - self.segment.begin


@dataclass(slots=True, frozen=True)
class Read:
    """One read from a file. begin, end: its bytes [begin, end) of the file, which are whole blocks of 4 KiB (`end` may be past the
    end of the file). segments: the parts of the read that hold parameters, in file order. num_readers: how many ranks (devices of a
    split model) share the read; each of them has the same read in its plan. 1: it is not shared."""

    file: str
    begin: int
    end: int
    segments: tuple[Segment, ...]
    num_readers: int = 1

    @property
    def num_bytes(self) -> int:
        """The number of bytes of parameters in the read, as they are stored in the file. Other bytes of the read only fill
        blocks."""
        return sum(segment.end - segment.begin for segment in self.segments)

    @property
    def needed_bytes(self) -> int:
        """The number of bytes from `begin` to the end of the last segment. A read that returns fewer bytes is incomplete."""
        return self.segments[-1].end - self.begin

    @property
    def places(self) -> list[tuple[int, int]]:
        """All ranges [begin, end) of the model's weight range, in bytes, that this read fills. Ranges that touch are joined."""
        return joined(place for segment in self.segments for place in segment.places)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges [begin, end) in ascending order, with ranges that touch joined into one."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return found


def plan_reads(
    headers: Mapping[str, Header],
    layout: Iterable[WeightSlot],
    dtype: str,
    read_bytes: int,
    readers: Mapping[str, int] = MappingProxyType({}),
) -> list[Read]:
    """Returns reads that read every parameter once. They are ordered by the first part of a forward pass that needs something of
    the read (WeightSlot.stage), then by file. Within a file, reads that ranks (devices of a split model) do not share come before
    shared ones, each in the order of the file.

    headers: file name -> header. layout: the locations of all parameters in the weight range. dtype: the model's dtype. read_bytes:
    the length of the longest read, in whole blocks of 4 KiB, at least two. readers: for parameters whose reads may be shared, name
    -> how many ranks need something of the parameter.

    Tensors that are not parameters are left out (open_checkpoint has refused those that should not exist). Raises CheckpointError
    for a parameter that is missing, has another shape, or has rows too long for a read."""
    slots = {slot.name: slot for slot in layout}
    stage_of = {slot.name: slot.stage for slot in slots.values()}
    reads: list[Read] = []
    for file, header in headers.items():
        segments: list[Segment] = []
        shared: dict[int, list[Segment]] = {}  # by the number of readers
        for tensor in header.tensors:
            slot = slots.pop(tensor.name, None)
            if slot is None or not tensor.num_bytes:
                continue
            is_scale = slot.repeats or slot.held_as in SCALES_IN.values()
            wanted = slot.stored_shape
            if wanted != tensor.shape and not (is_scale and without_ones(wanted) == without_ones(tensor.shape)):
                raise CheckpointError(file, tensor.name, f"has shape {list(tensor.shape)}, expected {list(wanted)}")
            held_as = slot.held_as or dtype
            target = "" if DTYPE_OF.get(tensor.dtype) == held_as else held_as
            if slot.scales_at_bytes >= 0 and not slot.held_as:
                target = QUANTIZED
            elif slot.repeats:
                target = SCALES
            elif held_as == FP8:
                target = FP8
            if slot.relayout is not None:
                target = slot.relayout.name
            elif slot.packed is not None:
                target = PACKED
            num_bytes = math.prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
            begin, stage = tensor.offset_bytes, stage_of[tensor.name]
            held = (slot.repeats, slot.num_bytes)
            whole = Segment(tensor, begin, begin + num_bytes, slot.offset_bytes, target, slot.scales_at_bytes, stage, *held)
            if slot.relayout is not None or slot.packed is not None:
                whole = replace(whole, whole=slot)
            if slot.repeats:
                whole = replace(whole, inverse=slot.inverse, kept=slot.kept)
            own = [whole] if slot.cut is None else _share(whole, slot.cut, read_bytes)
            if own[0].unit_bytes[0] > read_bytes - BLOCK_BYTES:
                what = "too many scales for a read" if slot.repeats else "too long to be converted"
                raise CheckpointError(file, tensor.name, f"has rows of {own[0].unit_bytes[0]} bytes: {what}")
            is_same = own[0].columns is not None or (slot.cut is None and num_bytes >= MIN_SHARED_BYTES)
            num_readers = readers.get(tensor.name, 1) if is_same else 1
            among = shared.setdefault(num_readers, []) if num_readers > 1 else segments
            among.extend(own if tensor.record is None else _framed(own, read_bytes))
        reads += _cut(file, segments, read_bytes)
        for num_readers, of_all in shared.items():
            reads += [replace(read, num_readers=num_readers) for read in _cut(file, of_all, read_bytes)]
    for name in slots:
        raise CheckpointError(", ".join(headers), name, "missing: config.json asks for it")
    return sorted(reads, key=lambda read: min(segment.stage for segment in read.segments))


def _share(whole: Segment, cut: Cut, read_bytes: int) -> list[Segment]:
    """Returns the segments (runs of bytes in the file) of a tensor that a device's share of a model needs, in file order. If the
    share has some rows, each run of rows is a segment. If it has some columns, each run of columns in each row is a segment. But
    runs of whole rows are the segments if a conversion needs all kept columns of a row at once; in a plain file, if a run of
    columns is shorter than MIN_RUN_BYTES and a row fits into a read; and in a packed file, if each frame has whole rows.

    whole: the segment of the whole tensor, with the offset of the share's part in the weight range. cut: which part of the tensor
    the share has. read_bytes: the length of the longest read."""
    dims = whole.tensor.shape
    num_rows, inner = math.prod(dims[: cut.axis]), math.prod(dims[cut.axis + 1 :])
    row_bytes = (whole.end - whole.begin) // num_rows
    rows = [(0, num_rows)]
    if cut.experts is not None:
        rows = [(begin * num_rows // dims[0], end * num_rows // dims[0]) for begin, end in cut.experts.ranges]
    shortest = min(end - begin for begin, end in cut.ranges) * row_bytes // cut.whole
    is_short = shortest < MIN_RUN_BYTES and row_bytes <= read_bytes - BLOCK_BYTES
    if whole.tensor.record is not None:  # frames are read whole, and each must hold whole rows
        is_short = all(frame.num_bytes % row_bytes == 0 for frame in whole.tensor.frames)
    takes_rows = whole.whole is not None or whole.target == QUANTIZED  # converting a row needs all its kept columns
    if cut.axis and (takes_rows or is_short):
        ranges = tuple((begin * inner, end * inner) for begin, end in cut.ranges)
        whole = replace(whole, columns=Cut(1, ranges, cut.whole * inner))
        kept = [(first * row_bytes, last * row_bytes) for first, last in rows]
    else:
        numbers = (row for first, last in rows for row in range(first, last))
        places = ((row * cut.whole + begin, row * cut.whole + end) for row in numbers for begin, end in cut.ranges)
        kept = [(begin * row_bytes // cut.whole, end * row_bytes // cut.whole) for begin, end in places]
    runs, unit, held_unit, num_before = [], *whole.unit_bytes, 0
    for begin, end in kept:
        place_bytes = whole.place_bytes + num_before * held_unit
        run = replace(whole, begin=whole.begin + begin, end=whole.begin + end, place_bytes=place_bytes)
        if whole.target == QUANTIZED:
            run = replace(run, scales_at_bytes=whole.scales_at_bytes + num_before * SCALE_BYTES)
        runs.append(run)
        num_before += (end - begin) // unit
    return runs


def _framed(own: Iterable[Segment], read_bytes: int) -> Iterator[Segment]:
    """Yields a segment for each frame (piece of a packed file) of a tensor that holds numbers which the device stores. own: the
    segments of the tensor that the device stores, in order; their file positions are counted as though the file held the tensor
    unpacked. read_bytes: the length of the longest read. Raises CheckpointError for a frame that is longer than a read, or that
    ends within a unit (Segment.unit_bytes)."""
    left = deque(own)
    tensor = left[0].tensor
    for frame in tensor.frames:
        contents, end = list[Segment](), tensor.offset_bytes + frame.first_byte + frame.num_bytes
        num_bytes = frame.end - frame.begin // BLOCK_BYTES * BLOCK_BYTES
        while left and left[0].begin < end:
            content, rest = _split(left.popleft(), end)
            if content is None or (rest is not None and content.end != end) or num_bytes > read_bytes:
                why = f"packed in pieces of {num_bytes} bytes, which no read of {read_bytes} brings in whole rows"
                raise CheckpointError(tensor.file, tensor.name, why)
            contents.append(content)
            if rest is not None:
                left.appendleft(rest)
        if contents:
            yield replace(contents[0], begin=frame.begin, end=frame.end, frame=frame, contents=tuple(contents))


def _cut(file: str, segments: Iterable[Segment], read_bytes: int) -> list[Read]:
    reads: list[Read] = []
    begin, taken = 0, list[Segment]()

    def close() -> None:
        if taken:
            reads.append(Read(file, begin, _up(taken[-1].end), tuple(taken)))
            taken.clear()

    for segment in segments:
        left: Segment | None = segment
        while left is not None:
            if taken and left.begin >= _up(taken[-1].end) + BLOCK_BYTES:  # bytes that the load does not need lie in between
                close()
            if not taken:
                begin = left.begin // BLOCK_BYTES * BLOCK_BYTES
            head, left = _split(left, begin + read_bytes)
            if head is not None:
                taken.append(head)
            if left is not None:
                close()
    close()
    return reads


def _split(segment: Segment, at: int) -> tuple[Segment | None, Segment | None]:
    """Divides a segment at the offset `at` of its file. A unit that must not be divided (Segment.unit_bytes), or a packed frame,
    belongs to the second part if it ends after `at`. Returns (first part, second part); None: the part is empty."""
    if segment.end <= at:
        return segment, None
    if segment.begin >= at or segment.frame is not None:
        return None, segment
    unit, held_unit = segment.unit_bytes
    num_units = (at - segment.begin) // unit
    if not num_units:
        return None, segment
    cut = segment.begin + num_units * unit
    scales_at = segment.scales_at_bytes + num_units * SCALE_BYTES if segment.target == QUANTIZED else -1
    rest = replace(segment, begin=cut, place_bytes=segment.place_bytes + num_units * held_unit, scales_at_bytes=scales_at)
    return replace(segment, end=cut), rest


def direct_spans(read: Read, address: int, alignment: Alignment) -> list[Span]:
    """Returns the parts of a read that are read straight to their offsets in the model's weight range (the memory for all its
    weights), in file order. address: the address of the weight range in memory. alignment: the alignment that the read requires of
    addresses and file offsets; ANY_ALIGNMENT for a buffered read."""
    spans = []
    for segment in read.segments:
        # a frame must be checked before any of it is used
        if segment.target or segment.frame is not None or segment.columns is not None:
            continue
        begin = -(-segment.begin // alignment.offset_bytes) * alignment.offset_bytes
        end = segment.end // alignment.offset_bytes * alignment.offset_bytes
        place = address + segment.place_bytes + begin - segment.begin
        if end - begin >= MIN_DIRECT_BYTES and place % alignment.memory_bytes == 0:
            spans.append(Span(segment, begin, end))
    return spans


def staged_spans(read: Read, direct: Iterable[Span]) -> list[Span]:
    """Returns the parts of a read that go through a staging slot, a buffer of host memory: all that are not read directly into the
    weight range. direct: the parts that are read directly, in file order."""
    inner = {id(span.segment): span for span in direct}
    spans = []
    for segment in read.segments:
        span = inner.get(id(segment))
        edges = [(segment.begin, segment.end)] if span is None else [(segment.begin, span.begin), (span.end, segment.end)]
        spans += [Span(segment, begin, end) for begin, end in edges if end > begin]
    return spans


def _up(position: int) -> int:
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES
