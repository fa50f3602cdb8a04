"""Packed weights are decoded on the device. A plain array of bytes stands in for its memory, and Triton's interpreter for the
GPU.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from engine.cpu.memory import CpuMemory
from engine.cuda.backend import CudaBackend
from engine.cuda.frames import DeviceFrames, device_frames
from engine.cuda.kernels import triton_unpack
from engine.cuda.sink import DeviceSink
from engine.loading.runner import TorchRunner
from engine.memory.weight_range import WeightRange
from engine.protocol import Configure
from loader.errors import CheckpointError
from loader.files import frame
from loader.files.packed import METADATA_KEY
from loader.files.weight_files import PACKED_DIR, read_headers
from loader.formats.int8 import INT8
from loader.formats.plain import PLAIN
from loader.formats.weight_format import WeightFormat
from loader.models.catalog import scan_one
from loader.packing import codec
from loader.reading.read_rates import ReadRates
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.unpack import Decoder
from loader.reading.weight_stream import open_checkpoint, planned_reads, stream_weights
from loader.shapes.model_shape import DeviceShare, Division, ModelShape
from loader.sizes import layout
from tests.engine.engine_process import load_message
from tests.engine.model_bench import CHUNK_BYTES, make_memory
from tests.kernel_cache import CACHE_DIR
from tests.loader.checkpoints import write_packable
from tests.loader.packed_checkpoints import pack_checkpoint

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu decodes the same frames"),
]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Returns a folder with a packed checkpoint. Its frames have a few thousand values only, because the interpreter is slow."""
    folder = write_packable(tmp_path_factory.mktemp("packed") / "m", 2)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(frame, "FRAME_VALUES", 1 << 13)
        pack_checkpoint(folder)
        yield folder


@pytest.fixture
def memory() -> Iterator[CpuMemory]:
    made = make_memory()
    yield made
    made.close()


def on_host(folder: Path, dtype: str, held_in: WeightFormat = PLAIN, share: DeviceShare | None = None) -> Any:
    """Returns the weights as the plain files hold them, in a weight format."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, in_place=False, share=share)
        assert not source.is_packed
        held = np.zeros(layout.weights_bytes(source.shape, dtype, held_in), np.uint8)
        stream_weights(source, dtype, HostSink(held.data), StagingRing(3, 64 << 10), lambda *_: None, lambda: False, held_in)
    return held


def on_device(
    folder: Path,
    dtype: str,
    memory: CpuMemory,
    frames: DeviceFrames | None,
    held_in: WeightFormat = PLAIN,
    share: DeviceShare | None = None,
) -> tuple[Any, int]:
    """Returns the weights that the packed files are decoded to, and how many frames the device decoded. held_in: the format in
    which the weights are held."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, in_place=False, wants_packed=lambda checkpoint: True, share=share)
        assert source.is_packed
        weights = WeightRange(memory, layout.weights_bytes(source.shape, dtype, held_in))
        stack.callback(weights.close)
        weights.map(range(weights.num_chunks))
        sink = DeviceSink(memory, weights, frames)
        stream_weights(source, dtype, sink, StagingRing(3, 64 << 10), lambda *_: None, lambda: False, held_in)
        return weights.tensor(0, (weights.num_bytes,), torch.uint8).numpy().copy(), len(sink.decoded)


def test_the_device_decodes_what_the_host_would(packed: Path, memory: CpuMemory) -> None:
    frames = device_frames(memory)
    found, num_decoded = on_device(packed, "bfloat16", memory, frames)
    wanted = on_host(packed, "bfloat16")
    num_packed = sum(
        one.packed for header in read_headers(packed, PACKED_DIR).values() for tensor in header.tensors for one in tensor.frames
    )
    assert num_decoded == num_packed > 10
    assert np.array_equal(found, wanted)
    by_host, num_decoded = on_device(packed, "bfloat16", memory, None)
    assert num_decoded == 0
    assert np.array_equal(by_host, wanted)


def packed_alone(packed: Path, folder: Path) -> Path:
    """Makes a folder with the same model that has packed files alone."""
    (folder / PACKED_DIR).mkdir(parents=True)
    for path in packed.rglob("*"):
        if path.is_file() and (path.parent.name == PACKED_DIR or path.suffix != ".safetensors"):
            (folder / path.relative_to(packed)).write_bytes(path.read_bytes())
    return folder


@pytest.mark.parametrize("rank", [0, 1])
def test_the_device_keeps_the_share_of_a_frame(packed: Path, memory: CpuMemory, tmp_path: Path, rank: int) -> None:
    """Rows and columns of frames that are decoded beside the weights, and whole frames straight in place."""
    folder, share = packed_alone(packed, tmp_path / "m"), DeviceShare(rank, Division(2))
    with ExitStack() as stack:
        reads = planned_reads(open_checkpoint(folder, "", stack, False, share=share), "bfloat16", StagingRing(3, 64 << 10))
    segments = [segment for read in reads for segment in read.segments if segment.frame is not None and segment.frame.packed]
    assert {segment.is_whole_frame for segment in segments} == {False, True}
    assert {segment.columns is None for segment in segments if not segment.is_whole_frame} == {False, True}
    found, num_decoded = on_device(folder, "bfloat16", memory, device_frames(memory), share=share)
    assert num_decoded == len(segments)
    wanted = on_host(packed, "bfloat16", share=share)
    assert np.array_equal(found, wanted)
    by_host, num_decoded = on_device(folder, "bfloat16", memory, None, share=share)
    assert num_decoded == 0
    assert np.array_equal(by_host, wanted)


def test_weights_of_another_dtype_are_decoded_and_converted_on_the_host(packed: Path, memory: CpuMemory) -> None:
    found, num_decoded = on_device(packed, "float32", memory, device_frames(memory))
    assert num_decoded == 0
    assert np.array_equal(found, on_host(packed, "float32"))


def test_packed_matrices_that_are_rounded_to_int8_are_decoded_on_the_host(packed: Path, memory: CpuMemory) -> None:
    """The others are decoded on the device."""
    frames = device_frames(memory)
    found, num_decoded = on_device(packed, "bfloat16", memory, frames, INT8)
    assert 0 < num_decoded < on_device(packed, "bfloat16", memory, frames)[1]
    wanted, slots = on_host(packed, "bfloat16", INT8), layout.weight_layout(scanned(packed), "bfloat16", INT8)
    for begin, end in (place for slot in slots for place in slot.places):
        assert np.array_equal(found[begin:end], wanted[begin:end])


def scanned(folder: Path) -> ModelShape:
    shape = scan_one(folder).shape
    assert shape is not None
    return shape


def spoil(folder: Path, change: Any) -> str:
    """Changes the last frame of a packed tensor and adjusts the frame's checksum. Returns the tensor's name."""
    path = next((folder / PACKED_DIR).glob("*.safetensors"))
    header = next(one for name, one in read_headers(folder, PACKED_DIR).items() if name.endswith(path.name))
    tensor = next(one for one in header.tensors if any(each.packed for each in one.frames))
    number, last = list(enumerate(tensor.frames))[-1]
    data = bytearray(path.read_bytes())
    held = np.frombuffer(data, np.uint8)[last.begin : last.end]
    change(held, last.num_bytes // 2)
    end = 8 + int.from_bytes(data[:8], "little")
    text = json.loads(data[8:end])
    record = json.loads(text["__metadata__"][METADATA_KEY])
    record["tensors"][tensor.name]["sums"][number] = f"{codec.sum_of(held.copy()):016x}"
    text["__metadata__"][METADATA_KEY] = json.dumps(record, separators=(",", ":"))
    written = json.dumps(text, separators=(",", ":")).encode()
    del held
    stat = path.stat()
    data[8:end] = written.ljust(end - 8)
    path.write_bytes(data)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    return str(tensor.name)


def other_escapes(held: Any, num_values: int) -> None:
    """Writes counts of escapes that are negative or far too large."""
    counts = held[frame.offsets_at(num_values) : frame.escapes_at(num_values)].view("<u4")
    counts[0], counts[-1] = 0xFFFFFF00, 1 << 30


def fewer_values(held: Any, num_values: int) -> None:
    held[:4].view("<u4")[0] -= 1


@pytest.mark.parametrize("where", ["device", "host", "device, a share"])
@pytest.mark.parametrize("change", [other_escapes, fewer_values])
def test_a_frame_with_a_right_checksum_and_wrong_contents_is_refused(
    tmp_path: Path, packed: Path, memory: CpuMemory, where: str, change: Any
) -> None:
    """Frames are checked beyond their checksum, since whoever writes the file can write a matching checksum."""
    folder = tmp_path / "m"
    for path in packed.rglob("*"):
        if path.is_file():
            (folder / path.relative_to(packed)).parent.mkdir(parents=True, exist_ok=True)
            (folder / path.relative_to(packed)).write_bytes(path.read_bytes())
            os.utime(folder / path.relative_to(packed), ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    name, share = spoil(folder, change), DeviceShare(1, Division(2)) if "share" in where else None
    for path in folder.glob("*.safetensors") if share is not None else ():
        path.unlink()
    frames = None if where == "host" else device_frames(memory)
    with pytest.raises(CheckpointError, match=rf"tensor {name}: bytes \d+ to \d+ are no packed weights: it") as caught:
        on_device(folder, "bfloat16", memory, frames, share=share)
    assert caught.value.permanent


def test_a_device_that_decodes_otherwise_leaves_it_to_the_host(
    packed: Path, memory: CpuMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unpack = triton_unpack.unpack

    def off_by_a_bit(data: Any, begins: Any, frame_values: int, out: torch.Tensor, *told: Any) -> None:
        unpack(data, begins, frame_values, out, *told)
        out[-1] ^= 1

    monkeypatch.setattr(triton_unpack, "unpack", off_by_a_bit)
    with caplog.at_level(logging.WARNING):
        assert device_frames(memory) is None
    assert "packed weights are decoded on the host: RuntimeError: a frame decoded on the device has other values" in caplog.text


def test_its_speed_is_measured_as_loads_use_it(packed: Path, memory: CpuMemory, tmp_path: Path) -> None:
    frames = device_frames(memory)
    assert frames is not None
    decoder = frames.measured_by(Decoder())
    path = next((packed / PACKED_DIR).glob("*.safetensors"))
    header = next(one for name, one in read_headers(packed, PACKED_DIR).items() if name.endswith(path.name))
    first = next(one for tensor in header.tensors for one in tensor.frames if one.packed)
    fd = os.open(path, os.O_RDONLY)
    rates = ReadRates(str(tmp_path))
    assert rates.packed_bytes_per_s(fd, first, decoder, StagingRing(3, 64 << 10)) > 0
    os.close(fd)
    assert " triton" in (tmp_path / "read-rates.json").read_text()


def test_a_gpu_runner_decodes_on_its_device(packed: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A whole load decodes on the device. Only packed files exist, so there is nothing to choose."""
    folder = packed_alone(packed, tmp_path / "m")
    wanted = on_host(packed, "bfloat16")
    sinks: list[DeviceSink] = []
    made = DeviceSink.__init__

    def noted(sink: DeviceSink, *arguments: Any) -> None:
        made(sink, *arguments)
        sinks.append(sink)

    monkeypatch.setattr(DeviceSink, "__init__", noted)
    memory = CpuMemory(256, CHUNK_BYTES)
    options = Configure("cpu:0", 256, CHUNK_BYTES, 0, 64, 4, 10.0, 1, cache_dir=CACHE_DIR)
    runner = TorchRunner(CudaBackend(memory, options), options)
    found: list[Any] = []
    monkeypatch.setattr(
        CudaBackend,
        "model",
        lambda self, spec, shape, weights: found.append(weights.tensor(0, (weights.num_bytes,), torch.uint8).numpy().copy()),
    )
    from engine.contracts.loads import LoadTask

    spec = load_message(str(folder), "m", dtype="bfloat16", max_model_len=64, fingerprint=scan_one(folder).fingerprint)
    task = LoadTask(spec, np.arange(256, dtype=np.int32), lambda done, total: None, lambda: False)
    runner.load(task)
    assert len(sinks[0].decoded) > 10
    assert task.read_as == "read its packed files: there are no plain ones"
    assert np.array_equal(found[0], wanted)
