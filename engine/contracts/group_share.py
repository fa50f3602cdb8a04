"""Defines one rank's share of a model that is split over several devices. A runner makes it."""

from __future__ import annotations

from collections.abc import Callable

from engine.contracts.adapters import AdapterMemory
from engine.contracts.steps import CapturesSteps, SplitModel, StepResult
from engine.grammar.row_masks import RowMasks
from engine.memory.group_region import GroupRegion
from loader.kv_layout import KVGroupSpec
from scheduler.batch.plan import BatchPlan, SequenceTable


class GroupShare:
    """A HostedModel of which other engines hold the other shares. region: the memory that all of them have in common. unmap_kv:
    unmaps the chunks of this share's KV."""

    embeds = False
    adapter_memory: AdapterMemory | None = None

    def __init__(self, hosted: SplitModel, region: GroupRegion, unmap_kv: Callable[[], None] = lambda: None) -> None:
        self.hosted, self.region, self._unmap_kv = hosted, region, unmap_kv
        self.is_broken = False  # True once this engine has seen that the group is broken; it then runs no more steps of it

    @property
    def name(self) -> str:
        return self.hosted.name

    @property
    def leads(self) -> bool:
        return self.region.rank == 0

    @property
    def num_stages(self) -> int:
        """Number of stages into which the model's layers are divided. As many steps, of different sequences, are under way at a
        time."""
        return self.region.num_stages

    @property
    def kv_groups(self) -> tuple[KVGroupSpec, ...]:
        return self.hosted.kv_groups

    @property
    def weights_bytes(self) -> int:
        return self.hosted.weights_bytes

    @property
    def vocab_size(self) -> int:
        return self.hosted.vocab_size

    def execute(self, plan: BatchPlan, table: SequenceTable, masks: RowMasks | None = None) -> StepResult:
        """Runs the leader's part of a step that was posted. Raises GroupBroken."""
        return self.hosted.execute(plan, table, masks)

    def follow(self, plan: BatchPlan) -> None:
        """Runs this rank's part of a step. Raises GroupBroken."""
        self.hosted.follow(plan, self.region.table)

    @property
    def num_uncaptured(self) -> int:
        return self.hosted.num_uncaptured if isinstance(self.hosted, CapturesSteps) else 0

    def capture_next(self) -> None:
        if isinstance(self.hosted, CapturesSteps):
            self.hosted.capture_next()

    def release(self) -> None:
        """Leaves the group, which breaks it, and unmaps weights and KV."""
        self.region.leave()
        self.hosted.release()
        self._unmap_kv()
