"""Shares of split models from packed files: the same bytes as from plain ones, frames that are read in part, and broken ones."""

from __future__ import annotations

import mmap
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from engine.host import unpack_kernels
from loader.errors import CheckpointError
from loader.files import frame
from loader.files.packed import Frame
from loader.files.safetensors import TensorRef
from loader.files.weight_files import PACKED_DIR, read_headers
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.registry import held_format
from loader.formats.weight_format import WeightFormat
from loader.models.catalog import scan_one
from loader.packing import codec
from loader.reading.range_plan import Read
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import open_checkpoint, planned_reads, stream_weights
from loader.shapes.model_shape import DeviceShare, Division
from loader.sizes.layout import weights_bytes
from tests.loader import test_expert_slices as mixtures
from tests.loader import test_slices as dense
from tests.loader.checkpoints import CONFIG, write_packable
from tests.loader.packed_checkpoints import pack_checkpoint
from tests.loader.test_split_formats import FORMATS, write_drawn

FRAME_VALUES = 512
# Rows of 64 values, 8 to a frame; parts of most matrices begin and end within frames.
WIDER = {"hidden_size": 64, "intermediate_size": 88, "vocab_size": 72, "vocab_size_per_layer_input": 72, "dtype": "bfloat16"}
NUMBA = Decoder("numba", unpack_kernels.decode, unpack_kernels.sum_of)
FAMILIES: dict[str, dict[str, Any]] = {
    **{name: dense.config_of(name) | WIDER for name in dense.FAMILIES if name != "wrapper"},
    "wrapper": {**dense.config_of("wrapper"), "text_config": dense.FAMILIES["wrapper"]["text_config"] | WIDER},
    "rows longer than frames": CONFIG | WIDER | {"intermediate_size": 1100},
}
SIX_LAYERS = {"num_hidden_layers": 6, "layer_types": ["sliding_attention", "full_attention"] * 3}
MIXTURES = {
    name: config | {"hidden_size": 64, "intermediate_size": 12, "dtype": "bfloat16"} for name, config in mixtures.FAMILIES.items()
}
CASES = [
    *((name, FAMILIES[name], Division(2)) for name in FAMILIES),
    *((name, FAMILIES[name], Division(4)) for name in ("one KV head", "phi3", "qwen3.5")),
    *((name, FAMILIES[name], Division(2, num_stages=2)) for name in ("llama", "phi3")),
    ("gemma4", FAMILIES["gemma4"] | SIX_LAYERS, Division(3, num_stages=3)),
    *((name, MIXTURES[name], Division(2)) for name in MIXTURES),
    *((name, MIXTURES[name], Division(2, 2)) for name in MIXTURES),
    ("qwen2-moe", MIXTURES["qwen2-moe"], Division(4, 2)),
    ("mixtral in stages", MIXTURES["mixtral"], Division(4, 2, 2)),
]


@pytest.fixture(autouse=True)
def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "FRAME_VALUES", FRAME_VALUES)


def pack_alone(folder: Path) -> Path:
    """Returns a copy of a checkpoint that has packed files alone."""
    alone = folder.with_name(f"{folder.name}-packed")
    shutil.copytree(folder, alone)
    pack_checkpoint(alone)
    for path in alone.glob("*.safetensors"):
        path.unlink()
    return alone


class Loaded(NamedTuple):
    memory: bytes
    reads: list[Read]
    num_bytes: int


def load(
    folder: Path,
    rank: int,
    division: Division,
    dtype: str = "bfloat16",
    weight_format: WeightFormat | None = PLAIN,
    decoder: Decoder = NUMBA,
) -> Loaded:
    """Returns the whole weight range of a share, its reads, and how many bytes were read for it. weight_format: None: as the
    checkpoint's are held."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=DeviceShare(rank, division))
        source.shape = replace(source.shape, block_offsets=())  # the same layout, whichever files there are
        held_in = held_format(source.shape, None) if weight_format is None else weight_format
        memory, ring = mmap.mmap(-1, weights_bytes(source.shape, dtype, held_in)), StagingRing(3, 64 << 10)
        told: tuple[Any, Any] = (lambda *_: None, lambda: False)
        report = stream_weights(source, dtype, HostSink(memoryview(memory)), ring, *told, held_in, decoder=decoder)
        return Loaded(memory[:], planned_reads(source, dtype, ring, held_in), report.num_bytes)


@pytest.mark.parametrize(("name", "config", "division"), CASES, ids=[f"{name}, {tuple(how)}" for name, _, how in CASES])
def test_shares_from_packed_files_have_the_bytes_of_those_from_plain_ones(
    tmp_path: Path, name: str, config: dict[str, Any], division: Division
) -> None:
    """Frames may hold rows of several shares; columns are divided as well, and fused tensors, experts and stages."""
    folder = write_packable(tmp_path / "m", config=config)
    alone = pack_alone(folder)
    num_in_part = 0
    for rank in range(division.size):
        plain, packed = (load(one, rank, division) for one in (folder, alone))
        assert packed.memory == plain.memory, rank
        segments = [segment for read in packed.reads for segment in read.segments]
        assert all(segment.frame is not None for segment in segments)
        assert packed.num_bytes == sum(segment.end - segment.begin for segment in segments)
        num_in_part += sum(segment.frame.packed and not segment.is_whole_frame for segment in segments if segment.frame)
    assert num_in_part > 0 or division.stage_size == 1


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize(("dtype", "weight_format"), [("float32", PLAIN), ("bfloat16", INT8), ("float32", INT8)])
def test_parts_of_frames_are_converted_as_plain_weights_are(
    tmp_path: Path, architecture: str, dtype: str, weight_format: WeightFormat
) -> None:
    folder = write_packable(tmp_path / "m", 2, CONFIG | WIDER | {"architectures": [architecture]})
    alone = pack_alone(folder)
    for rank in range(2):
        wanted = load(folder, rank, Division(2), dtype, weight_format).memory
        for decoder in (Decoder(), NUMBA):
            assert load(alone, rank, Division(2), dtype, weight_format, decoder).memory == wanted


@pytest.mark.parametrize("name", ["int8", "FP8 by block", "INT4 by 128 with zeros", "AWQ", "GPTQ v2 with zeros", "NVFP4"])
def test_what_packed_files_hold_unchanged_is_divided_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Quantised matrices are stored as they are, in frames of their own."""
    monkeypatch.setattr(frame, "FRAME_VALUES", 1 << 13)
    FORMATS[name](write_drawn(tmp_path / "plain", {}), tmp_path / "m")
    alone = pack_alone(tmp_path / "m")
    for rank in range(2):
        plain, packed = (load(one, rank, Division(2), weight_format=None) for one in (tmp_path / "m", alone))
        assert packed.memory == plain.memory
        frames = [segment.frame for read in packed.reads for segment in read.segments if segment.frame is not None]
        assert {one.packed for one in frames} == {False, True}


def frames_of(alone: Path, name: str) -> tuple[Path, TensorRef, list[Frame]]:
    """Returns the file with a tensor, the tensor, and its frames."""
    for file, header in read_headers(alone, PACKED_DIR).items():
        for tensor in header.tensors:
            if tensor.name == name:
                return alone / file, tensor, list(tensor.frames)
    raise AssertionError(name)


def test_frames_of_other_shares_are_not_read(tmp_path: Path) -> None:
    """A share of the rows takes the frames that hold some of them; a share of the columns takes all."""
    alone = pack_alone(write_packable(tmp_path / "m", config=CONFIG | WIDER))
    read = [
        {(segment.tensor.name, segment.begin) for one in load(alone, rank, Division(2)).reads for segment in one.segments}
        for rank in range(2)
    ]
    for part, num_own in (("gate_proj", 6), ("down_proj", 13)):
        name = f"model.layers.0.mlp.{part}.weight"
        _, _, frames = frames_of(alone, name)
        begins = [{begin for tensor, begin in of_rank if tensor == name} for of_rank in read]
        assert begins[0] | begins[1] == {one.begin for one in frames}
        assert [len(own) for own in begins] == [num_own, num_own]
    assert len(frames_of(alone, "model.layers.0.mlp.gate_proj.weight")[2]) == 11


@pytest.mark.parametrize("part", ["gate_proj", "down_proj"])
def test_a_broken_frame_of_a_share_is_named(tmp_path: Path, part: str) -> None:
    """Also one that is forged, with the right checksum. One that only another share needs does no harm."""
    alone = pack_alone(write_packable(tmp_path / "m", config=CONFIG | WIDER))
    name = f"model.layers.1.mlp.{part}.weight"
    path, tensor, frames = frames_of(alone, name)
    whole, last = path.read_bytes(), frames[-1]
    wanted = load(alone, 0, Division(2)).memory
    bad = bytearray(whole)
    bad[last.begin + 70] ^= 1
    path.write_bytes(bad)
    said = f"{PACKED_DIR}/model.safetensors: tensor {name}: bytes {last.begin} to {last.end}"
    with pytest.raises(CheckpointError, match=f"{said} don't match their checksum"):
        load(alone, 1, Division(2))
    if part == "gate_proj":
        assert load(alone, 0, Division(2)).memory == wanted
    assert tensor.record is not None
    bad = bytearray(whole)
    bad[last.begin + 4] ^= 1  # the number of escapes
    bad[last.begin + frame.escapes_at(last.num_bytes // 2) - 4] ^= 1  # of all but the last group
    forged = codec.sum_of(np.frombuffer(bytes(bad[last.begin : last.end]), np.uint8))
    path.write_bytes(bytes(bad).replace(tensor.record.sums[-1].encode(), f"{forged:016x}".encode()))
    for decoder in (Decoder(), NUMBA):
        with pytest.raises(CheckpointError, match=f"{said} are no packed weights"):
            load(alone, 1, Division(2), decoder=decoder)


def test_plain_files_are_read_where_there_are_any(tmp_path: Path) -> None:
    folder = write_packable(tmp_path / "m")
    pack_checkpoint(folder)
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, wants_packed=lambda _: True, share=DeviceShare(1, Division(2)))
        assert not source.is_packed
        said = "read its plain files: shares of a model are read from packed ones only where there are no others"
        assert source.packed_reason == said
    (folder / "model.safetensors").unlink()
    assert scan_one(folder).complete
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=DeviceShare(1, Division(2)))
        assert source.packed_reason == "read its packed files: there are no plain ones"
    (folder / PACKED_DIR / "model.safetensors").rename(folder / "model.safetensors")  # a packed file may be the model itself
    with ExitStack() as stack:
        assert open_checkpoint(folder, "", stack, share=DeviceShare(1, Division(2))).is_packed
