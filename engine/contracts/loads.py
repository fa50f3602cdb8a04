"""The interface between a model's life in an engine and what loads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from engine.contracts.steps import HostedEncoder, HostedModel, StreamedModel
from engine.memory.weight_gate import WeightGate
from engine.protocol import KernelsTold, LoadModel, WeightsHeld
from scheduler.batch.plan import IntArray


@dataclass(slots=True, frozen=True)
class KernelNews:
    """News about the compilation of kernels. told: the message for the daemon. apply: to be called between two steps, after which
    steps cost something else; None: there is nothing to call."""

    told: KernelsTold
    apply: Callable[[], None] | None = None


@dataclass(slots=True)
class LoadTask:
    """One load: what is asked for, the device's chunks for the weights, and `progress(bytes_done, bytes_total)`, with the meanings
    of LoadProgress. The fields from bytes_read to weights_checksum are results, set by the runner; protocol.LoadDone explains the
    fields it shares."""

    spec: LoadModel
    chunks: IntArray
    progress: Callable[[int, int], None]
    cancelled: Callable[[], bool]
    left: WeightsHeld | None = None  # the weights that an earlier engine left in the chunks
    kv_chunks: IntArray | None = None  # of a share of a split model: those of its KV, which the runner maps
    bytes_read: int = 0
    kept: bool = False
    checksum: int = 0
    copy_seconds: float = 0.0
    map_seconds: float = 0.0
    source_rejected: str = ""
    read_as: str = ""
    kernels_seconds: float = 0.0
    adopted: bool = False
    weights_bytes: int = 0  # from the beginning of the first chunk; 0: nothing that another engine could take over
    weights_checksum: int = 0  # of those weights; 0: not known yet
    # Called once, if the model can run its first step while its weights arrive; the caller opens the gate after the load.
    begun: Callable[[StreamedModel, WeightGate], None] | None = None


class Runner(Protocol):
    """Loads models onto one device. There are two: TorchRunner for models that compute, NullRunner for null models (tests)."""

    @property
    def compute_threads(self) -> int:
        """Threads of the host that compute the steps of a large model; 1 unless the host computes them."""
        ...

    def load(self, task: LoadTask) -> HostedModel | HostedEncoder:
        """Loads one model, in a loader thread while other models step; if spec.group is given, it is a GroupShare. Raises
        loader.errors.CheckpointError (permanent, names file and tensor), MemoryError or LoadCancelled; the chunks are then unused
        again."""
        ...

    def probe(self, number: int) -> None:
        """Has the device compute a token that follows from `number`, behind all that runs on it, and waits for it. Raises what the
        device raises, and RuntimeError if the token is wrong."""
        ...


@runtime_checkable
class CompilesKernels(Protocol):
    """A Runner whose kernels may still be compiling when it serves its first models."""

    def watch_kernels(self, tell: Callable[[KernelNews], None]) -> None:
        """Calls `tell`, from other threads, with all news about the kernels from now on."""
        ...


class LoadCancelled(Exception):
    """Raised by a load that the engine withdrew while it was under way."""
