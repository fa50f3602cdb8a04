"""Runs the steps of split models on one engine. A group consists of the engines that hold the shares of one split model; the engine
of rank 0 leads it, that is, plans its steps. In the memory that engines share (engine/exchange.py) each engine has one queue for
the steps of all its groups, so that all engines run the steps that they share in the same order."""

from __future__ import annotations

import contextlib
import logging
import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from engine.contracts.group_share import GroupShare
from engine.contracts.ranks import GroupBroken
from engine.contracts.steps import StepResult
from engine.exchange import Exchange
from engine.grammar.row_masks import RowMasks
from engine.host.own_core import OwnCore
from engine.loop.step_journal import StepJournal
from engine.serve.served_models import ServedModels
from loader.threads import Thread
from scheduler.batch.plan import BatchPlan, SequenceTable

log = logging.getLogger("engine")
Result = TypeVar("Result")

# A stream's next step usually follows within this time, in which the leader takes in the tokens, sends them, and plans.
LINGER_S = 2e-4

# An engine that runs nothing else asks its device this often whether the steps that it follows in have ended.
ASK_EVERY_S = 0.02


class GroupSteps:
    """Runs the steps of split models that are in one engine's queue, in the memory that engines share.
    number: the engine's number among the engines of the node.
    doorbell: an eventfd that other engines write to when they have added to the queue.
    models, journal: the engine's models and step journal.
    stepped(model): called with the model's name after each step that another engine leads."""

    def __init__(
        self,
        exchange: Exchange,
        number: int,
        doorbell: int,
        models: ServedModels,
        journal: StepJournal,
        stepped: Callable[[str], None],
        num_threads: int = 1,
    ) -> None:
        """exchange: the memory that engines share to run split models, which has the engine's queue.
        number: the engine's number among the engines of the node.
        doorbell: an eventfd that other engines write to, to wake this engine, when they have added to its queue.
        models, journal: the engine's models and step journal.
        stepped: called after each step that another engine leads, with the name of the step's model.
        num_threads: number of threads that compute in this engine."""
        self._own_core = OwnCore(number, exchange.num_engines) if num_threads == 1 else None
        self._exchange, self._number, self._doorbell = exchange, number, doorbell
        self._models, self._journal, self._stepped = models, journal, stepped
        os.set_blocking(doorbell, False)
        self._posted: dict[int, deque[PostedStep]] = {}  # region -> steps that this engine leads and has not run, the oldest first
        self._followed: list[GroupShare] = []  # shares whose steps may still run on the device
        self._queue = exchange.queue(number)
        exchange.reset(number)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when another engine has added steps to this engine's queue."""
        return self._doorbell

    def awake(self) -> None:
        """Resets the doorbell, so that its descriptor (fileno) is not readable until another engine adds to the queue again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._doorbell)

    def run_queue(self) -> bool:
        """Runs the steps at the front of the queue that other engines lead, and returns whether it ran any. To lead a step is to
        plan it, as the engine of rank 0 does. The call stops at the first step that this engine leads, because that step is run
        when its result is asked for. It also stops at the second step of one model, because the queue may never be empty and the
        engine has other work to do between steps."""
        ran: set[int] = set()
        while (region := self._queue.take(self._posted.keys() | ran)) is not None:
            self._follow(region)
            ran.add(region)
        return bool(ran)

    @property
    def is_waiting(self) -> bool:
        """Returns whether this engine's queue has an entry."""
        return self._queue.has_entries()

    def comes_soon(self) -> bool:
        """Waits for an entry in the queue, for LINGER_S at most, and returns whether the queue has one. It polls instead of
        sleeping, because going to sleep and waking up would take about as long."""
        return self._queue.comes_within(LINGER_S)

    def has_ended(self) -> bool:
        """Returns, without waiting, whether this engine's device has ended all steps that it has begun for other engines, which
        lead them. Raises the device's error, which ends this engine. This engine reads no results of such steps, so while it runs
        no steps of its own, it learns of an error only by this call."""
        if self._followed:
            held = self._models.followed
            self._followed = [share for share in self._followed if held.get(share.name) is share and not share.has_ended()]
        return not self._followed

    def post(self, share: GroupShare, plan: BatchPlan, table: SequenceTable) -> PostedStep:
        """Adds a step of a split model that this engine leads (as its rank 0) to the queues of all engines of the model, and
        returns the posted step. This engine computes its own part of the step when the step's result is asked for
        (PostedStep.wait). Raises GroupBroken if a device of the split model has been lost."""
        if not share.region.post(plan):
            raise GroupBroken(f"model {share.name}: its group has lost a device")
        step = PostedStep(self, share, plan, table)
        self._posted.setdefault(share.region.offset, deque()).append(step)
        return step

    def run_next(self) -> None:
        """Runs the first step in the queue, whichever engine leads it. Raises RuntimeError if there is none."""
        region = self._queue.take()
        if region is None:
            raise RuntimeError(f"a step that was posted is not in the queue of engine {self._number}")
        if (posted := self._posted.get(region)) is None:
            self._follow(region)
            return
        step = posted.popleft()
        if not posted:
            del self._posted[region]
        step.run()

    def is_first(self, step: PostedStep) -> bool:
        """Returns whether a step that this engine has posted and not run is the first one in the queue."""
        posted = self._posted.get(self._queue.first() or 0)
        return posted is not None and posted[0] is step

    def run_part(self, share: GroupShare, work: Callable[[], Result]) -> Result:
        """Calls `work`, which computes this engine's part of a step, and returns its result. If the model has several pipeline
        stages and the engine computes with one thread, `work` runs on a core of its own, else on the threads that compute steps."""
        if share.num_stages > 1 and self._own_core is not None:
            return self._own_core.run(work)
        return self._models.threads.run(work)

    def forget(self, share: GroupShare) -> None:
        """Drops the steps that this engine has posted for a split model that is now broken (has lost a device), so that it never
        computes its part of them. The steps' entries stay in the engine's queue until the share is evicted."""
        self._posted.pop(share.region.offset, None)

    def leave_all(self) -> None:
        """Ends this engine's part in all split models, which then cannot run any more. Called when this engine ends, so that no
        other engine waits for it."""
        for share in self._shares():
            share.region.leave()

    def watch(self, channel_fd: int) -> None:
        """Starts a thread that marks all split models of this engine as broken when the daemon has closed its end of the channel.
        If the daemon and another engine have died, this engine's loop, which waits in a step for the other engine, would otherwise
        wait for ever."""

        def work() -> None:
            poller = select.poll()
            poller.register(channel_fd, 0)  # the end of the stream is reported without asking for an event
            poller.poll()
            for share in self._shares():
                self._exchange.break_group(share.region.offset)

        Thread(target=work, name="end of the channel").start()

    def _shares(self) -> Iterator[GroupShare]:
        """Yields this engine's shares of split models: those whose steps other engines lead, then those whose steps this engine
        leads."""
        yield from list(self._models.followed.values())
        yield from (served.share for served in list(self._models.by_name.values()) if served.share is not None)

    def _follow(self, region: int) -> None:
        for share in self._shares():
            if share.region.offset == region:
                break
        else:  # this engine has no share, so other members would wait for its part in vain
            log.error("engine %d is told of a step of a group that it has no share of", self._number)
            self._exchange.break_group(region)
            return
        if share.is_broken:  # a group that this engine leads may have broken after this step was posted
            return
        plan = share.region.read_plan(share.name)
        self._journal.note(share.region.table.request_id.take(plan.slots))
        if share not in self._followed:
            self._followed.append(share)
        try:
            self.run_part(share, lambda: share.follow(plan))
        except GroupBroken as error:
            broke(share, error)
        self._stepped(share.name)


class PostedStep:
    """A step of a split model that this engine leads and has posted to all engines of the model (an
    engine.contracts.steps.Launched). masks: for rows with a grammar or limits by token id, the tokens that they may sample
    (RowMasks); set before the step runs; None: there are no such rows."""

    def __init__(self, steps: GroupSteps, share: GroupShare, plan: BatchPlan, table: SequenceTable) -> None:
        self._steps, self._share, self._plan, self._table = steps, share, plan, table
        self.masks: RowMasks | None = None
        self._result: StepResult | None = None
        self._error: GroupBroken | None = None

    @property
    def waits(self) -> bool:
        """Returns whether a call of `wait` would have to wait for another stage of a pipeline, or to run other steps of the queue
        first. False for a model with one stage, because its other devices wait for this one in every step."""
        if self._share.num_stages == 1 or self._share.region.is_broken or self._result is not None or self._error is not None:
            return False
        return self._share.waits_for_stage or not self._steps.is_first(self)

    def run(self) -> None:
        """Computes this engine's part of the step, and keeps the result, or the GroupBroken that was raised, for `wait`."""
        try:
            self._result = self._steps.run_part(self._share, lambda: self._share.execute(self._plan, self._table, self.masks))
        except GroupBroken as error:
            self._error = error

    def wait(self) -> StepResult:
        """Runs the steps in the engine's queue up to this one, and returns this step's result. Raises GroupBroken if a device of
        the split model has been lost."""
        while self._error is None:
            if self._result is not None:
                return self._result
            self._steps.run_next()
        raise self._error


def broke(share: GroupShare, error: GroupBroken) -> None:
    """Marks an engine's share of a split model as part of a broken group, so that no more steps of it are run, and logs the error.
    The share stays in memory until the daemon evicts it."""
    share.is_broken = True
    # Not a warning: an eviction of a busy model reaches its devices one after the other, and the daemon reports a lost device.
    log.info("%s: no more steps: another of its devices has evicted its share or has failed (%s)", share.name, error)
