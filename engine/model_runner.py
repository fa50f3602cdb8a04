"""TorchRunner: loads checkpoints into this process and makes models of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine import ops
from engine.contracts import KernelNews, LoadCancelled, LoadTask
from engine.device import num_cores, threads_for
from engine.hosted_encoder import TorchEncoder
from engine.hosted_model import TorchModel
from engine.loading.device_frames import DeviceFrames, device_frames
from engine.loading.device_sink import DeviceSink
from engine.loading.left_weights import adopt
from engine.loading.weight_arrivals import parameter_places
from engine.loading.weight_copies import KeptCopy, WeightCopies
from engine.loading.weight_decoder import weight_decoder
from engine.loading.weight_gate import WeightGate
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_registration import RegistersHost, register
from engine.memory.host_tier import HostTier
from engine.memory.weight_range import WeightRange, WeightRanges
from engine.protocol import Configure, LoadModel
from engine.steps.program import Scratch
from loader.errors import CheckpointError, UnsupportedModel
from loader.formats.registry import FORMATS
from loader.hf_config import CONFIG_NAME
from loader.layout import weight_layout, weights_bytes
from loader.model_shape import ModelShape
from loader.range_plan import Read
from loader.read_rates import ReadRates
from loader.sinks import HostSink, WeightSink
from loader.source_choice import SourceChoice
from loader.staging import StagingRing
from loader.unpack import Decoder
from loader.weight_stream import OpenCheckpoint, ReadCancelled, open_checkpoint, stream_weights

log = logging.getLogger("engine")

if TYPE_CHECKING:  # Triton may be missing on the CPU, and Numba on a GPU
    from engine.cuda_model import CudaModel
    from engine.kernel_builds import KernelBuilds

MAX_GRAPH_ROWS = 256  # decode steps with more rows have no graph
MAX_KEPT_MODELS = 32  # with their recorded steps: some hundred KiB for each number of rows
KERNELS_LIMIT_S, TELL_EVERY_S = 300.0, 1.0
FP8_CAPABILITY = (8, 9)


class TorchRunner:
    """The engine.contracts.Runner on torch. On the CPU, other processes compile the kernels of Configure.dtypes from the start
    (once per machine); until they are done, models are served without them. On a GPU, kernels are compiled for each model's sizes,
    at its load.

    gpu: whether models run through the GPU's kernels (default: whether the memory is a GPU's); interpreted, these run on any
    device."""

    def __init__(self, memory: ChunkMemory, options: Configure, tier: HostTier | None = None, gpu: bool | None = None) -> None:
        self._gpu = memory.arena.is_cuda if gpu is None else gpu
        self.memory, self._options = memory, options
        self._ranges = WeightRanges(memory)
        self._gpu_models: dict[str, tuple[object, CudaModel]] = {}  # the latest of each name, with its graphs
        self._cpu_models: dict[str, tuple[object, TorchModel]] = {}  # the latest loaded, with their recorded steps
        self._copies = WeightCopies(memory, tier)
        self._ring = StagingRing()
        self._scratch = Scratch()
        self._rates = ReadRates(options.cache_dir)
        self._frames: DeviceFrames | None = None  # decodes packed weights on a GPU; None: the host does
        self._builds: KernelBuilds | None = None  # None on a GPU, or without Numba
        self._news: list[KernelNews] = []  # from before watch_kernels was called
        self._tell: Callable[[KernelNews], None] = self._news.append
        self._telling = threading.Lock()
        self._kernels = _in_background(self._prepare_kernels)
        if tier is not None and isinstance(memory, RegistersHost):
            _in_background(partial(register, memory, "host tier", [tier.span], tier.slot_bytes))

    def _prepare_kernels(self) -> None:
        self._ring.prepare()
        if isinstance(self.memory, RegistersHost):
            register(self.memory, "staging", [self._ring.span], self._ring.slot_bytes)
        if self._gpu:
            ops.configure_gpu(self._options.cache_dir)
            self.memory.copy_out(self.memory.arena.data_ptr(), np.zeros(8, np.uint8)).wait()  # compiles the checksum kernel
            self._frames = device_frames(self.memory)
            return
        if ops.configure(self._options.cache_dir, deferred=True):
            from engine.kernel_builds import KernelBuilds

            self._builds = KernelBuilds(self._options.threads or num_cores(), num_cores(), self._tell_of_kernels)
            for dtype in self._options.dtypes:
                self._builds.need(dtype)
        self._decoder()

    def watch_kernels(self, tell: Callable[[KernelNews], None]) -> None:
        """Calls `tell` with all earlier news about kernels, and from other threads with all later news."""
        with self._telling:
            self._tell = tell
            for news in self._news:
                tell(news)

    def _tell_of_kernels(self, news: KernelNews) -> None:
        with self._telling:
            self._tell(news)

    def _decoder(self) -> Decoder:
        return weight_decoder(self._options.cache_dir)

    def _measured_decoder(self) -> Decoder:
        """Returns a decoder for measurements. It does with a frame what loads do, whether they decode on the device or on the
        host."""
        return self._decoder() if self._frames is None else self._frames.measured_by(self._decoder())

    def load(self, task: LoadTask) -> TorchModel | CudaModel | TorchEncoder:
        """Loads one model while other models step. Raises CheckpointError (permanent), CheckpointChanged, MemoryError,
        LoadCancelled."""
        spec, asked_s = task.spec, time.perf_counter()
        _wait_for_kernels(self._kernels, task)
        with ExitStack() as stack:
            choice = SourceChoice(self._rates, self._ring, self._measured_decoder)
            source = open_checkpoint(spec.path, spec.fingerprint, stack, not self._gpu, choice.wants_packed)
            weight_format = FORMATS[spec.quantize]
            on_gpu = bool(self._gpu) and not weight_format.runs_on_gpus
            if on_gpu or (source.shape.pooling and not weight_format.runs_encoders):
                what = "on a GPU" if on_gpu else "for encoders"
                raise UnsupportedModel(CONFIG_NAME, None, f"quantize: {spec.quantize} is not built {what}")
            if spec.kv_cache_dtype and self.memory.arena.is_cuda:
                _check_fp8(torch.cuda.get_device_capability())
            num_bytes = weights_bytes(source.shape, spec.dtype, weight_format)
            granted = len(task.chunks) * self._options.chunk_bytes
            if num_bytes > granted:
                raise MemoryError(f"weights take {num_bytes} bytes, {len(task.chunks)} chunks were granted ({granted} bytes)")
            num_threads = threads_for(num_bytes, self._options.threads)
            if self._builds is not None:
                self._builds.need(spec.dtype, weight_format.kernels)
            task.kernels_seconds = time.perf_counter() - asked_s
            weights = self._ranges.of(spec.model, (spec.fingerprint, spec.dtype, spec.quantize), num_bytes)
            started_s = time.perf_counter()
            weights.map(task.chunks[: weights.num_chunks].tolist())
            task.map_seconds = time.perf_counter() - started_s
            gate: WeightGate | None = None
            hosted: TorchModel | None = None
            try:
                if not self._gpu and not source.shape.pooling:
                    hosted = self._cpu_model(spec, source.shape, weights, num_threads)
                    if task.begun is not None and ops.threads_may_share():
                        gate = WeightGate(weight_layout(source.shape, spec.dtype, weight_format))
                        task.begun(hosted, gate)
                if not self._in_memory(task, weights, gate):
                    self._read(task, choice, source, weights, gate, stack)
                task.weights_bytes = num_bytes
                if self._gpu:
                    return self._gpu_model(spec, source.shape, weights)
                if source.shape.pooling:
                    return TorchEncoder(spec, source.shape, weights, num_threads)
                assert hosted is not None
                return hosted
            except BaseException as error:
                if gate is not None:
                    gate.withdraw(str(error))
                if hosted is not None:
                    hosted.release()
                weights.unmap()
                if isinstance(error, ReadCancelled):
                    raise LoadCancelled(str(error)) from None
                raise

    def _in_memory(self, task: LoadTask, weights: WeightRange, gate: WeightGate | None) -> bool:
        """Fills the range without reading files, from weights left on the device or from a copy in the host tier. Returns whether
        it holds the weights now."""
        for way, given in ((partial(adopt, self.memory), task.left), (self._copies.take, task.spec.source_slots)):
            if given:
                if way(task, weights, gate):
                    return True
                if gate is not None:
                    gate.begin_anew()
        return False

    def _read(
        self,
        task: LoadTask,
        choice: SourceChoice,
        source: OpenCheckpoint,
        weights: WeightRange,
        gate: WeightGate | None,
        stack: ExitStack,
    ) -> None:
        """Reads the weights from files into the range, and copies them to the host tier if they are to be kept. Reads the plain
        files if packed ones are damaged. stack: closes what is opened."""
        spec = task.spec
        layout = weight_layout(source.shape, spec.dtype, FORMATS[spec.quantize])
        places = [(begin, end) for begin, end, _ in parameter_places(layout)]
        with self._copies.keeping(task, weights, places) as kept:
            behind = [each for each in (gate, kept) if each is not None]
            try:
                self._stream(task, source, weights, behind)
                task.read_as = choice.reason or source.packed_reason
            except CheckpointError as error:
                if not source.has_plain_files_beside:
                    raise
                log.warning("%s: %s: reading its plain files", spec.model, error)
                for each in behind:
                    each.begin_anew()
                self._stream(task, open_checkpoint(spec.path, spec.fingerprint, stack, not self._gpu), weights, behind)
                task.read_as = f"read its plain files: the packed ones are damaged ({error})"

    def _stream(
        self, task: LoadTask, source: OpenCheckpoint, weights: WeightRange, behind: Sequence[WeightGate | KeptCopy]
    ) -> None:
        """Reads the weights into the range. behind: each is notified of the bytes that have landed."""

        def landed(read: Read) -> None:
            for begin_bytes, end_bytes in read.places:
                for each in behind:
                    each.landed(begin_bytes, end_bytes)

        report = stream_weights(
            source,
            task.spec.dtype,
            self._sink(weights),
            self._ring,
            task.progress,
            task.cancelled,
            FORMATS[task.spec.quantize],
            landed=landed,
            decoder=self._decoder() if source.is_packed else Decoder(),
        )
        task.bytes_read = report.num_bytes

    def _sink(self, weights: WeightRange) -> WeightSink:
        return DeviceSink(self.memory, weights, self._frames) if self._gpu else HostSink(weights.buffer, weights.prepare)

    def _cpu_model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange, num_threads: int) -> TorchModel:
        """Returns the model; if it was loaded before with the same settings, the earlier object with its recorded steps, as
        _gpu_model does with graphs. Recorded steps take host memory, so only MAX_KEPT_MODELS models are kept."""
        identity = (weights, spec.kv_dtype, spec.max_model_len, spec.max_sequences)
        known = self._cpu_models.pop(spec.model, None)
        if known is not None and known[0] == identity:
            model = known[1]
            model.restore(spec)
        else:
            model = TorchModel(spec, shape, weights, self.memory, self._scratch, self._options.block_tokens, num_threads)
        self._cpu_models[spec.model] = identity, model
        while len(self._cpu_models) > MAX_KEPT_MODELS:
            del self._cpu_models[next(iter(self._cpu_models))]
        return model

    def _gpu_model(self, spec: LoadModel, shape: ModelShape, weights: WeightRange) -> CudaModel:
        """Returns the model; if it was loaded before with the same settings, the earlier object with its graphs: what they hold
        addresses of is still at the same place."""
        if shape.pooling:
            raise UnsupportedModel(CONFIG_NAME, None, "encoders are not served on a GPU")
        identity = (weights.address, spec.fingerprint, spec.dtype, spec.kv_dtype, spec.max_model_len, spec.max_sequences)
        known = self._gpu_models.get(spec.model)
        if known is not None and known[0] == identity:
            known[1].restore()
            return known[1]
        from engine.cuda_model import CudaModel

        max_graph_rows = MAX_GRAPH_ROWS if self.memory.arena.is_cuda else 0
        model = CudaModel(spec, shape, weights, self.memory.arena, self._options.block_tokens, max_graph_rows)
        model.warm()
        self._gpu_models[spec.model] = identity, model
        return model


def _check_fp8(capability: tuple[int, int]) -> None:
    """Raises UnsupportedModel for a GPU whose processors cannot convert float8_e4m3."""
    if capability < FP8_CAPABILITY:
        needed, there = (".".join(map(str, one)) for one in (FP8_CAPABILITY, capability))
        raise UnsupportedModel(CONFIG_NAME, None, f"kv_cache_dtype: fp8 needs compute capability {needed}; this GPU has {there}")


def _in_background(work: Callable[[], object]) -> Future[None]:
    """Runs `work` in a thread that the process does not wait for at its end."""
    future: Future[None] = Future()

    def run() -> None:
        try:
            work()
            future.set_result(None)
        except BaseException as error:  # reported by every load; ignored, it would leave the engine on the slow path
            future.set_exception(error)

    threading.Thread(target=run, name="kernels", daemon=True).start()
    return future


def _wait_for_kernels(compiled: Future[None], task: LoadTask) -> None:
    """Waits until kernels have been set up, and reports meanwhile that this load's time has not begun. Raises RuntimeError,
    LoadCancelled."""
    until_s = time.monotonic() + KERNELS_LIMIT_S
    while not wait([compiled], TELL_EVERY_S).done:
        task.progress(0, 0)
        if task.cancelled():
            raise LoadCancelled(f"{task.spec.model}: cancelled while kernels were looked for")
        if time.monotonic() > until_s:
            raise RuntimeError(f"kernels: not found within {KERNELS_LIMIT_S:.0f} s")
    if (error := compiled.exception()) is not None:
        raise RuntimeError(f"kernels: {error}") from error
