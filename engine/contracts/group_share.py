"""Defines the share of a split model that one engine of a group holds. A Runner's load makes it."""

from __future__ import annotations

from collections.abc import Callable

from engine.contracts.adapters import AdapterMemory
from engine.contracts.steps import CapturesSteps, CountsExperts, SplitModel, StepResult
from engine.grammar.row_masks import RowMasks
from engine.memory.group_region import GroupRegion
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.plan import BatchPlan, SequenceTable


class GroupShare:
    """One engine's share of a model that is split over several devices. It can be used like a HostedModel; other engines hold the
    other shares. hosted: this share. region: the exchange memory that the engines of all shares have in common. unmap_kv: called by
    `release`; unmaps the chunks of this share's KV."""

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
        """Number of stages into which the model's layers are divided; 1: they are not divided. As many steps, of different
        sequences, may be under way at a time."""
        return self.region.num_stages

    @property
    def has_sequences(self) -> bool:
        """Returns whether sequences of the model run, whichever engine leads them; False for a broken group."""
        return not self.region.is_broken and bool(self.region.table.request_id.any())

    @property
    def waits_for_stage(self) -> bool:
        """Returns whether the next step that the leader runs (`execute`) would wait for the states of the stage before; False where
        there is one stage, and once the group is broken."""
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
        """Runs the leader's part of a step that it has posted to the group, and returns the result of the step. masks: as in
        HostedModel.execute. Raises GroupBroken if the group has lost a device."""
        self._num_executed += 1
        return self.hosted.execute(plan, table, masks)

    def follow(self, plan: BatchPlan) -> None:
        """Runs this engine's part of a step that another engine leads. plan: the leader's plan, as read from the region. Raises
        GroupBroken if the group has lost a device."""
        self.hosted.follow(plan, self.region.table)

    def has_ended(self) -> bool:
        """Returns whether the device has ended all steps that `follow` has started. Does not wait. Raises the device's error."""
        return self.hosted.has_ended()

    @property
    def num_uncaptured(self) -> int:
        return self.hosted.num_uncaptured if isinstance(self.hosted, CapturesSteps) else 0

    def capture_next(self) -> None:
        if isinstance(self.hosted, CapturesSteps):
            self.hosted.capture_next()

    def release(self) -> None:
        """Leaves the group, which breaks it for all members, and unmaps this share's weights and KV."""
        self.region.leave()
        self.hosted.release()
        self._unmap_kv()
