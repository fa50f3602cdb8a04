"""Follows an engine's constrained requests between the batch scheduler and the grammar processes, which compute masks: the sets of
tokens that a request may sample next.

A request with a grammar enters the batch scheduler once its first mask is ready. After each step of the request, the scheduler
holds the request until its next mask is ready, while requests without a grammar go on. A model's grammar process is started by the
model's first request with a grammar and ends with the model. The engine never waits for the process to read: messages that the
process does not read yet are kept, and no further grammars are sent to it meanwhile.

If the process dies, it is started again and replays the output of every request. A request fails if the process has twice died
while working on it. A process that hangs is killed, which counts as a death. Requests that have only limits by token id wait for no
process: their masks are computed here.

The process sends a draft together with a mask: tokens that the grammar forces next, or guesses of the scheduler that the grammar
allows, with the mask after each of them."""

from __future__ import annotations

import heapq
import itertools
import logging
import select
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from math import inf

import numpy as np
import numpy.typing as npt

from engine.contracts.loads import LocksMasks
from engine.grammar.messages import Advance, Broken, Building, Draft, Ended, Forget, Open, Opened, Ready, Start, row_bytes
from engine.grammar.row_masks import RowMasks, allows_others, constrained_rows, hold_ends_back, holds_any
from engine.grammar.token_limits import TokenLimits
from engine.protocol import SamplingParams
from engine.serve.grammar_port import GrammarPort, ProcessDied, folder_of
from engine.serve.served_models import ServedModel
from scheduler.batch.drafting import MOST_DRAFTED
from scheduler.batch.plan import BatchPlan, StepOutcome
from scheduler.batch.request import BatchRequest
from scheduler.fair_queue import FairQueue

log = logging.getLogger("engine")

GRACE_S = 0.0005  # how long a step waits for masks that are nearly ready; a mask usually takes a tenth of this
MAX_DEATHS = 2
# How long a process may give no answer that it owes. The daemon accepts no grammar that takes more than 2 s of CPU time to build.
STALL_S = 30.0
MASKS_BYTES = 64 << 20  # most bytes of the masks of a model's drafts; pages that no draft needs are not touched


NO_DRAFT = Draft([], [])


@dataclass(slots=True)
class Owed:
    """The answers of one kind (to Start, or to Advance) that a grammar process still owes. keys: the requests that it was asked
    about, in the order of asking. since_s: the time since which the process has been silent, by which a hanging process is
    recognised. It is the time when the first of these answers was asked for or, if that was later, when the process last gave an
    answer of this kind or read messages that had been kept for it."""

    keys: dict[int, None] = field(default_factory=dict)
    since_s: float = 0.0


@dataclass(slots=True, eq=False)
class Constrained:
    """A request with a grammar.
    key: its name in messages to the grammar process.
    output: its tokens so far.
    started: whether the process has been sent the request; until then the request is parked.
    owed: the answers that the process owes (ModelGrammars.starts or advances), if the one about this request's next mask is among
    them; None: this request awaits no mask.
    guessed: whether the scheduler had a guess of the next tokens when the last mask was asked for.
    deaths: how often the process died or hung while working on this request."""

    key: int
    request: BatchRequest
    params: SamplingParams
    output: list[int]
    text_id: str = ""  # as in protocol.Submit
    row: int = -1  # index of the place where its masks are written; -1: none
    started: bool = False
    owed: Owed | None = None
    scheduled: bool = False  # it is in the batch scheduler
    guessed: bool = False
    deaths: int = 0


@dataclass(slots=True)
class ModelGrammars:
    """The grammar process of one model, and the requests whose grammars it follows.
    free_rows: unused rows of the memory for masks, as a heap: the lowest is given out first, so that the masks of a step lie close
    together.
    opened: whether the process has loaded the model's tokenizer.
    num_awaited: number of requests in the batch scheduler whose next mask the process owes.
    starts, advances: the answers to Start and to Advance that the process owes; it works on both kinds at once.
    building: the key of the request whose grammar the process builds before older ones, or has built so.
    parked: requests that have no row yet. They wait until the process has opened, reads and has a free row, and rows go to tenants
    in turns. parked_again: requests that a process before this one has followed, and that keep their rows.
    tenants: the numbers by which the process knows tenants.
    since_s: when the process last showed that it reads its messages or, if that was later, when it was started or got a request
    after having none."""

    served: ServedModel
    port: GrammarPort
    free_rows: list[int]
    since_s: float
    opened: bool = False
    starts: Owed = field(default_factory=Owed)
    advances: Owed = field(default_factory=Owed)
    building: int = 0
    parked: FairQueue = field(default_factory=FairQueue)
    parked_again: deque[Constrained] = field(default_factory=deque)
    tenants: dict[str, int] = field(default_factory=dict)
    by_id: dict[int, Constrained] = field(default_factory=dict)
    by_key: dict[int, Constrained] = field(default_factory=dict)
    num_awaited: int = 0

    def waits_since_s(self) -> float:
        """Returns since when requests have waited for an answer of the process, or for the process to read messages; inf if none
        waits."""
        waits = [owed.since_s for owed in (self.starts, self.advances) if owed.keys]
        if (self.parked or self.parked_again) and (not self.opened or self.port.backlog_bytes):
            waits.append(self.since_s)
        return min(waits, default=inf)

    def suspects(self, hangs_since_s: float | None = None) -> list[Constrained]:
        """Returns the requests that may have made the process die or hang: all of them, if the process had not loaded the tokenizer
        yet.
        hangs_since_s: None: the process has died; the requests whose next mask it owed are returned. Otherwise the process has hung
        since this time. If it has owed answers to Start for so long, the request whose grammar it builds is returned: the first of
        these, unless the process has named another one. If it has owed answers to Advance for so long, all of these requests
        are."""
        if not self.opened:
            return list(self.by_id.values())
        if hangs_since_s is None:
            return [each for each in self.by_id.values() if each.owed is not None]
        starts, advances = (owed.keys if owed.since_s <= hangs_since_s else () for owed in (self.starts, self.advances))
        built = (self.building,) if self.building in starts else islice(starts, 1)
        return [self.by_key[key] for key in (*built, *advances)]

    def next_parked(self) -> Constrained | None:
        """Takes the next request to be sent to the process from those that are parked, and gives it a row if it has none. Returns
        None if none is parked or no row is free."""
        if self.parked_again:
            return self.parked_again.popleft()
        request_id = self.parked.first() if self.free_rows else None
        if request_id is None:
            return None
        self.parked.take(request_id)
        each = self.by_id[request_id]
        each.row = heapq.heappop(self.free_rows)
        return each


@dataclass(slots=True, frozen=True)
class End:
    """The end of a constrained request, for the engine to report. error: why it failed; "" if its text is complete. code: the code
    of the error (RequestFailed.code)."""

    model: str
    request_id: int
    error: str
    code: str = "unsupported_grammar"


class Constraints:
    """All constrained requests of an engine, of all models: those with a grammar, and those with limits by token id. Methods are
    called by the thread that runs steps. `drop` and `sampled` are not called for a request whose step is under way, because the
    device may still read the request's masks.
    locks: page-locks masks; None: masks are not page-locked.
    clock: returns monotonic seconds."""

    def __init__(self, locks: LocksMasks | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._locks, self._clock = locks, clock
        self.concerned: set[str] = set()  # models that have had such requests, kept for the loop, which looks before every step
        self._models: dict[str, ModelGrammars] = {}
        self._limits: dict[int, TokenLimits] = {}  # by id, requests that rule out tokens, with or without a grammar
        self._stuck: dict[int, str] = {}  # request id -> model, for requests without a grammar for which no token is left
        self._poller = select.epoll()
        self._keys = itertools.count(1)

    def fileno(self) -> int:
        """Returns a descriptor that is readable when grammar processes have sent something, or can take more messages (see
        `receive`)."""
        return self._poller.fileno()

    # ---- requests

    def submit(
        self, served: ServedModel, request: BatchRequest, params: SamplingParams, output: list[int], text_id: str = ""
    ) -> list[End]:
        """Takes a constrained request that is not in the batch scheduler yet, and submits it to the scheduler: at once or, if it
        has a grammar, when its first mask is ready. Returns [] or, if the limits of the request allow no next token or the grammar
        process cannot be started, the request's end. output: tokens that the request has already produced, if it is submitted
        again. text_id: identifies the version of the tokenizer's files (Submit.text_id)."""
        name = served.spec.model
        self.concerned.add(name)
        if params.is_limited:
            limits = TokenLimits(name, params, served.hosted.vocab_size, output)
            if not limits.bits.any():
                return [End(name, request.request_id, limits.why_stuck(), "no_token_left")]
            self._limits[request.request_id] = limits
        if not params.grammar:
            served.scheduler.submit(request)
            return []
        grammars = self._models.get(name)
        if grammars is None:
            num_rows = served.spec.max_sequences
            try:
                port = self._open(served, num_rows, text_id)
            except (OSError, MemoryError) as error:
                self._limits.pop(request.request_id, None)
                return [End(name, request.request_id, _not_started(error), "internal")]
            grammars = self._models[name] = ModelGrammars(served, port, list(range(num_rows)), self._clock())
        elif not grammars.by_id:
            grammars.since_s = self._clock()
        request.constrained = True
        each = Constrained(next(self._keys), request, params, list(output), text_id)
        grammars.by_id[request.request_id] = grammars.by_key[each.key] = each
        grammars.parked.add(request.request_id, 1.0, request.tenant, request.weight, request.priority)
        self._start_parked(grammars)
        return []

    def drop(self, model: str, request_id: int) -> None:
        """Removes all records of a request that has ended or was aborted. Unknown ids are ignored."""
        self._limits.pop(request_id, None)
        self._stuck.pop(request_id, None)
        grammars = self._models.get(model)
        each = grammars.by_id.pop(request_id, None) if grammars is not None else None
        if grammars is None or each is None:
            return
        del grammars.by_key[each.key]
        self._settle(grammars, each)
        if each.row < 0:
            grammars.parked.withdraw(request_id)
            return
        heapq.heappush(grammars.free_rows, each.row)
        if not each.started:
            grammars.parked_again.remove(each)
            return
        self._send(grammars, Forget([each.key]))
        self._start_parked(grammars)

    def close(self, model: str) -> None:
        """Removes all records of the requests of a model that is evicted, and ends its grammar process."""
        self.concerned.discard(model)
        for request_id in [request_id for request_id, limits in self._limits.items() if limits.model == model]:
            self.drop(model, request_id)
        self._end_process(model)

    def _end_process(self, model: str) -> None:
        grammars = self._models.pop(model, None)
        if grammars is not None:
            self._poller.unregister(grammars.port.fileno())
            grammars.port.close()

    # ---- steps

    def masks(self, served: ServedModel, plan: BatchPlan) -> RowMasks | None:
        """Returns the masks of those rows of the plan that sample and have a grammar or token limits; None if there are no such
        rows."""
        grammars = self._models.get(served.spec.model)
        if grammars is None and not self._limits:
            return None
        table = served.scheduler.table
        rows = constrained_rows(plan, table)
        if not len(rows):
            return None
        slots = plan.slots[plan.samples][rows]
        request_ids = table.request_id[slots].tolist()
        positions = (plan.num_computed + plan.num_new)[plan.samples][rows]  # of the tokens about to be sampled
        drafts: list[list[int]] = [[]] * len(rows)  # for each row, the drafted tokens before its token
        if plan.drafted:
            known = table.num_tokens[slots]
            drafts = [table.tokens[slot, num:end].tolist() for slot, num, end in zip(slots, known, positions, strict=True)]
        eos_ids, locked = served.spec.eos_token_ids, None if grammars is None else grammars.port.locked
        # A device that copies masks by itself bans end ids, too: if they were taken out of a mask, the host would have to copy it.
        may_ban = [False] * len(rows) if locked is None else (positions < table.min_tokens_until[slots]).tolist()
        each_row = zip(request_ids, drafts, may_ban, strict=True)
        of_rows = [self._mask(grammars, request_id, draft, eos_ids, bans) for request_id, draft, bans in each_row]
        bits = [mask for mask, _, _ in of_rows]
        if locked is None:
            return RowMasks(request_ids, rows, bits)
        places = np.array([place for _, place, _ in of_rows], np.int32)
        places[places >= len(locked.bits)] = -1
        return RowMasks(request_ids, rows, bits, locked, places, np.array([banned for _, _, banned in of_rows], np.bool_))

    def _mask(
        self, grammars: ModelGrammars | None, request_id: int, draft: list[int], ends: list[int], may_ban: bool
    ) -> tuple[npt.NDArray[np.uint32], int, bool]:
        """Returns the mask of the tokens that a request may sample after a draft (possibly empty), as (mask, place, bans).
        mask [W]: a bit for each token. At least one is set. Must not be written to.
        place: the request's row in the memory of the grammar process, if the mask is mask 0 of that row; else -1.
        bans: whether the sampler must rule out end ids in addition to the mask.
        ends: the model's end ids. may_ban: whether the sampler can rule out end ids."""
        mask, place = self._allowed(grammars, request_id, draft)
        held_back, is_early = self._ends_held_back(grammars, request_id, len(draft), ends)
        if not held_back or not holds_any(mask, held_back):
            return mask, place, False
        if is_early and may_ban:
            return mask, place, allows_others(mask, held_back)
        mask = mask.copy()
        hold_ends_back(mask, held_back)
        return mask, -1, False

    def _allowed(self, grammars: ModelGrammars | None, request_id: int, draft: list[int]) -> tuple[npt.NDArray[np.uint32], int]:
        """Returns the mask of the tokens that both the grammar and the limits of a request allow after a draft, as (mask, place).
        mask [W]: a bit for each token. Must not be written to.
        place: the request's row in the memory of the grammar process, if the mask is mask 0 of that row; else -1."""
        each = None if grammars is None else grammars.by_id.get(request_id)
        limits = self._limits.get(request_id)
        if grammars is None or each is None:
            assert limits is not None
            return limits.behind(draft) if draft else limits.bits, -1
        mask: npt.NDArray[np.uint32] = grammars.port.masks[each.row, len(draft)]
        if limits is not None:
            return mask & limits.behind(draft), -1
        return mask, -1 if draft else each.row

    def _ends_held_back(
        self, grammars: ModelGrammars | None, request_id: int, num_drafted: int, ends: list[int]
    ) -> tuple[list[int], bool]:
        """Returns the ids of tokens that would end a request's text too early (because of min_tokens or ignore_eos), and whether
        min_tokens is the reason. They are ruled out only if another token is allowed; otherwise they may be sampled, and the text
        goes on. num_drafted: number of drafted tokens before the mask's position. ends: the model's end ids."""
        each = None if grammars is None else grammars.by_id.get(request_id)
        if each is not None:
            params, num_output = each.params, len(each.output)
        else:
            limits = self._limits[request_id]
            params, num_output = limits.params, limits.num_output
        if num_output + num_drafted < params.min_tokens:
            return [*ends, *params.stop_token_ids], True
        if params.ignore_eos and each is not None:  # with a grammar an end id would end the text; otherwise it is a normal token
            return ends, False
        return [], False

    def sampled(self, served: ServedModel, masks: RowMasks, outcome: StepOutcome) -> None:
        """Records the tokens that a step has sampled, and asks for the masks of the tokens after them. masks: those that the step
        used. outcome: the step's tokens, by request."""
        model, scheduler = served.spec.model, served.scheduler
        grammars = self._models.get(model)
        keys, told, counts = [], [], []
        guesses = {}
        tokens_of = _tokens_of(outcome)
        for request_id in dict.fromkeys(masks.request_ids):
            tokens = tokens_of.get(request_id)
            if tokens is None or request_id not in scheduler:
                self.drop(model, request_id)
                continue
            limits = self._limits.get(request_id)
            if limits is not None:
                limits.extend(tokens)
            each = None if grammars is None else grammars.by_id.get(request_id)
            if limits is not None and each is None and not limits.bits.any():
                self._stuck[request_id] = model
                continue
            guess = scheduler.guess(request_id)
            if grammars is None or each is None:
                if guess is not None and limits is not None:
                    num = limits.num_leading_on(guess.tolist())
                    scheduler.propose(request_id, guess[:num], np.zeros(num, np.bool_), guessed=True)
                continue
            each.output += tokens
            each.guessed = guess is not None
            self._owe(grammars, each, grammars.advances)
            keys.append(each.key)
            told += tokens
            counts.append(len(tokens))
            if guess is not None and len(guess):
                guesses[each.key] = guess.tolist()
        if grammars is not None and keys:
            self._send(grammars, Advance(keys, told, counts if len(told) > len(keys) else [], guesses))

    def ready(self, served: ServedModel) -> list[End]:
        """Prepares the model's next step: waits up to GRACE_S for masks that are being computed, and removes from the scheduler the
        requests that have no allowed token left. Returns the ends of requests, for the engine to report."""
        model = served.spec.model
        grammars = self._models.get(model)
        ends: list[End] = []
        for request_id in [request_id for request_id, name in self._stuck.items() if name == model]:
            served.scheduler.abort(request_id)
            ends.append(End(model, request_id, self._limits[request_id].why_stuck(), "no_token_left"))
            self.drop(model, request_id)
        if grammars is None or not grammars.opened:
            return ends
        until_s = time.monotonic() + GRACE_S
        while grammars.num_awaited and (left_s := until_s - time.monotonic()) > 0:
            if grammars.port.wait(left_s):
                self._receive(model, grammars, ends)
        return ends

    def receive(self) -> list[End]:
        """Processes the answers of all grammar processes that have arrived, and sends kept messages to processes that read again. A
        request whose mask is ready is submitted to the scheduler, or released if the scheduler holds it; a request that has ended
        is removed from the scheduler. Returns the ends of requests, for the engine to report."""
        ends: list[End] = []
        ready = dict(self._poller.poll(0))
        for model, grammars in list(self._models.items()):
            events = ready.get(grammars.port.fileno(), 0)
            if events & select.EPOLLOUT:
                self._flush(grammars)
            if events & ~select.EPOLLOUT:
                self._receive(model, grammars, ends)
        return ends

    def stalled(self) -> list[str]:
        """Returns the models whose grammar processes have given no sign of life for STALL_S while requests waited for them. The
        caller must have processed all answers that have arrived (`receive`)."""
        if not self._models:
            return []
        begun_by_s = self._clock() - STALL_S
        return [model for model, grammars in self._models.items() if grammars.waits_since_s() <= begun_by_s]

    def restart_stalled(self) -> list[End]:
        """Kills the grammar processes that have given no sign of life for STALL_S while requests wait, and starts them again, as
        after a death. Returns the ends of requests, for the engine to report."""
        ends: list[End] = []
        for model in self.stalled():
            grammars = self._models[model]
            reason = f"process {grammars.port.pid} has given no answer for {STALL_S:g} s"
            ends += self._restart(model, grammars, grammars.suspects(self._clock() - STALL_S), reason)
        return ends

    # ---- the process

    def _open(self, served: ServedModel, num_rows: int, text_id: str) -> GrammarPort:
        vocab_size, rows_each = served.hosted.vocab_size, 1
        if served.scheduler.drafts_masked:
            rows_each = max(1, min(1 + MOST_DRAFTED, MASKS_BYTES // (num_rows * row_bytes(vocab_size))))
        port = GrammarPort(vocab_size, num_rows, rows_each, self._locks)
        self._poller.register(port.fileno(), select.EPOLLIN)
        self._post(port, Open(folder_of(served.spec), vocab_size, served.spec.eos_token_ids, num_rows, rows_each, text_id))
        return port

    def _start_parked(self, grammars: ModelGrammars) -> None:
        """Sends parked requests (those that have not been sent to the grammar process yet) to the process. Does nothing before the
        process has loaded the tokenizer. Stops when no row is free in the memory for token masks that the engine shares with the
        process. Also stops when the process does not read its messages, so that its backlog stays short however many requests come
        and go."""
        while grammars.opened and not grammars.port.backlog_bytes and (each := grammars.next_parked()) is not None:
            each.started = True
            self._owe(grammars, each, grammars.starts)
            request = each.request
            tenant = grammars.tenants.setdefault(request.tenant, len(grammars.tenants))
            turn = (tenant, request.weight, request.priority)
            self._send(grammars, Start(each.key, each.row, each.params.grammar, each.output, each.text_id, *turn))

    def _receive(self, model: str, grammars: ModelGrammars, ends: list[End]) -> None:
        try:
            messages = grammars.port.receive()
        except ProcessDied as died:
            ends += self._restart(model, grammars, grammars.suspects(), str(died))
            return
        for message in messages:
            match message:
                case Opened():
                    if message.error:
                        ends += self._fail(model, grammars, list(grammars.by_id.values()), message.error)
                        self._end_process(model)  # the next request tries again: the files may have changed by then
                        return
                    grammars.opened = True
                    self._start_parked(grammars)
                case Building():
                    grammars.building = message.key
                case Ready():
                    for each in self._answered(grammars, message.keys):
                        ends += self._ready(model, grammars, each, message.drafts.get(each.key, NO_DRAFT))
                case Ended():
                    ends += self._fail(model, grammars, list(self._answered(grammars, message.keys)), "")
                case Broken():
                    ends += self._fail(model, grammars, list(self._answered(grammars, [message.key])), message.error)

    def _answered(self, grammars: ModelGrammars, keys: Iterable[int]) -> Iterable[Constrained]:
        for key in keys:
            each = grammars.by_key.get(key)
            if each is not None:
                if each.owed is not None:
                    each.owed.since_s = self._clock()
                self._settle(grammars, each)
                yield each

    def _ready(self, model: str, grammars: ModelGrammars, each: Constrained, draft: Draft) -> list[End]:
        """Lets the scheduler run a request whose mask is ready. If the request's limits by token id rule out all tokens of the
        mask, the request ends instead: as complete if the grammar may end here, otherwise with an error. Returns the request's end,
        if it ended, in a list. draft: tokens that may follow."""
        request_id = each.request.request_id
        limits, masks, num_drafted = self._limits.get(request_id), grammars.port.masks[each.row], len(draft.tokens)
        if limits is not None:
            if not (limits.bits & masks[0]).any():
                may_end = holds_any(masks[0], grammars.served.spec.eos_token_ids)
                return self._fail(model, grammars, [each], "" if may_end else limits.why_stuck(), "no_token_left")
            num_drafted = limits.num_leading_on(draft.tokens, masks)
        scheduler = grammars.served.scheduler
        if each.scheduled:
            tokens, sure = np.array(draft.tokens, np.int32), np.array(draft.sure, np.bool_)
            scheduler.propose(request_id, tokens[:num_drafted], sure[:num_drafted], each.guessed)
            scheduler.hold(request_id, False)
        else:
            each.scheduled = True
            scheduler.submit(each.request)
        return []

    def _fail(
        self, model: str, grammars: ModelGrammars, those: list[Constrained], error: str, code: str = "unsupported_grammar"
    ) -> list[End]:
        """Removes the requests `those` from the scheduler and from the records, and returns their ends with this error and code.
        error: why they fail; "" if their texts are complete."""
        ends = []
        for each in those:
            request_id = each.request.request_id
            grammars.served.scheduler.abort(request_id)
            ends.append(End(model, request_id, error, code))
            self.drop(model, request_id)
        return ends

    def _restart(self, model: str, grammars: ModelGrammars, suspects: list[Constrained], reason: str) -> list[End]:
        """Starts a model's grammar process again after its death, or in place of one that hangs, and parks the requests until the
        new process has loaded the tokenizer. Returns the ends of the requests that fail: those that have been among the suspects
        MAX_DEATHS times, or all if no process can be started. suspects: the requests that may have made the process die or hang.
        reason: why it is started again, for the log."""
        for each in suspects:
            each.deaths += 1
        hopeless = [each for each in suspects if each.deaths >= MAX_DEATHS]
        grammars.opened, grammars.building = False, 0
        ends = self._fail(model, grammars, hopeless, "following this grammar ended or stalled the grammar process twice")
        if not grammars.by_id:
            self._end_process(model)
            return ends
        log.warning("grammar process of %s: %s; it is started again", model, reason)
        self._poller.unregister(grammars.port.fileno())
        grammars.port.close()
        for each in [each for each in grammars.by_id.values() if each.started]:
            self._settle(grammars, each)
            each.started = False
            grammars.parked_again.appendleft(each)
            if each.scheduled:
                grammars.served.scheduler.hold(each.request.request_id, True)
        latest = next(reversed(grammars.by_id.values()))
        try:
            grammars.port, grammars.since_s = self._open(grammars.served, len(grammars.port.masks), latest.text_id), self._clock()
        except (OSError, MemoryError) as error:
            ends += self._fail(model, grammars, list(grammars.by_id.values()), _not_started(error), "internal")
            del self._models[model]  # the next request tries again
        return ends

    def _owe(self, grammars: ModelGrammars, each: Constrained, owed: Owed) -> None:
        """Records that the grammar process is asked for a request's next mask. owed: the answers that it owes, of the kind in which
        this mask will come."""
        if not owed.keys:
            owed.since_s = self._clock()
        owed.keys[each.key] = None
        each.owed = owed
        grammars.num_awaited += each.scheduled

    @staticmethod
    def _settle(grammars: ModelGrammars, each: Constrained) -> None:
        """Records that the grammar process owes a request no mask any more."""
        if each.owed is not None:
            del each.owed.keys[each.key]
            each.owed = None
            grammars.num_awaited -= each.scheduled

    def _send(self, grammars: ModelGrammars, message: Start | Advance | Forget) -> None:
        if not grammars.port.backlog_bytes:
            grammars.since_s = self._clock()
        self._post(grammars.port, message)

    def _post(self, port: GrammarPort, message: Open | Start | Advance | Forget) -> None:
        try:
            port.send(message)
        except ProcessDied:
            log.debug("a grammar process is gone; `receive` will find that")
        if port.backlog_bytes:
            self._poller.modify(port.fileno(), select.EPOLLIN | select.EPOLLOUT)

    def _flush(self, grammars: ModelGrammars) -> None:
        port, num_bytes = grammars.port, grammars.port.backlog_bytes
        try:
            port.flush()
        except ProcessDied:
            log.debug("a grammar process is gone; `receive` will find that")
        if port.backlog_bytes < num_bytes:  # what it owes answers to may have been in there
            grammars.since_s = grammars.starts.since_s = grammars.advances.since_s = self._clock()
        if not port.backlog_bytes:
            self._poller.modify(port.fileno(), select.EPOLLIN)
            self._start_parked(grammars)


def _not_started(error: Exception) -> str:
    return f"the grammar process could not be started: {getattr(error, 'strerror', None) or error}"


def _tokens_of(outcome: StepOutcome) -> dict[int, list[int]]:
    """Returns the tokens that each request got in a step: request id -> token ids."""
    told = iter(outcome.ids)
    counts = outcome.counts or [1] * len(outcome.request_ids)
    return {request_id: list(islice(told, count)) for request_id, count in zip(outcome.request_ids, counts, strict=True)}
