"""The interfaces inside an engine: what the batch scheduler hands to the models (scheduler/batch/plan.py), and what it gets
back.
"""

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
    """The result of one step. ids[k] is the token of the plan's k-th sampling row, in plan order; bad[k] marks a row whose logits
    were not finite. Both stay unchanged until the model's next step. seconds: device time."""

    ids: IntArray
    bad: BoolArray
    seconds: float
    logprobs: TokenLogprobs | None = None  # of the rows that asked for them and are not bad
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # of prompt tokens that this step computed, if wanted


@dataclass(slots=True, frozen=True)
class KernelNews:
    """News about the compilation of kernels. told: the message for the daemon. apply: to be called between two steps, after which
    steps cost something else; None: there is nothing to call."""

    told: KernelsTold
    apply: Callable[[], None] | None = None


class NoWorkSpace(Exception):
    """Raised when the device lacks the memory to compute a step. Nothing was sampled, and everything else under way goes on."""


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
        """Runs one step: writes the KV of the new tokens into the arena's blocks and samples; rows in `masks` sample only what
        their mask allows. Any exception ends the process, because only a new process has a device in a known state."""
        ...

    def release(self) -> None:
        """Takes the weights' chunks out of use. The KV arena's blocks belong to the batch scheduler and are left alone."""
        ...


class Launched(Protocol):
    """A step that has been launched and may still be running."""

    def wait(self) -> StepResult:
        """Waits for the step and returns its result. Raises as HostedModel.execute does."""
        ...


@runtime_checkable
class CapturesSteps(Protocol):
    """A HostedModel that can capture steps of a given size, as a graph or a program to be run again, before such a step is
    needed."""

    @property
    def name(self) -> str: ...

    @property
    def num_uncaptured(self) -> int:
        """The number of step sizes that are not captured yet; a size is captured when it first occurs, if not before."""
        ...

    def capture_next(self) -> None:
        """Captures one of these sizes. Called only while no step is under way."""
        ...


@runtime_checkable
class LaunchesAhead(CapturesSteps, Protocol):
    """A HostedModel whose next step can be started before the tokens of its last step are known."""

    def launch(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> Launched:
        """Starts one step. A token that table.num_tokens does not count yet is the one its slot's last step samples; rows in
        `masks` have no such tokens. Raises NoWorkSpace."""
        ...


class StreamedModel(HostedModel, Protocol):
    """A HostedModel whose first step can begin before its weights have arrived."""

    def execute_behind(self, gate: WeightGate, plan: BatchPlan, table: SequenceTable, max_tokens: int) -> StepResult:
        """Runs a step as `execute` does, layer by layer as the gate opens, at most max_tokens tokens at a time. The result's
        seconds do not include the waits. Raises WeightsWithdrawn; the KV written until then is worthless."""
        ...


@runtime_checkable
class HostedEncoder(Protocol):
    """The counterpart of HostedModel for a model that turns texts into vectors."""

    @property
    def name(self) -> str: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...

    def embed(self, texts: Sequence[IntArray]) -> tuple[FloatArray, float]:
        """Returns the vectors of R texts, given as token ids: float32 [R, hidden], each of norm 1; and the device seconds it
        took."""
        ...

    def release(self) -> None: ...


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
    """Makes hosted models on one device. TorchRunner and NullRunner are the two implementations."""

    def load(self, task: LoadTask) -> HostedModel | HostedEncoder:
        """Loads one model, in a loader thread while other models step. Raises loader.errors.CheckpointError (permanent, names
        file and tensor), MemoryError or LoadCancelled; the chunks are then unused again."""
        ...


@runtime_checkable
class CompilesKernels(Protocol):
    """A Runner whose kernels may still be compiling when it serves its first models."""

    def watch_kernels(self, tell: Callable[[KernelNews], None]) -> None:
        """Calls `tell`, from other threads, with all news about the kernels from now on."""
        ...


class LoadCancelled(Exception):
    """Raised by a load that the engine withdrew while it was under way."""
