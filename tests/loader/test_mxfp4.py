"""Checkpoints with experts in MXFP4: where blocks and scales lie, how they are read, and what is refused."""

from __future__ import annotations

import json
import math
import mmap
import random
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointError
from loader.files.direct_io import BLOCK_BYTES, Alignment
from loader.files.safetensors import DTYPE_BYTES
from loader.formats.mxfp4 import MXFP4
from loader.formats.weight_format import StoredTensor
from loader.models.catalog import scan_one
from loader.reading.range_plan import direct_spans
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, planned_reads, stream_weights
from loader.sizes.layout import stored_tensors, weight_layout, weights_bytes
from tests.loader.checkpoints import CONFIG, FINITE, safetensors_bytes
from tests.loader.packed_checkpoints import pack_checkpoint

CONFIG_OF = CONFIG | {
    "architectures": ["GptOssForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 160,
    "head_dim": 32,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "mxfp4"},
}
SCALES = "model.layers.1.mlp.experts.down_proj_scales"
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def tensors() -> Tensors:
    """Every tensor that the checkpoint must hold, of random bytes."""
    generator = random.Random(3)

    def made(tensor: StoredTensor) -> tuple[str, tuple[int, ...], bytes]:
        dtype = "U8" if tensor.dtypes == ("U8",) else "BF16"
        data = generator.randbytes(math.prod(tensor.shape) * DTYPE_BYTES[dtype])
        return dtype, tensor.shape, data if tensor.name.endswith("_blocks") else data.translate(FINITE)

    return {tensor.name: made(tensor) for tensor in stored_tensors(parse_config(json.dumps(CONFIG_OF).encode()))}


def write(folder: Path, held: Tensors, num_files: int = 1) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG_OF))
    if num_files == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(held))
        return folder
    weight_map = {}
    for number in range(num_files):
        part = {name: held[name] for name in list(held)[number::num_files]}
        (folder / f"model-{number}.safetensors").write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def load(folder: Path, wants_packed: bool = False) -> dict[str, bytes]:
    """Returns each parameter's bytes in the weight range."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, wants_packed=lambda checkpoint: wants_packed)
        memory = mmap.mmap(-1, weights_bytes(source.shape, "bfloat16", MXFP4))
        told: tuple[Any, Any] = (lambda *_: None, lambda: False)
        stream_weights(source, "bfloat16", HostSink(memoryview(memory)), StagingRing(3, 1 << 20), *told, MXFP4)
        layout = weight_layout(source.shape, "bfloat16", MXFP4)
        return {slot.name: memory[slot.offset_bytes : slot.offset_bytes + slot.num_bytes] for slot in layout}


def test_experts_are_held_as_they_are_stored(tmp_path: Path) -> None:
    """One file, three and a packed copy bring the same bytes; only sinks change their type."""
    held = tensors()
    found = load(write(tmp_path / "one", held))
    assert found.keys() == held.keys()
    for name, (_, _, data) in held.items():
        if name.endswith("sinks"):
            data = b"".join(b"\0\0" + data[at : at + 2] for at in range(0, len(data), 2))  # bfloat16 as float32
        assert found[name] == data, name
    assert load(write(tmp_path / "three", held, num_files=3)) == found
    pack_checkpoint(tmp_path / "one")
    assert load(tmp_path / "one", wants_packed=True) == found


def test_blocks_are_read_straight_into_place(tmp_path: Path) -> None:
    """Whole blocks of the file go where they belong; scales pass a slot, where they are checked."""
    folder = write(tmp_path / "m", tensors())
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, in_place=True)
        reads = planned_reads(source, "bfloat16", StagingRing(3, 1 << 20), MXFP4)
        spans = [span for read in reads for span in direct_spans(read, 0, Alignment(BLOCK_BYTES, BLOCK_BYTES))]
    direct = {span.segment.tensor.name for span in spans}
    assert {name for name in direct if "experts" in name} == {
        f"model.layers.{layer}.mlp.experts.{name}_blocks" for layer in range(2) for name in ("gate_up_proj", "down_proj")
    }


@pytest.mark.parametrize("at", [0, -1])
def test_a_scale_that_is_nan_is_refused_by_its_tensors_name(tmp_path: Path, at: int) -> None:
    held = tensors()
    dtype, dims, data = held[SCALES]
    wrong = bytearray(data)
    wrong[at] = 255
    folder = write(tmp_path / "m", held | {SCALES: (dtype, dims, bytes(wrong))})
    assert scan_one(folder).complete
    with pytest.raises(CheckpointError, match=rf"model.safetensors: tensor {SCALES}: holds the scale NaN"):
        load(folder)


def test_missing_misshapen_and_plain_experts_are_named(tmp_path: Path) -> None:
    held = tensors()
    dtype, dims, data = held[SCALES]

    def error_with(name: str, changed: Tensors) -> str:
        return scan_one(write(tmp_path / name, changed)).error

    without = {name: one for name, one in held.items() if name != SCALES}
    assert error_with("missing", without) == f"model.safetensors: tensor {SCALES}: missing: config.json asks for it"
    longer = held | {SCALES: (dtype, (dims[0] + 1, *dims[1:]), data + bytes(math.prod(dims[1:])))}
    assert f"tensor {SCALES}: has shape {[dims[0] + 1, *dims[1:]]}, config.json asks for {list(dims)}" in error_with("long", longer)
    signed = held | {SCALES: ("I8", dims, data)}
    assert f"tensor {SCALES}: dtype I8 is not supported here; supported: U8" in error_with("signed", signed)
    name = SCALES.removesuffix("_scales")
    plain = {one: tensor for one, tensor in held.items() if not one.startswith(f"{name}_") or one == f"{name}_bias"}
    matrix = ("BF16", (8, 160, 128), bytes(8 * 160 * 128 * 2))
    assert f"tensor {name}: is stored as BF16: served are experts in MXFP4" in error_with("plain", plain | {name: matrix})


def test_stages_and_places(tmp_path: Path) -> None:
    """Scales follow their blocks, both in the stage of their layer, with no byte of another parameter between them."""
    shape = replace(parse_config(json.dumps(CONFIG_OF).encode()), block_offsets=())
    slots = {slot.name: slot for slot in weight_layout(shape, "bfloat16", MXFP4)}
    blocks, scales = slots[SCALES.replace("_scales", "_blocks")], slots[SCALES]
    assert blocks.stage == scales.stage == 2
    assert 0 <= scales.offset_bytes - blocks.offset_bytes - blocks.num_bytes < 64
    assert (blocks.shape, scales.shape) == ((8, 128, 5, 16), (8, 128, 5))
