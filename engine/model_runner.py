"""TorchRunner: brings checkpoints into this process and makes models of them."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack

from engine import ops
from engine.contracts import LoadCancelled, LoadTask
from engine.device import threads_for
from engine.hosted_encoder import TorchEncoder
from engine.hosted_model import TorchModel
from engine.memory.chunk_memory import ChunkMemory
from engine.memory.host_tier import HostTier
from engine.memory.weight_range import WeightRanges
from engine.protocol import Configure
from engine.weight_copies import WeightCopies
from loader import sizing
from loader.sinks import HostSink
from loader.staging import StagingRing
from loader.weight_stream import ReadCancelled, open_checkpoint, stream_weights


class TorchRunner:
    """engine.contracts.Runner on torch. The kernels of Configure.dtypes are compiled (once per machine) in the background from the
    start; loads wait for them."""

    def __init__(self, memory: ChunkMemory, options: Configure, tier: HostTier | None = None) -> None:
        self.memory, self._options = memory, options
        self._ranges = WeightRanges(memory)
        self._copies = WeightCopies(memory, tier)
        self._ring = StagingRing()
        self._failure: BaseException | None = None
        self._kernels = threading.Thread(target=self._prepare_kernels, name="kernels", daemon=True)
        self._kernels.start()

    def _prepare_kernels(self) -> None:
        try:
            self._ring.prepare()
            ops.configure(self._options.cache_dir)
            for dtype in self._options.dtypes:
                ops.prepare(dtype, 1)
        except BaseException as error:  # told to every load; silence would leave the engine on the slow path
            self._failure = error

    def load(self, task: LoadTask) -> TorchModel | TorchEncoder:
        """Runs beside steps of other models. Raises CheckpointError (permanent), CheckpointChanged, MemoryError, LoadCancelled."""
        self._kernels.join()
        if self._failure is not None:
            raise RuntimeError(f"kernels: {self._failure}") from self._failure
        spec = task.spec
        with ExitStack() as stack:
            source = open_checkpoint(spec.path, spec.fingerprint, stack)
            num_bytes = sizing.weights_bytes(source.shape, spec.dtype)
            granted = len(task.chunks) * self._options.chunk_bytes
            if num_bytes > granted:
                raise MemoryError(f"weights take {num_bytes} bytes, {len(task.chunks)} chunks were granted ({granted} bytes)")
            num_threads = threads_for(num_bytes, self._options.threads)
            ops.prepare(spec.dtype, num_threads)
            weights = self._ranges.of(spec.model, (spec.fingerprint, spec.dtype), num_bytes)
            started_s = time.perf_counter()
            weights.map(task.chunks[: weights.num_chunks].tolist())
            task.map_seconds = time.perf_counter() - started_s
            try:
                if not self._copies.take(task, weights):
                    sink = HostSink(weights.buffer)
                    report = stream_weights(source, spec.dtype, sink, self._ring, task.progress, task.cancelled)
                    task.bytes_read = report.num_bytes
                    self._copies.keep(task, weights)
                if source.shape.pooling:
                    return TorchEncoder(spec, source.shape, weights, num_threads)
                return TorchModel(spec, source.shape, weights, self.memory, self._options.block_tokens, num_threads)
            except ReadCancelled as error:
                weights.unmap()
                raise LoadCancelled(str(error)) from None
            except BaseException:
                weights.unmap()
                raise
