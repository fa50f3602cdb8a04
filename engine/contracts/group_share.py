"""Defines the share of a split model that one of the model's engines holds (tensor or pipeline parallelism). Runner.load makes
it."""

from __future__ import annotations

from collections.abc import Callable

from engine.contracts.adapters import AdapterMemory
from engine.contracts.steps import CapturesSteps, CountsExperts, SplitModel, StepResult
from engine.grammar.row_masks import RowMasks
from engine.memory.group_region import GroupRegion
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.plan import BatchPlan, SequenceTable


class GroupShare:
    """One engine's share of a model that is split over several devices. The engine uses it like a HostedModel; other engines hold
    the other shares. hosted: the model's part on this device. region: the shared memory of the engines that hold the model's
    shares. unmap_kv: unmaps the chunks of this share's KV; called by `release`."""

    embeds = False
    adapter_memory: AdapterMemory | None = None

    def __init__(self, hosted: SplitModel, region: GroupRegion, unmap_kv: Callable[[], None] = lambda: None) -> None:
        self.hosted, self.region, self._unmap_kv = hosted, region, unmap_kv
        self._num_executed = 0  # steps that `execute` has begun
        self.is_broken = False  # True once this engine has seen that the group is broken; it then runs no more steps of it

    @property
    def name(self) -> str:
        return self.hosted.name

    @property
    def leads(self) -> bool:
        return self.region.rank == 0

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages into which the model's layers are divided; 1: they are not divided. At most that many steps
        may be under way at a time, each with other sequences."""
        return self.region.num_stages

    @property
    def has_sequences(self) -> bool:
        """Returns whether any sequence of the model is running. False once the model is broken, because one of its devices was lost
        or one of its engines has left."""
        return not self.region.is_broken and bool(self.region.table.request_id.any())

    @property
    def waits_for_stage(self) -> bool:
        """Returns whether the next call of `execute`, on the engine of rank 0, would wait for hidden states from the previous
        pipeline stage. False if the model has only one stage, or once it is broken (has lost a device)."""
        link = self.region.link
        return link is not None and link.num_come <= self._num_executed and not self.region.is_broken

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self.hosted.kv_groups

    @property
    def weights_bytes(self) -> int:
        return self.hosted.weights_bytes

    @property
    def expert_counts(self) -> CountsExperts | None:
        return self.hosted.expert_counts

    @property
    def vocab_size(self) -> int:
        return self.hosted.vocab_size

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs this engine's part of a step that it leads (as rank 0 of the split model), and returns the step's result. The caller
        has already posted the step to the model's other engines. masks: for rows with a grammar or limits by token id, the tokens
        that they may sample; all other rows may sample any token. Raises GroupBroken if a device of the split model has been
        lost."""
        self._num_executed += 1
        return self.hosted.execute(plan, table, masks)

    def follow(self, plan: BatchPlan) -> None:
        """Starts this engine's part of a step of the split model that another engine, rank 0, leads. plan: rank 0's plan, as read
        from the shared memory. Raises GroupBroken if a device of the split model has been lost."""
        self.hosted.follow(plan, self.region.table)

    def has_ended(self) -> bool:
        """Returns, without waiting, whether the device has ended all steps that `follow` has started. Raises an error that the
        device reports."""
        return self.hosted.has_ended()

    @property
    def num_uncaptured(self) -> int:
        return self.hosted.num_uncaptured if isinstance(self.hosted, CapturesSteps) else 0

    def capture_next(self) -> None:
        if isinstance(self.hosted, CapturesSteps):
            self.hosted.capture_next()

    def release(self) -> None:
        """Ends this engine's part in the split model, so that none of the model's engines can run it any more, and unmaps this
        share's weights and KV."""
        self.region.leave()
        self.hosted.release()
        self._unmap_kv()
