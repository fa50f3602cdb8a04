from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.errors import CheckpointError
from loader.files.direct_io import BLOCK_BYTES, Alignment
from loader.files.safetensors import DTYPE_BYTES, Header, TensorRef
from loader.reading.range_plan import ANY_ALIGNMENT, MIN_DIRECT_BYTES, direct_spans, plan_reads, staged_spans
from loader.shapes.dtypes import ITEM_BYTES
from loader.sizes.layout import WeightSlot


def files_of(sizes: list[tuple[str, int]], starts: list[int], width: int = 0) -> dict[str, Header]:
    """Tensors of (dtype, number of elements), dealt out to as many files as there are data starts. width: every third is a
    matrix of such rows."""
    headers = {}
    for number, start in enumerate(starts):
        tensors, position, file = [], start, f"{number}.safetensors"
        for index, (dtype, num) in enumerate(sizes):
            if index % len(starts) == number:
                shape: tuple[int, ...] = (num // width, width) if width and index % 3 == 1 else (num,)
                num_bytes = math.prod(shape) * DTYPE_BYTES[dtype]
                tensors.append(TensorRef(file, f"t{index}", dtype, shape, position, num_bytes))
                position += num_bytes
        headers[file] = Header(tuple(tensors), b"", position)
    return headers


def layout_of(headers: dict[str, Header], dtype: str, seed: int, ignored: set[str]) -> list[WeightSlot]:
    """Tensors in any order, each at the file's own place in a block or elsewhere."""
    rng = random.Random(seed)
    tensors = [tensor for header in headers.values() for tensor in header.tensors if tensor.name not in ignored]
    rng.shuffle(tensors)
    slots, offset = [], 0
    for tensor in tensors:
        offset += (tensor.offset_bytes - offset) % BLOCK_BYTES if rng.random() < 0.5 else rng.randrange(5000)
        num_bytes = math.prod(tensor.shape) * ITEM_BYTES[dtype]
        scales_at = rng.randrange(1 << 30) if len(tensor.shape) == 2 else -1
        slots.append(WeightSlot(tensor.name, tensor.shape, offset, num_bytes, scales_at))
        offset += num_bytes
    return slots


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.sampled_from(["F32", "BF16"]), st.integers(0, 60_000)), min_size=1, max_size=12),
    starts=st.lists(st.integers(100, 9000), min_size=1, max_size=3),
    read_blocks=st.integers(2, 40),
    alignment=st.sampled_from([ANY_ALIGNMENT, Alignment(4, 512), Alignment(512, 512), Alignment(4096, 4096)]),
    seed=st.integers(0, 1 << 30),
    width=st.integers(1, 900),
)
def test_every_byte_arrives_once_at_its_place(
    sizes: list[tuple[str, int]], starts: list[int], read_blocks: int, alignment: Alignment, seed: int, width: int
) -> None:
    """Every third tensor is a matrix that is quantised, and cut between its rows only."""
    headers = files_of(sizes, starts, width)
    ignored = {"t3"}
    slots = layout_of(headers, "bfloat16", seed, ignored)
    reads = plan_reads(headers, slots, "bfloat16", read_blocks * BLOCK_BYTES)
    places = {slot.name: slot for slot in slots}
    position = {name: header.tensors[0].offset_bytes for name, header in headers.items() if header.tensors}
    taken: dict[str, int] = {}
    address = 7 * BLOCK_BYTES
    for read in reads:
        assert read.begin % BLOCK_BYTES == read.end % BLOCK_BYTES == 0
        assert 0 < read.needed_bytes <= read.end - read.begin <= read_blocks * BLOCK_BYTES
        for segment in read.segments:
            assert read.begin <= segment.begin < segment.end <= read.end
            assert segment.begin >= position[read.file]  # in file order
            position[read.file] = segment.end
            tensor = segment.tensor
            assert segment.begin == tensor.offset_bytes + taken.get(tensor.name, 0)  # without a gap
            taken[tensor.name] = segment.end - tensor.offset_bytes
            item, slot = DTYPE_BYTES[tensor.dtype], places[tensor.name]
            elements, rest = divmod(segment.begin - tensor.offset_bytes, item)
            assert rest == 0
            quantised = slot.scales_at_bytes >= 0
            assert segment.place_bytes == slot.offset_bytes + elements * (1 if quantised else 2)
            assert segment.target == ("int8" if quantised else "bfloat16" if tensor.dtype == "F32" else "")
            if quantised:
                assert elements % width == (segment.end - segment.begin) % (width * item) == 0
                assert segment.scales_at_bytes == slot.scales_at_bytes + elements // width * 4
        direct = direct_spans(read, address, alignment)
        for span in direct:
            assert span.begin % alignment.offset_bytes == span.end % alignment.offset_bytes == 0
            assert (address + span.place_bytes) % alignment.memory_bytes == 0
            assert span.end - span.begin >= MIN_DIRECT_BYTES
            assert not span.segment.target
        spans = sorted([*direct, *staged_spans(read, direct)], key=lambda span: span.begin)
        merged = [(span.segment, span.begin, span.end) for span in spans]
        for segment in read.segments:  # direct and staged spans make up each segment, none twice
            own = [(begin, end) for other, begin, end in merged if other is segment]
            assert own[0][0] == segment.begin
            assert own[-1][1] == segment.end
            assert all(a[1] == b[0] for a, b in itertools.pairwise(own))
    whole = {t.name: t.num_bytes for header in headers.values() for t in header.tensors if t.name not in ignored and t.num_bytes}
    assert taken == whole


def test_what_lies_between_wanted_tensors_is_not_read() -> None:
    headers = files_of([("BF16", 1000), ("BF16", 500_000), ("BF16", 1000)], [128])
    slots = [WeightSlot("t0", (1000,), 0, 2000), WeightSlot("t2", (1000,), 2048, 2000)]
    reads = plan_reads(headers, slots, "bfloat16", 8 << 20)
    assert [(read.begin, read.end) for read in reads] == [(0, 4096), (999424, 1007616)]


def test_rows_longer_than_a_read_are_not_quantised() -> None:
    headers = files_of([("BF16", 8), ("BF16", 12_000)], [128], width=6000)
    slots = [WeightSlot("t0", (8,), 0, 16), WeightSlot("t1", (2, 6000), 64, 12_000, 12_096)]
    with pytest.raises(CheckpointError, match="tensor t1: has rows of 12000 bytes: too long to be converted"):
        plan_reads(headers, slots, "bfloat16", 16_000)
    assert len(plan_reads(headers, slots, "bfloat16", 16_384)) == 2


def test_layers_that_a_file_holds_out_of_order_are_read_in_order() -> None:
    """As Hugging Face writes them: by name, layer 10 before layer 2."""
    names = sorted(f"model.layers.{layer}.w" for layer in range(12))
    tensors = [TensorRef("f", name, "BF16", (9000,), 128 + at * 18000, 18000) for at, name in enumerate(names)]
    layout = [WeightSlot(f"model.layers.{layer}.w", (9000,), layer * 18432, 18000, stage=layer + 1) for layer in range(12)]
    reads = plan_reads({"f": Header(tuple(tensors), b"", 128)}, layout, "bfloat16", 4 * BLOCK_BYTES)
    assert [min(segment.stage for segment in read.segments) for read in reads] == sorted(
        min(segment.stage for segment in read.segments) for read in reads
    )
    assert sorted(place for read in reads for place in read.places) == sorted(
        place for read in reads for segment in read.segments for place in segment.places
    )


def test_missing_and_misshapen_parameters_are_named() -> None:
    headers = files_of([("BF16", 10)], [128])
    with pytest.raises(CheckpointError, match="tensor t0: has shape \\[10\\], expected \\[11\\]"):
        plan_reads(headers, [WeightSlot("t0", (11,), 0, 22)], "bfloat16", 8192)
    with pytest.raises(CheckpointError, match="tensor t1: missing"):
        plan_reads(headers, [WeightSlot("t0", (10,), 0, 20), WeightSlot("t1", (1,), 64, 2)], "bfloat16", 8192)
