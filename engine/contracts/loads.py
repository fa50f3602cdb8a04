"""Defines the interface between the code that keeps track of an engine's models, from load to eviction, and the code that loads a
model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from engine.contracts.steps import HostedEncoder, HostedModel, StreamedModel
from engine.grammar.row_masks import LockedMasks
from engine.memory.weight_gate import WeightGate
from engine.protocol import KernelsTold, LoadModel, WeightsHeld
from scheduler.batch.plan import IntArray


@dataclass(slots=True, frozen=True)
class KernelNews:
    """News about the compilation of kernels. told: the message to send to the daemon. apply: a function that the engine calls
    between two steps, because it changes which kernels steps use and so how long they take; None: no kernel changes."""

    told: KernelsTold
    apply: Callable[[], None] | None = None


@dataclass(slots=True)
class LoadTask:
    """One load of a model: what it is given, and its results.

    spec: the model. chunks: the device's chunks for the weights.
    progress(bytes_done, bytes_total): called with the values of LoadProgress while the load runs.
    cancelled(): asked again and again; once it returns True, the load raises LoadCancelled.
    The fields from bytes_read to weights_checksum are results, which Runner.load sets; protocol.LoadDone explains those that it
    shares."""

    spec: LoadModel
    chunks: IntArray
    progress: Callable[[int, int], None]
    cancelled: Callable[[], bool]
    left: WeightsHeld | None = None  # the weights that were left in the chunks
    kv_chunks: IntArray | None = None  # for a share of a split model: the chunks of its KV, which the runner maps
    bytes_read: int = 0
    kept: bool = False
    checksum: int = 0
    copy_seconds: float = 0.0
    map_seconds: float = 0.0
    source_rejected: str = ""
    read_as: str = ""
    kernels_seconds: float = 0.0
    adopted: bool = False
    weights_bytes: int = 0  # bytes of weights from the beginning of the first chunk; 0: none that could be taken over
    weights_checksum: int = 0  # checksum of these bytes; 0: not known yet
    # Called once, if the model can run its first step while its weights arrive; the caller opens the gate after the load.
    begun: Callable[[StreamedModel, WeightGate], None] | None = None


class LocksMasks(Protocol):
    """Registers memory with token masks at a device's driver (page-locks it), so that the device copies masks from there by
    itself."""

    def lock_masks(self, bits: npt.NDArray[np.uint32]) -> LockedMasks | None:
        """Registers the memory of `bits`, M masks [M, W] of W words, which begins at a page boundary. Returns the registered masks,
        or None if the device cannot copy from the host by itself or its driver refuses; a refusal is logged. Called by the thread
        that runs steps."""
        ...

    def unlock_masks(self, locked: LockedMasks) -> None:
        """Ends the registration of masks, and returns without waiting. The device may still copy the memory for steps that were
        launched before, so it stays mapped until these have ended; later steps must not use it. Called by the thread that runs
        steps."""
        ...


class Runner(LocksMasks, Protocol):
    """The part of an engine that loads models onto its device. There are two implementations: TorchRunner for models that compute,
    NullRunner for null models (tests)."""

    @property
    def compute_threads(self) -> int:
        """The number of host threads that compute the steps of a large model; 1 if the device computes steps instead of the
        host."""
        ...

    def load(self, task: LoadTask) -> HostedModel | HostedEncoder:
        """Loads one model and returns it; the result is a GroupShare if task.spec.group is given. Called in a loader thread, while
        other models run steps. Raises CheckpointError (loader.errors; permanent, names the file and tensor), MemoryError,
        LoadCancelled, or GroupBroken if the group loses a device meanwhile. After an error the load no longer uses the task's
        chunks."""
        ...

    def probe(self, number: int) -> None:
        """Tests whether the device still computes: has it compute a token that depends only on `number`, behind all work that it
        already has, waits for the token, and compares it with the right one. Raises the device's errors, and RuntimeError if the
        token is wrong."""
        ...


@runtime_checkable
class CompilesKernels(Protocol):
    """A Runner whose kernels may still be compiling when it serves its first models."""

    def watch_kernels(self, tell: Callable[[KernelNews], None]) -> None:
        """Registers `tell`, to be called with all news about the compilation of kernels: at once with earlier news, and from other
        threads with later news."""
        ...


class LoadCancelled(Exception):
    """Raised by Runner.load when the engine has cancelled the load (LoadTask.cancelled)."""
