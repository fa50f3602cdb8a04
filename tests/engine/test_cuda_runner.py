"""Tests of TorchRunner for a GPU: weights on their way to the device, work space, and models that are loaded again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from config.devices import CUDA_LEFT_BYTES
from engine.contracts.loads import LoadCancelled
from engine.cpu.backend import open_device
from engine.cuda import backend, work_space
from engine.cuda.backend import CudaBackend, beside_work_space
from engine.cuda.model import CudaModel
from engine.cuda.sink import DeviceSink
from engine.loading import kernel_wait
from engine.loading.runner import TorchRunner
from engine.memory.weight_range import WeightRange
from engine.ops.ops import Int8Matrix
from engine.protocol import Configure, LoadModel
from loader.errors import CheckpointError, UnsupportedModel
from loader.formats.int8 import INT8
from loader.formats.registry import held_format, stored_format
from loader.models.catalog import scan_one
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.shapes.model_shape import DeviceShare, Division, ModelShape
from loader.sizes import layout
from tests.engine.cuda_bench import INTERPRETED, PROMPT, close, expected, load_cuda_model
from tests.engine.model_bench import (
    BLOCK_TOKENS,
    CACHE_DIR,
    CASES,
    MAX_LEN,
    load_task,
    make_checkpoint,
    make_memory,
    make_table,
    plan,
    put,
)
from tests.loader import fp8
from tests.loader.compressed import compress

pytest.importorskip("triton")
pytestmark = INTERPRETED


def test_the_runner_gives_the_model_of_the_last_load_back(tmp_path: Path) -> None:
    """A model that is loaded again is the same object: its weights return to their addresses, so graphs captured over them stay
    valid."""
    whole = make_checkpoint(tmp_path, **CASES["llama"] | {"num_hidden_layers": 1})
    memory = make_memory()
    options = Configure("cpu:0", memory.num_chunks, memory.chunk_bytes, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    runner = TorchRunner(CudaBackend(memory, options), options)
    spec = LoadModel(1, "m", str(tmp_path), "float32", scan_one(tmp_path).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])
    wanted = expected((tmp_path, whole), PROMPT)[:9]
    models = []
    for _ in range(2):
        model = runner.load(load_task(spec, memory=memory))
        assert isinstance(model, CudaModel)
        table = make_table(groups=model.kv_groups)
        put(table, 0, PROMPT)
        close(model.logits(plan((0, 0, 9)), table, True), wanted)
        model.release()
        models.append(model)
    assert models[0] is models[1]
    renamed = msgspec.structs.replace(spec, max_sequences=4)
    assert runner.load(load_task(renamed, memory=memory)) is not models[0]
    with pytest.raises(UnsupportedModel, match="resident: packed is not built on a GPU"):
        runner.load(load_task(msgspec.structs.replace(spec, quantize="packed"), memory=memory))
    memory.close()


def test_a_model_whose_addresses_were_given_up_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of changed files gives the addresses of the model's weights up, and is cancelled. The next load of the files as they
    were gets the same addresses from the driver, but not the object whose range is gone: evicting that would unmap nothing."""
    make_checkpoint(tmp_path, **CASES["llama"] | {"num_hidden_layers": 1})
    memory, file, given_up = make_memory(), tmp_path / "model.safetensors", list[int]()
    reserve = memory.reserve
    monkeypatch.setattr(memory, "release", lambda address, num_bytes: given_up.append(address))
    monkeypatch.setattr(memory, "reserve", lambda num_bytes: given_up.pop() if given_up else reserve(num_bytes))
    options = Configure("cpu:0", memory.num_chunks, memory.chunk_bytes, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    runner = TorchRunner(CudaBackend(memory, options), options)
    spec = LoadModel(1, "m", str(tmp_path), "float32", scan_one(tmp_path).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])
    first = runner.load(load_task(spec, memory=memory))
    assert isinstance(first, CudaModel)
    first.release()
    as_it_was = file.stat()
    os.utime(file, ns=(as_it_was.st_atime_ns, as_it_was.st_mtime_ns + 10**9))
    changed = msgspec.structs.replace(spec, fingerprint=scan_one(tmp_path).fingerprint)
    with pytest.raises(LoadCancelled):
        runner.load(load_task(changed, cancelled=lambda: True, memory=memory))
    os.utime(file, ns=(as_it_was.st_atime_ns, as_it_was.st_mtime_ns))
    for _ in range(2):
        model = runner.load(load_task(spec, memory=memory))
        assert isinstance(model, CudaModel)
        model.release()
    assert model._weights.address == first._weights.address
    memory.close()


@pytest.mark.parametrize("stored", [False, True])
def test_int8_is_loaded_bit_for_bit_as_on_a_cpu_device(tmp_path: Path, stored: bool) -> None:
    """Rounded as it is read, and as the checkpoint stores it; loaded again, it is the same."""
    make_checkpoint(tmp_path / "plain", **CASES["llama"] | {"num_hidden_layers": 1})
    folder = compress(tmp_path / "plain", tmp_path / "small") if stored else tmp_path / "plain"
    seen = scan_one(folder)
    assert seen.shape is not None
    held = stored_format(seen.shape) if stored else INT8
    memory = make_memory()
    options = Configure("cpu:0", memory.num_chunks, memory.chunk_bytes, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    runner = TorchRunner(CudaBackend(memory, options), options)
    spec = LoadModel(1, "m", str(folder), "float32", seen.fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1], held.name)
    on_cpu = load_cuda_model(folder, quantize="" if stored else "int8")
    (weight,) = {type(layer.mlp.down.weight) for layer in on_cpu._model.layers}  # type: ignore[attr-defined]
    assert weight is Int8Matrix
    for _ in range(2):
        model = runner.load(load_task(spec, memory=memory))
        assert isinstance(model, CudaModel)
        for own, wanted in zip(model._model.layers, on_cpu._model.layers, strict=True):  # type: ignore[attr-defined]
            for found, meant in ((own.mlp.down, wanted.mlp.down), (own.attention.qkv, wanted.attention.qkv)):
                assert torch.equal(found.weight.values, meant.weight.values)
                assert torch.equal(found.weight.scales, meant.weight.scales)
        model.release()
    memory.close()


@pytest.mark.parametrize("num_refusals", [1, 2])
def test_a_load_without_memory_is_tried_with_what_torch_gives_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_refusals: int
) -> None:
    """While another model's graph is captured, torch refuses memory that it has."""
    make_checkpoint(tmp_path, **CASES["llama"])
    memory, order = make_memory(), []
    options = Configure("cpu:0", memory.num_chunks, memory.chunk_bytes, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    runner = TorchRunner(CudaBackend(memory, options), options)
    spec = LoadModel(1, "m", str(tmp_path), "float32", scan_one(tmp_path).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])

    def warm(model: CudaModel) -> None:
        order.append("warmed")
        if order.count("warmed") <= num_refusals:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(CudaModel, "warm", warm)
    monkeypatch.setattr(backend, "give_back_memory", lambda: order.append("given back"))
    if num_refusals == 1:
        assert isinstance(runner.load(load_task(spec, memory=memory)), CudaModel)
    else:
        with pytest.raises(torch.OutOfMemoryError):
            runner.load(load_task(spec, memory=memory))
    assert order == ["warmed", "given back", "warmed"]
    memory.close()


def test_time_of_kernels_is_told_apart_from_time_of_loading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A load tells that it waits once its weights are read and its kernels are not yet compiled, and while they are launched for
    the first time, after that. Neither counts as time of the load."""
    make_checkpoint(tmp_path, **CASES["llama"])
    memory = make_memory()
    options = Configure("cpu:0", memory.num_chunks, memory.chunk_bytes, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=CACHE_DIR)
    backend = CudaBackend(memory, options)
    loading = TorchRunner(backend, options)
    loading._kernels.result(60)
    told: list[tuple[int, int]] = []
    waits = threading.Condition()
    begun: list[tuple[str, int]] = []

    def progress(bytes_done: int, bytes_total: int) -> None:
        with waits:
            told.append((bytes_done, bytes_total))
            waits.notify_all()

    def until_told_again(what: str) -> None:
        with waits:
            begun.append((what, len(told)))
            assert waits.wait_for(lambda: told[begun[-1][1] :].count((0, 0)) > 1, timeout=20), what

    class Builds:
        def need(self, spec: LoadModel, shape: ModelShape, waiting: Callable[[], None]) -> None:
            assert shape.num_layers == 3
            until_told_again("compiled")
            waiting()

    def warm(model: CudaModel) -> None:
        until_told_again("launched")

    monkeypatch.setattr(kernel_wait, "KERNEL_WAIT_EVERY_S", 0.01)
    monkeypatch.setattr(backend, "_builds", Builds())
    monkeypatch.setattr(CudaModel, "warm", warm)
    spec = LoadModel(1, "m", str(tmp_path), "float32", scan_one(tmp_path).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, [1])
    task = load_task(spec, progress=progress, memory=memory)
    loading.load(task)
    assert [what for what, _ in begun] == ["compiled", "launched"]
    assert told[0][1] > 0
    num_read = told.index((0, 0))
    assert told[num_read - 1] == (told[0][1], told[0][1]), "it waits before all is read"
    assert set(told[num_read:]) == {(0, 0)}
    assert task.kernels_seconds >= 0.02
    memory.close()


@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        ("float32", ""),
        ("bfloat16", ""),
        ("bfloat16", "compressed-block"),
        ("float32", "share"),
        ("bfloat16", "share"),
        ("float32", "int8"),
        ("bfloat16", "int8"),
        ("bfloat16", "int8 share"),
        ("bfloat16", "int8 experts"),
        ("float32", "int8 stored"),
        ("float32", "int8 stored share"),
    ],
)
def test_weights_reach_a_device_as_they_reach_the_host(tmp_path: Path, dtype: str, kind: str) -> None:
    """A device gets the same bytes as the host, with and without conversion, as FP8, rounded to int8 or stored so, and as one share
    of a model too, through slots smaller than a tensor."""
    folder = tmp_path / "plain"
    make_checkpoint(folder, **CASES["qwen3-moe" if "experts" in kind else "llama"] | {"vocab_size": 212})
    share = DeviceShare(1, Division(2)) if "share" in kind else None
    if "stored" in kind:
        folder = compress(folder, tmp_path / "stored")
    if kind in fp8.KINDS:
        fp8.quantize(folder, tmp_path / "fp8", fp8.KINDS[kind])
        folder = tmp_path / "fp8"
    memory = make_memory()
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=share)
        held = held_format(source.shape, "int8" if "int8" in kind else None)
        on_host = np.zeros(layout.weights_bytes(source.shape, dtype, held), np.uint8)
        weights = WeightRange(memory, len(on_host))
        weights.map(list(range(weights.num_chunks)))
        for sink in (HostSink(on_host.data), DeviceSink(memory, weights)):
            stream_weights(source, dtype, sink, StagingRing(2, 8 << 10), lambda done, total: None, lambda: False, held)
    num_places = 0
    for slot in layout.weight_layout(source.shape, dtype, held):
        for begin, end in slot.places:  # of int8 matrices that a load rounds also the scales
            wanted = torch.from_numpy(on_host[begin:end])
            assert torch.equal(weights.tensor(begin, (end - begin,), torch.uint8), wanted), slot.name
        num_places += len(slot.places)
    assert (num_places > len(layout.weight_layout(source.shape, dtype, held))) == (held is INT8)
    weights.close()
    memory.close()


@pytest.mark.parametrize(
    ("stored", "part", "said"),
    [
        (True, "weight_scale", "holds NaN or an infinity: no scale"),
        (False, "weight", "holds NaN or an infinity: cannot be quantised"),
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_int8_that_is_no_number_fails_a_devices_load_by_name(
    tmp_path: Path, stored: bool, part: str, said: str, value: float
) -> None:
    make_checkpoint(tmp_path / "plain", **CASES["llama"] | {"num_hidden_layers": 1})
    folder = compress(tmp_path / "plain", tmp_path / "small") if stored else tmp_path / "plain"
    name, tensors = f"model.layers.0.mlp.up_proj.{part}", load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].clone()
    tensors[name][-1, -1] = value
    save_file(tensors, folder / "model.safetensors")
    memory = make_memory()
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack)
        held = held_format(source.shape, "int8")
        weights = WeightRange(memory, layout.weights_bytes(source.shape, "float32", held))
        weights.map(list(range(weights.num_chunks)))
        told = (lambda done, total: None, lambda: False)
        with pytest.raises(CheckpointError, match=f"model.safetensors: tensor {name}: {said}"):
            stream_weights(source, "float32", DeviceSink(memory, weights), StagingRing(2, 8 << 10), *told, held)
    weights.close()
    memory.close()


def test_work_space_is_beside_the_chunks_of_a_gpu() -> None:
    given = Configure("cuda:0", 100, 16 << 20, 33 << 20, 512, 16, 5.0, 0)
    left = beside_work_space(given)
    assert (left.num_chunks, left.work_space_bytes) == (97, 0)
    on_cpu = msgspec.structs.replace(given, device="cpu:0")
    assert open_device(on_cpu, None).configure is on_cpu


def test_torch_is_held_to_the_work_space(monkeypatch: pytest.MonkeyPatch) -> None:
    set_to: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (10 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda fraction, index: set_to.append((fraction, index)))
    assert work_space.limit_torch(3 << 30) == (3 << 30) + work_space.KEPT_BYTES
    assert set_to == [(((3 << 30) + work_space.KEPT_BYTES) / (80 << 30), 0)]
    assert work_space.limit_torch(90 << 30) == 80 << 30
    assert set_to[1] == (1.0, 0)
    assert work_space.KEPT_BYTES < CUDA_LEFT_BYTES
