"""The backend of the `cpu` device: opens the device's memory, makes models, and starts the compilation of their kernels.

Until a model's kernels are compiled (once per machine, by other processes), the model is served without them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from engine.contracts.backend import OpenDevice
from engine.contracts.loads import KernelNews
from engine.cpu.encoder import CpuEncoder
from engine.cpu.memory import CpuMemory
from engine.cpu.model import CpuModel
from engine.cpu.ops import CpuOps
from engine.cpu.programs.program import Scratch
from engine.cpu.ranks import SharedRanks
from engine.cpu.stages import SharedStages
from engine.host.process import num_cores
from engine.host.weight_decoder import weight_decoder
from engine.memory import handles
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.group_region import GroupRegion
from engine.memory.handover import Handover
from engine.memory.weight_range import WeightRange
from engine.protocol import Configure, LoadModel
from loader.configs.hf_config import CONFIG_NAME
from loader.configs.kernel_needs import needed_kernels
from loader.configs.kernel_sets import SAMPLING, KernelSet
from loader.errors import UnsupportedModel
from loader.formats.weight_format import WeightFormat
from loader.reading.sinks import HostSink
from loader.reading.unpack import Decoder
from loader.shapes.model_shape import ModelShape
from loader.threads import Thread

log = logging.getLogger("engine")

MAX_KEPT_MODELS = 32  # models kept with their recorded steps, which take some hundred KiB for each number of rows
# In a model with fewer bytes of weights than this, matrix products end before a second thread has woken up.
SINGLE_THREAD_WEIGHTS_BYTES = 32 << 20
POLL_S = 0.05  # between looks whether kernels are in use


def open_device(configure: Configure, handover: Handover | None) -> OpenDevice:
    """Opens the `cpu` device and returns it. Its memory has the size in `configure`, and is the memory that an earlier engine left,
    or new memory if there is none. handover: receives this memory from an earlier engine and keeps it for a later one; None: the
    memory is new and is freed when this process ends. Raises MemoryError if the system refuses the memory, and ValueError for sizes
    that no memory can have."""
    given, left = handover.ask(configure.num_chunks, configure.chunk_bytes) if handover is not None else ([], None)
    memory = CpuMemory(configure.num_chunks, configure.chunk_bytes, given)
    handles.close(given)
    if handover is not None and not given:
        handover.give(memory)
    return OpenDevice(CpuBackend(memory, configure), configure, left)


class CpuBackend:
    """Implements engine.contracts.backend.Backend for the `cpu` device. memory: the device's chunks. options: the engine's
    settings."""

    reads_in_place = True

    def __init__(self, memory: ChunkMemory, options: Configure) -> None:
        self.memory, self._options = memory, options
        self.compute_threads = options.threads or num_cores()
        self._models: dict[str, tuple[object, CpuModel]] = {}  # the latest loaded models, with their recorded steps
        self._scratch = Scratch()

    def prepare(self, tell: Callable[[KernelNews], None]) -> None:
        self._ops = CpuOps(self._options.cache_dir, deferred=True, asks=self._compile_late, beside_compilers=self._compiles)
        if self._ops.kernels is None:
            self._builds = None
        else:
            from engine.cpu.kernel_builds import CpuKernelBuilds

            self._builds = CpuKernelBuilds(self.compute_threads, num_cores(), self._ops.use, self._ops.give_up, tell)
            self._builds.need(self._options.kernels)
        self.decoder()

    @property
    def steps_may_overlap(self) -> bool:
        return self._ops.threads_may_share()

    def need_kernels(
        self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat
    ) -> Callable[[Callable[[], None]], None] | None:
        self._need(needed_kernels(shape, spec.dtype, weight_format))
        if not weight_format.waits_for_kernels:
            return None
        return partial(self._until_in_use, KernelSet(spec.dtype, weight_format.kernels))

    def _compiles(self) -> bool:
        return self._builds is not None and self._builds.takes_cores

    def _until_in_use(self, kernel_set: KernelSet, waiting: Callable[[], None]) -> None:
        """Waits until a set of kernels is in use. While waiting, calls `waiting` often; an error that `waiting` raises ends the
        wait. Raises RuntimeError if the kernels cannot be compiled, or if the compilers have made no progress for too long."""
        without = f"kernels for {kernel_set}, without which it is too slow to be served"
        while self._ops.awaited([kernel_set]):
            if self._builds is not None and (stall := self._builds.stall):
                raise RuntimeError(f"{without}: {stall}")
            waiting()
            time.sleep(POLL_S)
        if self._builds is not None and (problem := self._builds.problems.get(str(kernel_set))):
            raise RuntimeError(f"{without}: {problem}")

    def _need(self, sets: Sequence[KernelSet]) -> None:
        """Starts processes that compile the given sets of kernels, unless these are compiled already, and returns without waiting
        for the processes. Does nothing without Numba."""
        if self._builds is not None:
            self._builds.need(sets)

    def _compile_late(self, kernel_set: KernelSet) -> None:
        """Handles a step's need for a set of kernels that is not in use; the step itself uses the reference implementation. If
        nothing has asked for the set before, starts its compilation and logs a warning, because loader/configs/kernel_needs.py
        should have listed it for the model. If it is the set for sampling, its compilation no longer waits until the engine is
        idle."""
        if self._builds is not None and kernel_set.name == SAMPLING:
            self._builds.hurry([kernel_set])
        if self._builds is not None and not self._builds.knows(kernel_set):
            log.warning("kernels for %s were not compiled ahead: no model was known to call them", kernel_set)
            Thread(target=self._builds.need, args=([kernel_set],), name="kernels").start()

    def check(self, spec: LoadModel, shape: ModelShape, weight_format: WeightFormat) -> None:
        if weight_format.waits_for_kernels and self._ops.kernels is None:
            why = f"{weight_format.setting}: {spec.quantize} needs Numba, which is not installed; leave it out"
            raise UnsupportedModel(CONFIG_NAME, None, why)
        if shape.is_encoder and not weight_format.runs_encoders:
            raise UnsupportedModel(CONFIG_NAME, None, f"{weight_format.setting}: {spec.quantize} is not built for encoders")
        if experts := weight_format.unbuilt_experts(shape):
            why = f"{weight_format.setting}: {spec.quantize} is not built for {experts}"
            raise UnsupportedModel(CONFIG_NAME, None, why)

    def early_model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> CpuModel | None:
        return None if shape.is_encoder else self._decoder_model(spec, shape, weights)

    def model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> CpuModel | CpuEncoder:
        if shape.is_encoder:
            return CpuEncoder(self._ops, spec, shape, weights, threads_for(weights.num_bytes, self.compute_threads))
        return self._decoder_model(spec, shape, weights)

    def _decoder_model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> CpuModel:
        """Returns a model that generates tokens (not an encoder). If the model was loaded before with the same settings, returns
        the same object as before, with its recorded steps. Such objects are kept only for the MAX_KEPT_MODELS models that were
        loaded last, because recorded steps take host memory."""
        identity = (weights, spec.kv_dtype, spec.max_model_len, spec.max_sequences)
        known = self._models.pop(spec.model, None)
        if known is not None and known[0] == identity:
            model = known[1]
            model.restore(spec)
        else:
            threads = threads_for(weights.num_bytes, self.compute_threads)
            sizes, need = (self._options.block_tokens, threads), self._need
            model = CpuModel(self._ops, spec, shape, weights, self.memory, self._scratch, *sizes, need)
        self._models[spec.model] = identity, model
        while len(self._models) > MAX_KEPT_MODELS:
            del self._models[next(iter(self._models))]
        return model

    def split_model(
        self, spec: LoadModel, shape: ModelShape, weights: WeightRange, kv_memory: Tensor, region: GroupRegion
    ) -> CpuModel:
        """Returns this device's share of a split model, as a new object at each load, because recorded steps hold addresses of
        `region`. kv_memory: uint8, the memory of the share's KV blocks. region: memory that the engines of all shares map."""
        self._models.pop(spec.model, None)
        threads = threads_for(weights.num_bytes, self.compute_threads)
        ranks = stages = None
        if region.stage_size > 1:
            ranks = SharedRanks(self._ops, region.stage_rank, region.stage_size, region.broken, region.ranks)
        if region.link is not None:
            stages = SharedStages(region.link, shape.hidden_size, getattr(torch, spec.dtype))
        sizes, need = (self._options.block_tokens, threads), self._need
        return CpuModel(self._ops, spec, shape, weights, self.memory, self._scratch, *sizes, need, ranks, kv_memory, stages)

    def sink(self, weights: WeightRange) -> HostSink:
        return HostSink(weights.buffer, weights.prepare, self._ops.pack_rows)

    def decoder(self) -> Decoder:
        return weight_decoder(self._options.cache_dir)

    def measured_decoder(self) -> Decoder:
        return self.decoder()


def threads_for(weights_bytes: int, num_threads: int) -> int:
    """Returns how many of num_threads threads compute a model's steps: one if its weights are small, else all. weights_bytes: size
    of the weights."""
    return 1 if weights_bytes < SINGLE_THREAD_WEIGHTS_BYTES else num_threads
