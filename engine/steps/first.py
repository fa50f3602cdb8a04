"""The first step of a model whose weights are still coming: prompts that wait for it are computed layer by layer behind the reads.

What is more than a step may hold is computed in slices, each layer of all of them before the next. It runs in a thread of its own,
beside the steps of other models. Until it has ended the model is not among the served ones: nobody takes its blocks or preempts its
sequences, and what the daemon says of it meanwhile is put by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.contracts import BatchPlan, LoadTask, LongArray, StepResult, StreamedModel
from engine.kv_transfer import KVTransfer
from engine.loading.weight_gate import WeightGate, WeightsWithdrawn
from engine.protocol import Abort, EvictModel, Submit
from engine.served_models import ServedModel
from loader.work_space import FIRST_STEP_SLICES

NO_REQUESTS = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class FirstStep:
    """running: in its thread, from `start` until it was told of; then one of `result` and `error` is set. loaded: the weights are
    in, as the daemon knows; loaded_s: since when, by time.monotonic(). has_begun: the weights that it needs first are there, and
    what is queued by now runs in it. restoring: saved KV on its way, which has to be there before a prompt is looked up in it.
    waits_for: a load whose copy from the host tier ends before the step begins; should the copy be rejected, it runs behind what is
    read instead. put_by, and then leaves_later: messages to take in afterwards."""

    served: ServedModel
    hosted: StreamedModel
    gate: WeightGate
    plan: BatchPlan | None = None
    result: StepResult | None = None
    error: BaseException | None = None
    running: bool = False
    loaded: bool = False
    loaded_s: float = 0.0
    has_begun: bool = False
    restoring: KVTransfer | None = None
    restored_tokens: int = 0
    waits_for: LoadTask | None = None
    weight: float = 1.0  # share of the device between models
    put_by: list[Submit | Abort] = field(default_factory=list)
    leaves_later: list[EvictModel] = field(default_factory=list)

    @property
    def can_start(self) -> bool:
        is_copied = self.waits_for is not None and not self.waits_for.source_rejected
        return not self.running and not is_copied and self.served.scheduler.runnable

    def start(self, step_id: int, run: Callable[[Callable[[], None], FirstStep], None], alone: bool) -> BatchPlan | None:
        """Plans it and hands it to `run`(work, what to tell of afterwards). None if nothing can run. alone: nobody else's steps
        run, so it takes as much of the prompts as may be computed by the time the weights are there."""
        scheduler = self.served.scheduler
        plan = scheduler.plan(step_id, max_tokens=scheduler.limits.max_num_batched_tokens * (FIRST_STEP_SLICES if alone else 1))
        if plan is not None:
            self.plan, self.result, self.error, self.running = plan, None, None, True
            run(self._work, self)
        return plan

    @property
    def request_ids(self) -> LongArray:
        """Of the step under way."""
        return NO_REQUESTS if self.plan is None or not self.running else self.served.scheduler.table.request_id[self.plan.slots]

    def put_aside(self, message: Submit) -> bool:
        """Whether it has to wait until the step has ended, or the model is served."""
        wait = self.running or bool(message.params.grammar) or message.params.is_limited  # the step has no masks
        if wait:
            self.put_by.append(message)
        return wait

    def abort(self, request_id: int) -> bool:
        """False if the batch scheduler can be told at once, or does not have it."""
        for message in self.put_by:
            if isinstance(message, Submit) and message.request_id == request_id:
                self.put_by.remove(message)
                return True
        late = self.running and request_id in self.served.scheduler
        if late:
            self.put_by.append(Abort([request_id]))
        return late

    def _work(self) -> None:
        assert self.plan is not None
        try:
            scheduler = self.served.scheduler
            self.result = self.hosted.execute_behind(self.gate, self.plan, scheduler.table, scheduler.limits.max_num_batched_tokens)
        except BaseException as error:
            self.error = error

    def put_back(self) -> None:
        """After WeightsWithdrawn: its sequences wait again. Raises whatever else it ended with."""
        if not isinstance(self.error, WeightsWithdrawn):
            assert self.error is not None
            raise self.error
        while self.served.scheduler.preempt_one():
            pass
