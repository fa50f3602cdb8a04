"""The first step of a model whose weights are still being loaded. Prompts that wait for the model are computed layer by layer, each
layer as soon as its weights are read.

A step larger than usual is computed in slices of its tokens: all slices of one layer before the next layer. The step runs in a
thread of its own, while other models' steps run. Until it has ended, the model does not count as served: its blocks are not taken,
its sequences are not preempted, and messages from the daemon about it are deferred."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from engine.contracts.loads import LoadTask
from engine.contracts.steps import StepResult, StreamedModel
from engine.memory.weight_gate import WeightGate, WeightsWithdrawn
from engine.protocol import Abort, Submit
from engine.serve.served_models import ServedModel
from loader.sizes.work_space import FIRST_STEP_SLICES
from scheduler.batch.plan import BatchPlan, LongArray

NO_REQUESTS = np.zeros(0, np.int64)


@dataclass(slots=True, eq=False)
class FirstStep:
    """The first step of one model, and the state of the load during which it runs.

    plan, result, error: those of the step; at its end either `result` or `error` is set.
    running: the step runs in its thread, or it has ended and the engine's loop has not processed its end yet.
    loaded, loaded_s: whether all weights are loaded and the daemon has been informed, and when, by time.monotonic().
    has_begun: the weights that the step needs first are loaded.
    restored_tokens: how many tokens of saved KV were restored.
    waits_for: a load from the host tier, during which the step must not start. If the copy in the host tier is rejected, the step
    may start after all, since the weights are then read from disk.
    deferred: messages to process when the step has ended."""

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
    restored_tokens: int = 0
    waits_for: LoadTask | None = None
    weight: float = 1.0  # the model's share of the device's time
    deferred: list[Submit | Abort] = field(default_factory=list)

    @property
    def can_start(self) -> bool:
        """Returns whether the step may start now and has requests to run."""
        is_copied = self.waits_for is not None and not self.waits_for.source_rejected
        return not self.running and not is_copied and self.served.scheduler.runnable

    def start(self, step_id: int, run: Callable[[Callable[[], None], FirstStep], None], alone: bool) -> BatchPlan | None:
        """Plans the step, calls `run` and returns the plan; None if there is nothing to compute. `run` gets the function to call in
        a thread, and this object, which it reports to the engine's loop when the function has returned. alone: no other model's
        steps run, so the step takes as many prompt tokens as can be computed by the time the weights are loaded."""
        scheduler = self.served.scheduler
        plan = scheduler.plan(step_id, max_tokens=scheduler.limits.max_num_batched_tokens * (FIRST_STEP_SLICES if alone else 1))
        if plan is not None:
            self.plan, self.result, self.error, self.running = plan, None, None, True
            run(self._work, self)
        return plan

    @property
    def request_ids(self) -> LongArray:
        """The requests of the step that is running, empty if none is."""
        return NO_REQUESTS if self.plan is None or not self.running else self.served.scheduler.table.request_id[self.plan.slots]

    def put_aside(self, message: Submit) -> bool:
        """Defers a request if it cannot be in this step, because the step runs already or the request needs masks, which this step
        does not apply. Returns whether the request was deferred."""
        wait = self.running or message.params.is_constrained  # this step applies no masks
        if wait:
            self.deferred.append(message)
        return wait

    def abort(self, request_id: int) -> bool:
        """Aborts a request if it is deferred or in the running step, and returns whether it is one of these. A deferred request is
        dropped; for one in the running step, the abort is deferred. False: the caller must pass the abort to the batch
        scheduler."""
        for message in self.deferred:
            if isinstance(message, Submit) and message.request_id == request_id:
                self.deferred.remove(message)
                return True
        late = self.running and request_id in self.served.scheduler
        if late:
            self.deferred.append(Abort([request_id]))
        return late

    def _work(self) -> None:
        assert self.plan is not None
        try:
            scheduler = self.served.scheduler
            self.result = self.hosted.execute_behind(self.gate, self.plan, scheduler.table, scheduler.limits.max_num_batched_tokens)
        except BaseException as error:
            self.error = error

    def put_back(self) -> None:
        """Returns the requests of a step that has failed with WeightsWithdrawn (the weights are read again) to the model's queue.
        Raises any other error with which the step ended."""
        if not isinstance(self.error, WeightsWithdrawn):
            assert self.error is not None
            raise self.error
        while self.served.scheduler.preempt_one():
            pass
