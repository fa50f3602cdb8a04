"""Plans the reads of a load, in the order of the layers: which bytes of which file belong at which offset in the model's weight
range. A read is divided into segments, each with its own offset in the weight range.

A read consists of whole blocks, so that it can bypass the page cache. A segment may have the same distance from a block's boundary
in the weight range as in the file (layout.weight_layout arranges that). Then the segment's whole blocks are read directly into the
weight range: a direct span. All other bytes (the blocks at a tensor's ends, tensors with another distance, tensors of another
dtype) go through a staging slot, where they have the same offset as in the read.

In a split model each rank (device) has a share of the weights, and only the share's rows and long runs of its columns are read.
Where columns are divided into short runs, whole rows are read, and only the share's part of each row is stored. Of packed files,
which consist of separately compressed frames, only those frames are read that hold something of the share. If several ranks have a
part of each of the same rows, or the same matrices whole, their reads are the same, and the ranks may share them
(loader/reading/shared_reads.py).
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
    weight range.

    target: what the elements are converted to: the engine's dtype if it differs from the stored one, else "". Special values are:
    "int8" for whole rows to be quantised, whose scales belong at the offset scales_at_bytes of the weight range; "scales" for all
    scales of a matrix, each row of which fills `repeats` rows of memory, in float32, held_bytes bytes in all (their inverses, if
    `inverse`); FP8 for codes, which are stored unchanged but must be checked; a value of SCALES_IN for scales of INT4 weights; the
    name of a Relayout; and "packed" for rows that are packed (`whole` tells where). stage: the part of a forward pass that first
    needs the tensor (WeightSlot.stage).

    frame: the frame of a packed file of which the segment consists; None: the file is plain. contents: for a frame, the segments of
    the decoded values that are stored, in order; their begin and end are counted as though the file held the tensor unpacked.

    whole: the location of the whole tensor if its numbers are rearranged (loader/formats/relayout.py) or packed, else None. The
    segment's numbers are then scattered over this location, and place_bytes is counted as though they were not (for packed rows as
    WeightSlot.offset_bytes). kept: for "scales", the part of them that is held (WeightSlot.kept).

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
        """The number of elements in a row of the tensor."""
        return self.tensor.shape[-1]

    @property
    def unit_bytes(self) -> tuple[int, int]:
        """The bytes, in the file and in the weight range, of the smallest unit that must not be divided: an element, a row (if it
        is quantised, packed or partly kept), all scales of a matrix, or the rows that are rearranged together."""
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
        """The ranges [begin, end) of the weight range that the segment fills, in bytes: one for its values and, if it is quantised,
        one for their scales. For a tensor that is rearranged, the range is the segment's share of the tensor's range. The escapes
        of packed rows are left out, because their offset is known only when the rows are packed."""
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
        """Returns whether the segment is a frame of a packed file whose values are all stored, one after the other."""
        if self.frame is None or len(self.contents) > 1 or self.columns is not None:
            return False
        return self.contents[0].end - self.contents[0].begin == self.frame.num_bytes

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [first, last) of a packed matrix to which the segment belongs. Only for a segment whose rows stay packed in
        memory."""
        assert self.whole is not None
        assert self.whole.packed is not None
        first, (unit, _) = self.whole.packed.row_at(self.place_bytes), self.unit_bytes
        return first, first + (self.end - self.begin) // unit


@dataclass(slots=True, frozen=True)
class Span:
    """A part of a segment: bytes [begin, end) of the segment's file. place_bytes: the offset in the weight range at which the part
    belongs."""

    segment: Segment
    begin: int
    end: int

    @property
    def place_bytes(self) -> int:
        return self.segment.place_bytes + self.begin - self.segment.begin


@dataclass(slots=True, frozen=True)
class Read:
    """One read from a file. begin, end: its bytes [begin, end) of the file, which are whole blocks (`end` may be past the end of
    the file). segments: the bytes of parameters among them, in file order. num_readers: how many ranks share the read, each of
    which has the same read in its plan; 1: it is not shared."""

    file: str
    begin: int
    end: int
    segments: tuple[Segment, ...]
    num_readers: int = 1

    @property
    def num_bytes(self) -> int:
        """The number of bytes of parameters in the read, as they are stored in the file. All other bytes are only there to fill
        blocks."""
        return sum(segment.end - segment.begin for segment in self.segments)

    @property
    def needed_bytes(self) -> int:
        """The number of bytes from `begin` to the end of the last segment, which is the least that the read must return."""
        return self.segments[-1].end - self.begin

    @property
    def places(self) -> list[tuple[int, int]]:
        """All ranges [begin, end) of the model's weight range, in bytes, that this read fills. Ranges that touch are joined."""
        return joined(place for segment in self.segments for place in segment.places)


def joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ranges [begin, end) sorted, with ranges that touch joined."""
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
    """Returns reads that read every parameter once. They are ordered by the first stage of the forward pass that needs something
    from a read, then by file and position.

    headers: file name -> header. layout: the locations of all parameters in the weight range. dtype: the model's dtype. read_bytes:
    the length of the longest read, in whole blocks, at least two. readers: parameter -> how many ranks have something of it and
    share reads; reads of other parameters are not shared.

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
    """Returns the segments that a device's share of a model needs of a tensor, in file order. There is one for each run of bytes
    or, if the runs are short or rows are converted, one for each run of whole rows. whole: the segment of the whole tensor; its
    offset in the weight range is that of the share's part. cut: which part of the tensor the share has."""
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
    """Yields a segment for each frame of a packed tensor in which there are numbers that the device stores. own: the segments of
    the parts of the tensor that it stores, in order, with file positions as though the file held the tensor unpacked. Raises
    CheckpointError for a frame that is longer than a read, or that ends within a unit (Segment.unit_bytes)."""
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
    """Divides a segment in two at the offset `at` of the file, or before it, so that both parts consist of whole units
    (Segment.unit_bytes); a packed frame stays whole. Returns the parts before and after; None for an empty part."""
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
    """Returns the parts of a read that can be read directly to their offsets in the weight range. address: where the weight range
    begins in memory. alignment: what the read requires of addresses and offsets; ANY_ALIGNMENT for a buffered read."""
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
    """Returns the parts of a read that cannot be read directly into the weight range and are copied there from the staging slot.
    direct: the parts that are read directly, in file order."""
    inner = {id(span.segment): span for span in direct}
    spans = []
    for segment in read.segments:
        span = inner.get(id(segment))
        edges = [(segment.begin, segment.end)] if span is None else [(segment.begin, span.begin), (span.end, segment.end)]
        spans += [Span(segment, begin, end) for begin, end in edges if end > begin]
    return spans


def _up(position: int) -> int:
    return -(-position // BLOCK_BYTES) * BLOCK_BYTES
