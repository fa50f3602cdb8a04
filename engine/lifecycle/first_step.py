"""The first step of a model whose weights are still being loaded. Prompts that wait for the model are computed layer by layer, each
layer as soon as its weights have been read.

A step larger than usual is computed in slices of its tokens: all slices of one layer before the next layer. The step runs in a
thread of its own, while other models' steps run. Until it has ended, the model does not count as served: no blocks are taken from
it, none of its sequences is preempted, and messages from the daemon about it are deferred."""

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

    plan: the step's plan; None before it was planned. result, error: one of the two is set at the step's end.
    running: True from the step's start until the engine's loop has processed its end.
    loaded, loaded_s: whether all weights have been loaded, and when (time.monotonic()).
    has_begun: whether the weights that the step needs first have been loaded.
    restored_tokens: number of tokens whose saved KV was restored.
    waits_for: the model's load, if the step must not start while this load copies the weights from the host tier; if the load
    rejects that copy and reads from disk (source_rejected), the step may start. None: the step need not wait.
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
        """Returns whether the step may start now and there are requests for it to compute."""
        is_copied = self.waits_for is not None and not self.waits_for.source_rejected
        return not self.running and not is_copied and self.served.scheduler.runnable

    def start(self, step_id: int, run: Callable[[Callable[[], None], FirstStep], None], alone: bool) -> BatchPlan | None:
        """Plans the step, starts it by calling run(work, self), and returns the plan; None if there is nothing to compute. `run`
        calls `work` in a thread, and reports this object to the engine's loop when `work` has returned. alone: whether no other
        model's steps run; if True, the step takes as many prompt tokens as can be computed by the time the weights are loaded."""
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
        """Defers a request that cannot be in this step, because the step runs already or because the request needs masks, which a
        first step does not apply. Returns whether the request was deferred."""
        wait = self.running or message.params.is_constrained  # this step applies no masks
        if wait:
            self.deferred.append(message)
        return wait

    def abort(self, request_id: int) -> bool:
        """Aborts a request if it is deferred, or if the step runs and the model's scheduler holds the request. A deferred request
        is dropped; in the other case the abort is deferred until the step has ended. Returns False if neither applies; the caller
        must then abort the request in the batch scheduler."""
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
        """Returns the requests of a failed step to the model's queue. Called if the step ended with an error; raises this error
        unless it is WeightsWithdrawn, after which the weights are read again."""
        if not isinstance(self.error, WeightsWithdrawn):
            assert self.error is not None
            raise self.error
        while self.served.scheduler.preempt_one():
            pass
