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
    """News about the compilation of kernels. told: the message to send to the daemon. apply: puts newly compiled kernels into use;
    called by the engine between two steps, because later steps use other kernels and take another time; None: steps use the same
    kernels as before."""

    told: KernelsTold
    apply: Callable[[], None] | None = None


@dataclass(slots=True)
class LoadTask:
    """One load of a model: its parameters and its results.

    spec: the model. chunks: the device's chunks for the weights.
    progress(bytes_done, bytes_total): called while the load runs, with the bytes that are done so far and the bytes of the whole
    load; a bytes_total of 0 means that the load is waiting for kernels to be compiled.
    cancelled(): returns whether the load was cancelled. The load calls it repeatedly, and raises LoadCancelled once it returns
    True.
    bytes_read to weights_checksum: results (bytes, seconds, checksums), set by Runner.load; those that are fields of
    protocol.LoadDone, too, are explained there."""

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
    """Registers memory that holds masks (one bit for each token of the vocabulary: whether it may be sampled) with a device's
    driver. This page-locks the memory, so that the device can copy the masks without the host's help."""

    def lock_masks(self, bits: npt.NDArray[np.uint32]) -> LockedMasks | None:
        """Registers the memory of M masks, `bits` [M, W], W words each; it begins at a page boundary. Returns the registered masks,
        or None if the device cannot copy from host memory by itself or if its driver refuses; a refusal is logged. Called by the
        thread that runs steps."""
        ...

    def unlock_masks(self, locked: LockedMasks) -> None:
        """Ends the registration of masks, without waiting for steps that were launched before. The device may still copy the memory
        for these steps, so the memory must stay mapped until they have ended. Later steps must not use it. Called by the thread
        that runs steps."""
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
        other models run steps. Raises CheckpointError (loader.errors; names the file and tensor that are at fault), MemoryError,
        LoadCancelled, or GroupBroken if a device of the split model is lost meanwhile. After an error the load no longer uses the
        task's chunks."""
        ...

    def probe(self, number: int) -> None:
        """Tests whether the device still computes correctly: makes it compute a token that depends only on `number`, after all work
        that is already queued on the device, waits for the token and checks it. Raises the device's errors, and RuntimeError if the
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
