"""The seams inside an engine: what the batch scheduler hands the runner (scheduler/batch/plan.py), and what it gets back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from engine.grammar.row_masks import RowMasks
from engine.loading.weight_gate import WeightGate
from engine.protocol import KernelsTold, LoadModel, PromptLogprobs, TokenLogprobs, WeightsHeld
from loader.kv_layout import KVGroupSpec as KVGroupSpec
from scheduler.batch.plan import BatchPlan as BatchPlan
from scheduler.batch.plan import BoolArray as BoolArray
from scheduler.batch.plan import FloatArray as FloatArray
from scheduler.batch.plan import IntArray as IntArray
from scheduler.batch.plan import LongArray as LongArray
from scheduler.batch.plan import SequenceTable as SequenceTable


@dataclass(slots=True)
class StepResult:
    """`ids[k]` is the token of the k-th sampling row of the plan (in plan order); `bad[k]` marks a row whose logits were not
    finite; both stay as they are until the model's next step. seconds: device time."""

    ids: IntArray
    bad: BoolArray
    seconds: float
    logprobs: TokenLogprobs | None = None  # of the rows that want them and are not bad
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # of the prompt tokens this step computed, where owed


@dataclass(slots=True, frozen=True)
class KernelNews:
    """told: for the daemon. apply: to be called between two steps; what steps cost changes with it."""

    told: KernelsTold
    apply: Callable[[], None] | None = None


class NoWorkSpace(Exception):
    """The device has not the memory that a step computes with. Nothing was sampled; what else is under way goes on."""


class HostedModel(Protocol):
    """A model in device memory, made by a Runner's load."""

    @property
    def name(self) -> str: ...
    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs one step: writes KV of the new tokens into the arena's blocks, samples; rows in `masks` only what it allows.
        Whatever it raises ends the process: only a new one has a device whose state is known."""
        ...

    def release(self) -> None:
        """Takes the weights' chunks out of use. The KV arena's blocks are the batch scheduler's business."""
        ...


class Launched(Protocol):
    """A step under way."""

    def wait(self) -> StepResult:
        """Its sampled ids, and its device seconds. Raises as HostedModel.execute does."""
        ...


@runtime_checkable
class CapturesSteps(Protocol):
    """A HostedModel that can make steps ready to be run again, as a graph or a program, before they are met."""

    @property
    def name(self) -> str: ...

    @property
    def num_uncaptured(self) -> int:
        """Sizes of steps that would be captured when they are first met."""
        ...

    def capture_next(self) -> None:
        """Captures one of them, in idle time: no step is under way."""
        ...


@runtime_checkable
class LaunchesAhead(CapturesSteps, Protocol):
    """A HostedModel whose next step can be started before the last one's tokens are known."""

    def launch(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> Launched:
        """Starts one step. Tokens that table.num_tokens does not count yet are those the slot's last step samples; rows in `masks`
        have none. Raises NoWorkSpace."""
        ...


class StreamedModel(HostedModel, Protocol):
    """One that can begin before its weights are there."""

    def execute_behind(self, gate: WeightGate, plan: BatchPlan, table: SequenceTable, max_tokens: int) -> StepResult:
        """As `execute`, layer by layer as the gate opens, at most max_tokens at a time; its seconds are without the waits. Raises
        WeightsWithdrawn, and then what it has written to the KV is of no use."""
        ...


@runtime_checkable
class HostedEncoder(Protocol):
    """As HostedModel, of a model that turns texts into vectors."""

    @property
    def name(self) -> str: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def embed(self, texts: Sequence[IntArray]) -> tuple[FloatArray, float]:
        """Token ids of R texts -> float32 [R, hidden], each of length 1, and the device seconds it took."""
        ...

    def release(self) -> None: ...


@dataclass(slots=True)
class LoadTask:
    """One load: what is asked, the device's chunks for the weights, `progress(bytes_done, bytes_total)` (as LoadProgress has them);
    below, what the runner says of it beside the model (protocol.LoadDone has the meanings)."""

    spec: LoadModel
    chunks: IntArray
    progress: Callable[[int, int], None]
    cancelled: Callable[[], bool]
    left: WeightsHeld | None = None  # what the chunks hold already, left by an engine before this one
    bytes_read: int = 0
    kept: bool = False
    checksum: int = 0
    copy_seconds: float = 0.0
    map_seconds: float = 0.0
    source_rejected: str = ""
    read_as: str = ""
    kernels_seconds: float = 0.0
    adopted: bool = False
    weights_bytes: int = 0  # from the first chunk's beginning on; 0: there are none that another engine could take over
    weights_checksum: int = 0  # of them, where it is known
    # Called once where a model can run its first step behind the weights; the caller opens the gate after the load.
    begun: Callable[[StreamedModel, WeightGate], None] | None = None


class Runner(Protocol):
    """Makes hosted models on one device. TorchRunner and NullRunner are the two implementations."""

    def load(self, task: LoadTask) -> HostedModel | HostedEncoder:
        """Runs in a loader thread while other models step. Raises loader.errors.CheckpointError (permanent, names file and tensor),
        MemoryError or LoadCancelled; the chunks are unused again then."""
        ...


@runtime_checkable
class CompilesKernels(Protocol):
    """A Runner whose kernels may not be there yet when it serves its first models."""

    def watch_kernels(self, tell: Callable[[KernelNews], None]) -> None:
        """From here on `tell` is called, from other threads, with what becomes of them."""
        ...


class LoadCancelled(Exception):
    """The engine withdrew a load that was under way."""
