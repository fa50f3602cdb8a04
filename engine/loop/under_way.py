"""Holds a step that was launched and whose result has not been read yet."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts.steps import Launched
from engine.grammar.row_masks import RowMasks
from engine.loop.group_steps import PostedStep
from engine.serve.served_models import ServedModel
from scheduler.batch.plan import BatchPlan, LongArray


@dataclass(slots=True, frozen=True)
class StepUnderWay:
    """A launched step whose result has not been read.
    request_ids [R]: the requests of the plan's R rows at the time of the launch.
    masks: for the rows with a grammar or token limits, the tokens that they may sample; None: there are no such rows.
    expected_s: the seconds that the step usually takes; 0.0 if that is not known."""

    served: ServedModel
    plan: BatchPlan
    masks: RowMasks | None
    launched: Launched
    request_ids: LongArray
    expected_s: float

    @property
    def waits(self) -> bool:
        """Returns whether this device cannot compute its part of the step yet, because another stage of a pipeline, or another step
        in the engine's queue, comes first."""
        return isinstance(self.launched, PostedStep) and self.launched.waits
