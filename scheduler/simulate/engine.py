"""One device's engine, step by step: whose step is next (scheduler/batch/turns.py), how large it may be (`steps`), and which
sequences are in it, as scheduler/batch decides it for a real one. While there is nothing to do but decode, rounds of steps are
one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil
from types import MappingProxyType

from scheduler.batch.step_limits import turns_of_step
from scheduler.batch.turns import Turns
from scheduler.node.events import ModelFacts
from scheduler.simulate.costs import Costs
from scheduler.simulate.outcome import RequestOutcome
from scheduler.simulate.steps import CPU_STEPS, ModelSteps, StepSettings

_DUE = 1e-6  # of a step: what rounding leaves
_FEWEST_ROUNDS = 2  # that are worth being one
NOTHING_RESTORED: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine. `prompt_left`: tokens to be computed until it decodes; those whose KV came back with the model are
    not among them."""

    outcome: RequestOutcome
    kv_bytes: int
    prompt_left: int
    tokens_at_step: float = 0.0  # steps of its model when it began to decode, less the tokens it had then


@dataclass(slots=True, eq=False)
class Hosted:
    """A loaded model. `steps`: decode steps so far; a sequence ends when they reach its mark. Where a step has no room for all that
    decode it is a part of one: they take turns."""

    facts: ModelFacts
    reserved_bytes: int
    costs: ModelSteps
    steps: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)  # for a place in the batch or for KV
    prompts: deque[Job] = field(default_factory=deque)
    decoding: list[tuple[float, int]] = field(default_factory=list)  # heap of (mark, request)
    jobs: dict[int, Job] = field(default_factory=dict)  # all of them
    restored: dict[int, int] = field(default_factory=dict)  # request that is to come back -> tokens whose KV is there
    kv_bytes: int = 0
    backlogged: bool = False  # there was more to do than fits a turn when its latest step was planned

    @property
    def num_running(self) -> int:
        return len(self.prompts) + len(self.decoding)

    def kv_tokens(self) -> dict[int, int]:
        """Request -> tokens whose KV is there, in the order in which they came."""
        found = {request_id: self._kv_tokens(job) for request_id, job in self.jobs.items()}
        return {request_id: num_tokens for request_id, num_tokens in found.items() if num_tokens > 0}

    def _kv_tokens(self, job: Job) -> int:
        request = job.outcome.request
        if job.prompt_left:
            return request.input_tokens + job.outcome.tokens_done - job.prompt_left
        return request.input_tokens + int(self.steps - job.tokens_at_step + _DUE) - 1

    def rows(self, turns: int) -> int:
        """Sequences that decode in a step of so many turns."""
        return min(len(self.decoding), self.costs.max_rows(turns)) if turns else len(self.decoding)

    def steps_left(self) -> float:
        """Until a sequence ends; 0.0 where none decodes."""
        return self.decoding[0][0] - self.steps if self.decoding else 0.0


@dataclass(slots=True)
class _Step:
    """Of one model: `part` of a step for each sequence that decodes, and tokens of prompts."""

    hosted: Hosted
    part: float
    chunks: list[tuple[Job, int]]
    seconds: float
    turns: int  # it was planned to take


@dataclass(slots=True)
class _Rounds:
    """num rounds of round_s each, in which every model decodes so many steps or parts of one."""

    decoded: list[tuple[Hosted, float]]
    round_s: float
    num: float


class SimulatedEngine:
    """`lease_bytes`: KV its models may use beyond their reserves. Time is told with `advance`; what comes in meanwhile is taken in
    with the next step."""

    def __init__(self, costs: Costs, settings: StepSettings = CPU_STEPS) -> None:
        self.costs, self.settings = costs, settings
        self.lease_bytes = 0
        self.first_tokens: list[RequestOutcome] = []  # since they were last taken
        self.ended: list[RequestOutcome] = []
        self.hosted: dict[str, Hosted] = {}
        self.turns = Turns()
        self._steps: dict[str, ModelSteps] = {}  # of all that were ever hosted
        self._under_way: _Step | _Rounds | None = None
        self._began = self._now = 0.0  # of what is under way; the time told last

    # ---- time

    def next_at(self) -> float | None:
        """When what is under way ends; None: nothing is."""
        if self._under_way is None:
            self._start(self._now)
        step = self._under_way
        if step is None:
            return None
        return self._began + (step.seconds if isinstance(step, _Step) else step.num * step.round_s)

    def advance(self, now: float) -> None:
        """What ends by now has ended; its outcomes are in `first_tokens` and `ended` until somebody takes them."""
        while (at := self.next_at()) is not None and at <= now:
            step, self._under_way = self._under_way, None
            self._now = at
            if isinstance(step, _Step):
                self._end_step(step, at)
            elif step is not None:
                self._decode(step, step.num)
            self._start(at)
        self._now = max(self._now, now)
        if isinstance(self._under_way, _Rounds):
            self._settle(self._under_way)

    # ---- models

    def host(self, facts: ModelFacts, reserved_bytes: int, restored: Mapping[int, int] = NOTHING_RESTORED) -> None:
        """`restored`: request -> tokens whose KV comes with the model, for when it is submitted again."""
        steps = self._steps.get(facts.name)
        if steps is None:
            steps = self._steps[facts.name] = ModelSteps(self.settings, self.costs.step_seconds(facts))
        self.hosted[facts.name] = Hosted(facts, reserved_bytes, steps, restored=dict(restored))
        self.turns.add(facts.name)

    def end_step_of(self, name: str) -> float:
        """A model is about to leave: its step that is under way counts now, though it takes so many seconds more. Who would have
        its last token keeps that for when the model is back."""
        self._interrupt()
        step, hosted = self._under_way, self.hosted[name]
        if not isinstance(step, _Step) or step.hosted is not hosted:
            return 0.0
        self._under_way = None
        ends_at = self._began + step.seconds
        if hosted.steps_left() > step.part:
            hosted.steps += step.part
        for job, tokens in step.chunks:
            request = job.outcome.request
            if tokens == job.prompt_left and request.output_tokens > job.outcome.tokens_done + 1:
                job.prompt_left = 0
                hosted.prompts.remove(job)
                self._end_prompt(hosted, job, ends_at)
            else:
                job.prompt_left = max(1, job.prompt_left - tokens)
        return ends_at - self._now

    def drop(self, name: str) -> list[RequestOutcome]:
        """Evicts; what ran there keeps the tokens it has and is returned."""
        self._interrupt()
        if isinstance(self._under_way, _Rounds):
            self._under_way = None
        hosted = self.hosted.pop(name)
        self.turns.remove(name)
        for _, request_id in hosted.decoding:
            job = hosted.jobs[request_id]
            job.outcome.tokens_done = int(hosted.steps - job.tokens_at_step + _DUE)
        return [job.outcome for job in hosted.jobs.values()]

    def kv_bytes(self) -> dict[str, int]:
        """What running sequences have taken, by model."""
        return {name: hosted.kv_bytes for name, hosted in self.hosted.items()}

    def waiting(self) -> dict[str, int]:
        """Requests that have not begun, by model."""
        return {name: len(hosted.waiting) for name, hosted in self.hosted.items() if hosted.waiting}

    def set_lease(self, lease_bytes: int) -> None:
        self._interrupt()
        self.lease_bytes = lease_bytes

    def submit(self, outcome: RequestOutcome) -> None:
        self._interrupt()
        request = outcome.request
        hosted = self.hosted[request.model]
        tokens = request.input_tokens + request.output_tokens
        restored = hosted.restored.pop(outcome.request_id, 0)
        prompt_left = max(1, request.input_tokens + outcome.tokens_done - restored)
        job = Job(outcome, tokens * hosted.facts.kv_bytes_per_token, prompt_left)
        hosted.jobs[outcome.request_id] = job
        hosted.waiting.append(job)

    # ---- steps

    def _start(self, now: float) -> None:
        """The next step, or as many as are alike."""
        self._began = now
        busy = {name: hosted for name, hosted in self.hosted.items() if hosted.num_running or self._fits(hosted)}
        if not busy:
            return
        self._under_way = self._rounds(busy.values()) or self._step(busy)

    def _rounds(self, busy: Iterable[Hosted]) -> _Rounds | None:
        """Returns several rounds of decode steps as one event, because simulating every step would take too long. Possible only
        while all busy models do nothing but decode. In a round every model has an equal share of time: as much as the longest
        step among them. Returns None if a model has prompts, or too few steps left."""
        models = list(busy)
        if any(hosted.prompts or hosted.steps_left() < _FEWEST_ROUNDS for hosted in models):
            return None
        taken = []
        for hosted in models:
            turns = self._turns_of(hosted, models)
            if hosted.num_running < hosted.costs.max_rows(turns) and self._fits(hosted):
                return None
            rows = hosted.rows(turns)
            taken.append((hosted, rows / len(hosted.decoding), hosted.costs.seconds(rows)))
        longest_s = max(seconds for _, _, seconds in taken)
        decoded = [(hosted, part * longest_s / seconds) for hosted, part, seconds in taken]
        num = int(min(hosted.steps_left() / each for hosted, each in decoded) + _DUE)
        if len(models) > 1:
            num -= 1  # the last steps are taken in order
        return _Rounds(decoded, longest_s * len(models), num) if num >= _FEWEST_ROUNDS else None

    def _turns_of(self, hosted: Hosted, busy: Iterable[Hosted]) -> int:
        backlogged = [one.backlogged for one in busy]
        return turns_of_step(len(backlogged), sum(backlogged), hosted.backlogged)

    def _step(self, busy: Mapping[str, Hosted]) -> _Step:
        backlogged = [name for name, hosted in busy.items() if hosted.backlogged]
        name = self.turns.next(list(busy), backlogged)
        assert name is not None
        hosted, strict = busy[name], self.turns.is_over
        costs, turns = hosted.costs, self._turns_of(hosted, busy.values())
        num_wanted = hosted.num_running + len(hosted.waiting)
        hosted.backlogged = bool(turns) and costs.max_rows(1) < num_wanted
        rows = hosted.rows(turns)
        if rows and (hosted.prompts or (hosted.num_running < costs.max_rows(turns) and self._fits(hosted))):
            rows = costs.rows_beside_prompt(turns, rows, strict)
        part = rows / len(hosted.decoding) if rows else 0.0
        chunks = self._chunks(hosted, turns, rows, strict)
        return _Step(hosted, part, chunks, costs.seconds(rows, sum(tokens for _, tokens in chunks)), turns)

    def _chunks(self, hosted: Hosted, turns: int, rows: int, strict: bool) -> list[tuple[Job, int]]:
        """Prompts that are under way go on in order, then those that wait are let in, until the step is full."""
        if not (hosted.prompts or hosted.waiting):
            return []
        costs, num_prompts = hosted.costs, len(hosted.prompts) + len(hosted.waiting)
        left = costs.prompt_tokens(turns, rows, num_prompts, strict)
        chunks: list[tuple[Job, int]] = []
        most_rows = costs.max_rows(turns)
        at = 0
        while left > 0:
            if at == len(hosted.prompts) and not (hosted.num_running < most_rows and self._admit(hosted)):
                break
            job = hosted.prompts[at]
            tokens = min(left, job.prompt_left)
            chunks.append((job, tokens))
            left -= tokens
            at += 1
            if tokens < job.prompt_left:
                left = 0
                hosted.backlogged = hosted.backlogged or bool(turns)
        return chunks

    def _fits(self, hosted: Hosted) -> bool:
        """Whether there is a place in the batch and KV for the first that waits; a model's reserve holds one request of its longest
        at least."""
        if not hosted.waiting or hosted.num_running >= hosted.facts.max_sequences:
            return False
        if not hosted.num_running:
            return True
        beyond = max(0, hosted.kv_bytes + hosted.waiting[0].kv_bytes - hosted.reserved_bytes)
        others = sum(max(0, one.kv_bytes - one.reserved_bytes) for one in self.hosted.values() if one is not hosted)
        return beyond + others <= self.lease_bytes

    def _admit(self, hosted: Hosted) -> bool:
        """Lets the first that waits in."""
        if not self._fits(hosted):
            return False
        job = hosted.waiting.popleft()
        hosted.kv_bytes += job.kv_bytes
        hosted.prompts.append(job)
        return True

    def _interrupt(self) -> None:
        """Rounds end with the step under way."""
        rounds = self._under_way
        if isinstance(rounds, _Rounds):
            of_round = len(rounds.decoded)
            passed = (self._now - self._began) / rounds.round_s
            rounds.num = min(rounds.num, ceil(passed * of_round - _DUE) / of_round)

    def _settle(self, rounds: _Rounds) -> None:
        """The steps of rounds that are over by now."""
        of_round = len(rounds.decoded)
        num = min(rounds.num, int((self._now - self._began) / rounds.round_s * of_round + _DUE) / of_round)
        self._decode(rounds, num)
        self._began += num * rounds.round_s
        rounds.num -= num

    def _decode(self, rounds: _Rounds, num: float) -> None:
        for hosted, each in rounds.decoded:
            hosted.steps += num * each
            self._end_decoded(hosted)

    def _end_step(self, step: _Step, now: float) -> None:
        hosted = step.hosted
        self.turns.charge(hosted.facts.name, step.seconds, hosted.costs.turns_s(step.turns))
        hosted.steps += step.part
        self._end_decoded(hosted)
        for job, tokens in step.chunks:
            job.prompt_left -= tokens
        while hosted.prompts and not hosted.prompts[0].prompt_left:
            self._end_prompt(hosted, hosted.prompts.popleft(), now)

    def _end_decoded(self, hosted: Hosted) -> None:
        """Sequences that have all their tokens."""
        mark = hosted.steps + _DUE
        while hosted.decoding and hosted.decoding[0][0] <= mark:
            self._end(hosted, heappop(hosted.decoding)[1])

    def _end_prompt(self, hosted: Hosted, job: Job, now: float) -> None:
        outcome = job.outcome
        if outcome.first_token_s is None:
            outcome.first_token_s = now
            self.first_tokens.append(outcome)
        outcome.tokens_done += 1
        left = outcome.request.output_tokens - outcome.tokens_done
        job.tokens_at_step = hosted.steps - outcome.tokens_done
        if left <= 0:
            self._end(hosted, outcome.request_id)
        else:
            heappush(hosted.decoding, (hosted.steps + left, outcome.request_id))

    def _end(self, hosted: Hosted, request_id: int) -> None:
        job = hosted.jobs.pop(request_id)
        hosted.kv_bytes -= job.kv_bytes
        self.ended.append(job.outcome)
