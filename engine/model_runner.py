"""TorchRunner: brings checkpoints into this process and makes models of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack

from engine import ops
from engine.contracts import LoadCancelled
from engine.device import threads_for
from engine.hosted_encoder import TorchEncoder
from engine.hosted_model import TorchModel
from engine.memory.arena import KVArena
from engine.memory.weight_range import WeightRange
from engine.protocol import Configure, LoadModel
from loader import sizing
from loader.weight_stream import ReadCancelled, open_checkpoint, stream_weights


class TorchRunner:
    """engine.contracts.Runner on torch. The kernels of Configure.dtypes are compiled (once per machine) in the background from the
    start; loads wait for them."""

    def __init__(self, arena: KVArena, options: Configure) -> None:
        self._arena, self._options = arena, options
        self._failure: BaseException | None = None
        self._kernels = threading.Thread(target=self._prepare_kernels, name="kernels", daemon=True)
        self._kernels.start()

    def _prepare_kernels(self) -> None:
        try:
            ops.configure(self._options.cache_dir)
            for dtype in self._options.dtypes:
                ops.prepare(dtype, 1)
        except BaseException as error:  # told to every load; silence would leave the engine on the slow path
            self._failure = error

    def load(
        self, spec: LoadModel, progress: Callable[[int, int], None], cancelled: Callable[[], bool]
    ) -> TorchModel | TorchEncoder:
        """Runs beside steps of other models. Raises CheckpointError (permanent), CheckpointChanged, MemoryError, LoadCancelled."""
        self._kernels.join()
        if self._failure is not None:
            raise RuntimeError(f"kernels: {self._failure}") from self._failure
        with ExitStack() as stack:
            source = open_checkpoint(spec.path, spec.fingerprint, stack)
            num_bytes = sizing.weights_bytes(source.shape, spec.dtype)
            granted = spec.weights_chunks * self._options.chunk_bytes
            if num_bytes > granted:
                raise MemoryError(f"weights take {num_bytes} bytes, {spec.weights_chunks} chunks were granted ({granted} bytes)")
            num_threads = threads_for(num_bytes, self._options.threads)
            ops.prepare(spec.dtype, num_threads)
            memory = WeightRange(num_bytes)
            try:
                with memory.buffer as buffer:
                    stream_weights(source, spec.dtype, buffer, progress, cancelled)
                if source.shape.pooling:
                    return TorchEncoder(spec, source.shape, memory, num_threads)
                return TorchModel(
                    spec,
                    source.shape,
                    memory,
                    self._arena,
                    self._options.block_tokens,
                    num_threads,
                )
            except ReadCancelled as error:
                memory.release()
                raise LoadCancelled(str(error)) from None
            except BaseException:
                memory.release()
                raise
