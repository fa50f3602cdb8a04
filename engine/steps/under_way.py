"""A step that was launched and whose tokens nobody has read."""

from __future__ import annotations

from dataclasses import dataclass

from engine.contracts import BatchPlan, Launched, LongArray
from engine.grammar.row_masks import RowMasks
from engine.served_models import ServedModel


@dataclass(slots=True, frozen=True)
class StepUnderWay:
    """request_ids [R]: of the plan's rows, as they were at the launch. expected_s: what it usually takes, 0.0 where that is not
    known."""

    served: ServedModel
    plan: BatchPlan
    masks: RowMasks | None
    launched: Launched
    request_ids: LongArray
    expected_s: float
