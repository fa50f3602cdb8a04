"""Defines the interface between the batch scheduler and the models in an engine: how a step that is planned
(scheduler/batch/plan.py) is run, and what it returns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from engine.contracts.adapters import AdapterMemory
from engine.grammar.row_masks import RowMasks
from engine.memory.weight_gate import WeightGate
from engine.protocol import PromptLogprobs, TokenLogprobs
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.plan import BatchPlan, BoolArray, FloatArray, IntArray, LongArray, SequenceTable


@dataclass(slots=True, frozen=True)
class Proposed:
    """The tokens that a model's predictor drafted after a step, for Q sequences.

    slots [Q]: the sequences' slots. counts [Q]: how many tokens were to be drafted for each sequence.
    tokens [Q, K]: the drafted tokens; of row q only the first counts[q] are valid, and K is at least the largest count.
    seen_s: device seconds that the predictor took to read the step's tokens and hidden states. drafting_s: device seconds that it
    took to draft tokens."""

    slots: IntArray
    counts: IntArray
    tokens: IntArray
    seen_s: float
    drafting_s: float


@dataclass(slots=True)
class StepResult:
    """The result of one step.

    ids [N]: the token of each of the plan's N sampling rows, in plan order. bad [N]: whether the row's logits (of an embedding
    model: its vector) had values that are not finite, so that its result is worthless. Both arrays stay unchanged until the model's
    next step.
    seconds: device seconds of the step. waited_s: the part of `seconds` that passed until the other devices of a split model had
    begun the step."""

    ids: IntArray
    bad: BoolArray
    seconds: float
    waited_s: float = 0.0
    logprobs: TokenLogprobs | None = None  # for the rows that asked for them and are not bad
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)  # for prompt tokens that this step computed, if wanted
    proposed: Proposed | None = None  # drafts of the predictor, whose time is not in `seconds`; None: it did not see the step
    vectors: FloatArray | None = None  # [N, hidden], the result of a model that embeds; ids then mean nothing


class CountsExperts(Protocol):
    """Counts how many tokens each expert of a model has computed, for the experts on one device. A token counts once for each
    expert that computes it."""

    @property
    def layers(self) -> Sequence[int]:
        """The indices of the layers with experts that this device computes. If the predictor's layer has experts, its index is one
        more than that of the model's last layer."""
        ...

    @property
    def num_experts(self) -> int:
        """The number of experts in each layer, on all devices together."""
        ...

    @property
    def own(self) -> range:
        """The indices, within a layer, of the experts that `news` reports: those that this device computes."""
        ...

    def news(self, wait: bool) -> LongArray | None:
        """Returns how many tokens each expert has computed since the last call that returned an array: [len(layers), len(own)], for
        each of `layers` and, within it, each expert of `own`. Returns None if there were no such tokens; if `wait` is False, also
        if the device has not reported its counts yet. Called by the thread that runs steps."""
        ...


class NoWorkSpace(Exception):
    """Raised when the device lacks the memory to compute a step. No token was sampled; only the requests of this step fail."""


class HostedModel(Protocol):
    """A decoder with its weights in device memory: a model that generates tokens, or an embedding model. Made by Runner.load."""

    @property
    def name(self) -> str: ...
    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def embeds(self) -> bool:
        """Returns whether the model is an embedding model, which computes a vector for each sampling row (StepResult.vectors)
        instead of a token."""
        ...

    @property
    def adapter_memory(self) -> AdapterMemory | None:
        """The tables of the model's LoRA adapters, indexed by the numbers in SequenceTable.adapter. None if the model takes no
        adapters."""
        ...

    @property
    def expert_counts(self) -> CountsExperts | None:
        """The counts of the tokens that each of the model's experts has computed. None if the model has no experts, or if another
        device of a split model counts them."""
        ...

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs one step and returns its result: writes the KV of the new tokens into the arena's blocks, and samples. masks: for
        rows with a grammar or limits by token id, the tokens that they may sample; all other rows may sample any token. Raises
        NoWorkSpace, and GroupBroken if the model is split and one of its devices has been lost. Any other exception ends the
        process, because only a new process has a device in a known state."""
        ...

    def release(self) -> None:
        """Unmaps the weights' chunks. The KV blocks in the arena belong to the batch scheduler and are left alone."""
        ...


class SplitModel(HostedModel, Protocol):
    """A HostedModel that is one device's share of a model (tensor or pipeline parallelism). Each device of the model is called a
    rank, and runs its part of every step with the KV of its own heads and layers: rank 0 by `execute`, which returns the result,
    all others by `follow`. Both methods wait for other ranks, and raise GroupBroken if a device of the model has been lost."""

    def follow(self, plan: BatchPlan, table: SequenceTable) -> None:
        """Runs, or only starts, this rank's part of a step that rank 0 leads. table: rank 0's sequence table. It is read until the
        ranks' last exchange in this step; from then on rank 0 may change it."""
        ...

    def has_ended(self) -> bool:
        """Returns, without waiting, whether this rank's device has ended all steps that `follow` has started, some of which may run
        on after `follow` has returned. Raises an error of the device, which would otherwise be reported only by the next step."""
        ...


class Launched(Protocol):
    """A step that was started (LaunchesAhead.launch) and may still be running on the device."""

    def wait(self) -> StepResult:
        """Waits for the step and returns its result. Raises NoWorkSpace, and GroupBroken if the model is split and one of its
        devices has been lost."""
        ...


@runtime_checkable
class CapturesSteps(Protocol):
    """A HostedModel that can capture steps of a given size, as a CUDA graph or a recorded program that runs again for later steps
    of this size, before a step of the size is needed."""

    @property
    def name(self) -> str: ...

    @property
    def num_uncaptured(self) -> int:
        """The number of step sizes that are not captured yet. A size is captured when a step first needs it, or earlier by
        `capture_next`."""
        ...

    def capture_next(self) -> None:
        """Captures a step of one of the sizes that num_uncaptured counts. Called only while no step is under way."""
        ...


@runtime_checkable
class LaunchesAhead(CapturesSteps, Protocol):
    """A HostedModel whose next step can be started before the tokens of its last step are known."""

    def launch(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> Launched:
        """Starts one step and returns while it may still be running. The first token of a row may be one that the host does not
        know yet (its index is beyond table.num_tokens); the device then takes the token that the last launched step samples for the
        row's slot. For rows in `masks` the host must know all tokens. Raises NoWorkSpace."""
        ...


class StreamedModel(HostedModel, Protocol):
    """A HostedModel whose first step can begin before its weights have arrived."""

    def execute_behind(self, gate: WeightGate, plan: BatchPlan, table: SequenceTable, max_tokens: int) -> StepResult:
        """Runs a step while the model's weights are still arriving, and returns its result as `execute` does without masks. Each
        layer is computed once `gate` reports that the layer's weights have arrived, for at most max_tokens tokens at a time. The
        result's `seconds` do not include waiting for weights. Raises WeightsWithdrawn if the load fails, is cancelled or starts
        over; the KV written by the step is then worthless."""
        ...


@runtime_checkable
class HostedEncoder(Protocol):
    """An encoder, with its weights in device memory: an embedding model that turns texts into vectors, or a cross-encoder that
    turns pairs of texts into scores. task: EMBED or SCORE of engine.protocol."""

    @property
    def name(self) -> str: ...
    @property
    def weights_bytes(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def task(self) -> str: ...

    def embed(self, texts: Sequence[IntArray], second_at: Sequence[int]) -> tuple[FloatArray, float]:
        """Returns the results for R texts, and the device seconds they took. For task EMBED these are vectors, float32 [R, hidden],
        each of norm 1; for task SCORE the scores of R pairs of texts, float32 [R, 1]. texts: the token ids of each text or pair.
        second_at: for each text or pair, the index of the first token of the second text's segment; 0: there is one segment."""
        ...

    def release(self) -> None: ...
