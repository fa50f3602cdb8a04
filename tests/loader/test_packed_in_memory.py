"""Matrices that stay packed in memory: their places, and what loads write there."""

from __future__ import annotations

import itertools
import mmap
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from config.load import RESIDENT_FORMS
from loader.architectures.architecture import TensorGroup
from loader.errors import CheckpointError
from loader.files import frame
from loader.formats import packed_rows
from loader.formats.packed_in_memory import PACKED_IN_MEMORY
from loader.formats.packed_place import ESCAPE_SHARE, PackedPlace
from loader.formats.packed_rows import ESCAPES_BEHIND, PANEL_ROWS
from loader.formats.plain import PLAIN
from loader.formats.registry import FORMATS, asked_format
from loader.formats.weight_format import Space, WeightSlot
from loader.reading.panel_packer import PanelPacker
from loader.reading.range_plan import joined
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.shapes.model_shape import DeviceShare, Division
from loader.sizes.layout import layout_id, weight_layout, weights_bytes
from tests.loader.checkpoints import CONFIG, shape, write_checkpoint
from tests.loader.packed_checkpoints import pack_checkpoint

# rows that end within a block, and row counts that are no multiple of a panel's four
UNEVEN = CONFIG | {
    "hidden_size": 188,
    "intermediate_size": 371,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 30,
    "vocab_size": 211,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def weights_for(name: str, dims: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(name) * 1000 + dims[0])
    return (torch.randn(dims, generator=generator) * 0.02).to(dtype)


def write(folder: Path, config: dict[str, Any], dtype: torch.dtype = torch.bfloat16, shards: int = 1) -> dict[str, torch.Tensor]:
    """Writes a checkpoint with normally distributed weights, and returns these as bfloat16."""
    write_checkpoint(folder, config, shards, {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}[dtype])
    wanted = {}
    for path in folder.glob("*.safetensors"):
        tensors = {name: weights_for(name, tuple(one.shape), dtype) for name, one in load_file(path).items()}
        save_file(tensors, path)
        wanted |= {name: one.bfloat16() for name, one in tensors.items()}
    return wanted


def unpacked(memory: Any, place: PackedPlace) -> torch.Tensor:
    """The weights of a packed matrix in a weight range (uint8)."""
    body, codes, bases, starts = (memory[begin:end] for begin, end in place.ranges(0, place.num_panels))
    out = np.empty((place.num_outputs, place.num_inputs), np.uint16)
    escapes = memory[place.escapes_at_bytes : place.end_bytes]
    packed_rows.unpack_rows(body, codes.view(np.uint64), bases, starts.view(np.uint32), escapes, out)
    return torch.from_numpy(out).view(torch.bfloat16)


def parameters(memory: Any, layout: list[WeightSlot]) -> dict[str, torch.Tensor]:
    """Every parameter in a weight range (uint8), as bfloat16."""
    found = {}
    for slot in layout:
        if slot.packed is None:
            held = torch.from_numpy(memory[slot.offset_bytes : slot.offset_bytes + slot.num_bytes])
            found[slot.name] = held.view(torch.bfloat16).view(slot.shape)
        else:
            first = slot.packed.row_at(slot.offset_bytes)
            found[slot.name] = unpacked(memory, slot.packed)[first : first + slot.shape[0]]
    return found


def load(
    folder: Path, slot_bytes: int = 8192, packed: bool = False, share: DeviceShare | None = None
) -> tuple[dict[str, torch.Tensor], list[WeightSlot], list[tuple[int, int]]]:
    """Loads a checkpoint. Returns its parameters, their places, and the ranges that were reported to be in place."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, wants_packed=lambda checkpoint: packed, share=share)
        assert source.is_packed == packed
        memory = mmap.mmap(-1, weights_bytes(source.shape, "bfloat16", PACKED_IN_MEMORY))
        landed: list[tuple[int, int]] = []
        ring, sink = StagingRing(3, slot_bytes), HostSink(memoryview(memory))
        stream_weights(source, "bfloat16", sink, ring, lambda *_: None, lambda: False, PACKED_IN_MEMORY, landed=landed.extend)
        layout = weight_layout(source.shape, "bfloat16", PACKED_IN_MEMORY)
    return parameters(np.frombuffer(memory, np.uint8), layout), layout, landed


def test_the_setting_says_what_the_format_asks_for() -> None:
    assert {one.resident or "plain" for one in FORMATS.values()} == set(RESIDENT_FORMS)
    assert asked_format(None, "packed") is asked_format("none", "packed") is PACKED_IN_MEMORY
    assert asked_format(None, "plain") is PLAIN
    with pytest.raises(ValueError, match="quantize: int8 does not go with resident = 'packed'; leave one of them out"):
        asked_format("int8", "packed")
    with pytest.raises(ValueError, match="resident: 'pickled' is no weight format"):
        asked_format(None, "pickled")


def test_all_matrices_are_packed_and_take_less() -> None:
    model = shape(**UNEVEN | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 64, "vocab_size": 4096})
    layout = weight_layout(model, "bfloat16", PACKED_IN_MEMORY)
    matrices = {slot.name for slot in weight_layout(model, "bfloat16") if len(slot.shape) == 2}
    assert {slot.name for slot in layout if slot.packed is not None} == matrices
    plain = weights_bytes(model, "bfloat16")
    assert 0.71 * plain < weights_bytes(model, "bfloat16", PACKED_IN_MEMORY) < 0.74 * plain
    for dtype in ("float32", "float16"):
        assert all(slot.packed is None for slot in weight_layout(model, "float32", PACKED_IN_MEMORY)), dtype


def test_places_do_not_overlap_and_cover_what_is_reported() -> None:
    layout = weight_layout(shape(**UNEVEN), "bfloat16", PACKED_IN_MEMORY)
    places = sorted(place for slot in layout for place in slot.places)
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(places))
    assert any(not slot.places for slot in layout), "matrices that are packed with another one have no place of their own"
    for slot in layout:
        if (packed := slot.packed) is not None:
            parts = [*packed.ranges(0, packed.num_panels), (packed.escapes_at_bytes, packed.end_bytes)]
            assert parts == sorted(parts)
            assert all(begin % 64 == 0 for begin, _ in parts)
            assert (parts[0][0], parts[-1][1]) == (packed.begin_bytes, packed.end_bytes)


@pytest.mark.parametrize(
    "dims",
    [((64, 8),), ((1, 1),), ((40, 64), (40, 128)), ((40, 2, 64),)],
    ids=["short rows", "one weight", "rows of two lengths", "three dimensions"],
)
def test_what_would_not_be_smaller_or_is_no_matrix_stays_plain(dims: tuple[tuple[int, ...], ...]) -> None:
    group = TensorGroup(tuple((str(number), each) for number, each in enumerate(dims)), may_be_quantized=True)
    space = Space(128, 2, -1, 0, "bfloat16")
    assert PACKED_IN_MEMORY.place(group, space) == PLAIN.place(group, space)


@pytest.mark.parametrize("slot_bytes", [8192, 64 << 10, 1 << 20])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shards", [1, 3])
def test_loads_pack_what_the_files_hold(tmp_path: Path, dtype: torch.dtype, shards: int, slot_bytes: int) -> None:
    """In reads that end within panels, and by several threads."""
    wanted = write(tmp_path, UNEVEN, dtype, shards)
    found, layout, landed = load(tmp_path, slot_bytes)
    assert found.keys() == wanted.keys()
    assert all((slot.packed is None) == (len(slot.shape) == 1) for slot in layout)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name
    assert joined(landed) == joined(place for slot in layout for place in slot.places)
    assert sum(end - begin for begin, end in landed) == sum(end - begin for slot in layout for begin, end in slot.places)


def test_packed_files_load_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With frames whose row counts are no multiple of a panel's."""
    monkeypatch.setattr(frame, "FRAME_VALUES", 1 << 12)
    wanted = write(tmp_path, UNEVEN)
    pack_checkpoint(tmp_path)
    found, _, _ = load(tmp_path, 64 << 10, packed=True)
    for name, tensor in wanted.items():
        assert torch.equal(found[name].view(torch.int16), tensor.view(torch.int16)), name


@pytest.mark.parametrize(("size", "from_packed"), [(2, False), (3, False), (3, True)])
def test_shares_hold_parts_of_the_matrices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, from_packed: bool) -> None:
    """The devices' parts by outputs and by inputs; embeddings and heads of split models stay plain."""
    monkeypatch.setattr(frame, "FRAME_VALUES", 1 << 12)
    config = UNEVEN | {"hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 6, "head_dim": 64, "vocab_size": 210}
    wanted = write(tmp_path, config)
    if from_packed:
        pack_checkpoint(tmp_path)
        (tmp_path / "model.safetensors").unlink()
    for rank in range(size):
        found, layout, _ = load(tmp_path, 16 << 10, packed=from_packed, share=DeviceShare(rank, Division(size, 1, 1)))
        packed = {slot.name for slot in layout if slot.packed is not None}
        assert {name.split(".")[-2] for name in packed} >= {"q_proj", "o_proj", "gate_proj", "down_proj"}
        assert not packed & {"model.embed_tokens.weight", "lm_head.weight"}
        for name in packed:
            by_inputs = any(part in name for part in ("o_proj", "down_proj"))
            part = wanted[name].chunk(size, dim=int(by_inputs))[rank]
            assert torch.equal(found[name].view(torch.int16), part.contiguous().view(torch.int16)), name


def test_a_matrix_with_too_many_escapes_is_refused_by_name(tmp_path: Path) -> None:
    write(tmp_path, UNEVEN)
    (path,) = tmp_path.glob("*.safetensors")
    tensors = load_file(path)
    name = "model.layers.1.mlp.down_proj.weight"
    spread = torch.exp2(torch.arange(tensors[name].numel()) % 24 - 12.0).view(tensors[name].shape)
    tensors[name] = (tensors[name].float() * spread).bfloat16()
    save_file(tensors, path)
    why = rf"can't stay packed: more than one in {ESCAPE_SHARE} of its weights.*leave resident = \"packed\" out"
    with pytest.raises(CheckpointError, match=f"{path.name}: tensor {name}: {why}"):
        load(tmp_path)


def test_rows_may_come_in_any_order_and_number() -> None:
    rng = np.random.default_rng(5)
    place = PackedPlace(64, 23, 70)
    weights = (rng.normal(0, 0.02, (23, 70)).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    for _ in range(50):
        memory = rng.integers(0, 256, place.end_bytes, dtype=np.uint8)
        before, packer = memory[:64].copy(), PanelPacker(memory)
        cuts = [0, *sorted(rng.choice(np.arange(1, 23), rng.integers(0, 12), replace=False).tolist()), 23]
        parts = [(begin, weights[begin:end]) for begin, end in itertools.pairwise(cuts)]
        for number in rng.permutation(len(parts)):
            packer.add(place, *parts[number])
        np.testing.assert_array_equal(unpacked(memory, place).view(torch.uint16).numpy(), weights)
        np.testing.assert_array_equal(memory[:64], before)


def test_escapes_fill_the_room_for_them_and_no_more() -> None:
    """The most escapes for which there is room are stored; one more is an error, and nothing beside the matrix is touched."""
    place = PackedPlace(0, 2 * PANEL_ROWS, 64)
    weights = np.full((2 * PANEL_ROWS, 64), 0x3F80, np.uint16)
    weights[:, :4] = 0x0080
    memory = np.full(place.end_bytes + 64, 7, np.uint8)
    PanelPacker(memory).add(place, 0, weights)
    np.testing.assert_array_equal(unpacked(memory, place).view(torch.uint16).numpy(), weights)
    assert place.most_escapes == 4 * len(weights)
    np.testing.assert_array_equal(memory[place.end_bytes - ESCAPES_BEHIND :], 7)
    weights[7, 63] = 0x0080
    with pytest.raises(ValueError, match="can't stay packed"):
        PanelPacker(memory).add(place, 0, weights)
    np.testing.assert_array_equal(memory[place.end_bytes - ESCAPES_BEHIND :], 7)


def test_layouts_differ_by_format() -> None:
    model = replace(shape(**UNEVEN), block_offsets=())
    assert layout_id(model, "bfloat16", PACKED_IN_MEMORY) != layout_id(model, "bfloat16")
