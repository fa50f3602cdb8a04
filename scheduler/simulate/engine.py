"""Simulates the engine of one device, step by step. Which model's step is next is decided by scheduler/batch/turns.py, and how
large it may be by the engine's own rules (`steps`). While all models only decode, many steps are simulated as one event.

A model that is split over several devices is hosted by the engine of the first one, which plans its steps. Each of these steps
begins when all of the model's devices are free, and occupies them all. Between two of these steps, the model's further devices each
run a step of their own models, if one is due.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil
from types import MappingProxyType

from scheduler.batch.step_limits import PATIENT_STEPS, most_running, turns_of_step
from scheduler.batch.turns import Turns
from scheduler.node.events import ModelFacts
from scheduler.simulate.costs import Costs
from scheduler.simulate.outcome import RequestOutcome
from scheduler.simulate.steps import ModelSteps, StepSettings

_DUE = 1e-6  # tolerance for rounding, as a fraction of a step
_FEWEST_ROUNDS = 2  # fewest rounds that are worth simulating as one event
NOTHING_RESTORED: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """A request's sequence in the simulated engine. prompt_left: how many tokens must still be computed before the sequence
    decodes; tokens whose KV was restored with the model are not included."""

    outcome: RequestOutcome
    kv_bytes: int
    prompt_left: int
    tokens_at_step: float = 0.0  # number of its model's steps when it began to decode, minus the tokens that it had then


@dataclass(slots=True, eq=False)
class Hosted:
    """A model that is loaded on the simulated device.

    reserved_bytes: its reserved KV. costs: how large its steps may be and how long they take. followers: if the model is split, the
    engines of its further devices, which take part in the steps that this engine plans.

    steps: the number of decode steps so far, as each of its sequences sees it: a step without room for all decoding sequences
    counts as the fraction that it has room for, because the sequences alternate. When a sequence begins to decode, the value of
    `steps` at which it will end is computed."""

    facts: ModelFacts
    reserved_bytes: int
    costs: ModelSteps
    followers: tuple[SimulatedEngine, ...] = ()
    steps: float = 0.0
    waiting: deque[SimulatedSequence] = field(default_factory=deque)  # sequences that wait for a place in the batch or for KV
    prompts: deque[SimulatedSequence] = field(default_factory=deque)
    decoding: list[tuple[float, int]] = field(default_factory=list)  # heap of (mark, request)
    sequences: dict[int, SimulatedSequence] = field(default_factory=dict)  # all sequences by request id
    restored: dict[int, int] = field(default_factory=dict)  # request to be submitted again -> tokens whose KV was restored
    kv_bytes: int = 0
    backlogged: bool = False  # there was more to do than fits a turn when its latest step was planned
    passed_over: float = 0.0  # steps since the last admission that had no room for one sequence more, though one waits

    @property
    def num_running(self) -> int:
        return len(self.prompts) + len(self.decoding)

    def kv_tokens(self) -> dict[int, int]:
        """Returns request id -> number of tokens whose KV exists, in the order in which the requests were submitted."""
        found = {request_id: self._kv_tokens(sequence) for request_id, sequence in self.sequences.items()}
        return {request_id: num_tokens for request_id, num_tokens in found.items() if num_tokens > 0}

    def _kv_tokens(self, sequence: SimulatedSequence) -> int:
        request = sequence.outcome.request
        if sequence.prompt_left:
            return request.input_tokens + sequence.outcome.tokens_done - sequence.prompt_left
        return request.input_tokens + int(self.steps - sequence.tokens_at_step + _DUE) - 1

    def rows(self, turns: int) -> int:
        """Returns how many sequences decode in a step that may take `turns` turns (a turn is a model's time slice of the device).
        0: the step may take any time, so all decoding sequences take part."""
        return min(len(self.decoding), self.costs.max_rows(turns)) if turns else len(self.decoding)

    def most_running(self, turns: int) -> int:
        """Returns the number of running sequences from which on no further request is admitted (BatchScheduler.plan). turns: how
        many turns (time slices of a model) a step may take; 0: any time."""
        return most_running(self.costs.max_rows(turns), int(self.passed_over))

    def pass_over(self, steps: float, turns: int) -> None:
        """Adds `steps` to `passed_over`, the count of steps since the last admission in which a request waited although the running
        sequences filled a whole step. Sets the count to 0 if no request waits. turns: how many turns (time slices of the device) a
        step may take; 0: any time, so that nothing is counted."""
        if not self.waiting:
            self.passed_over = 0.0
        elif turns and self.num_running >= self.costs.max_rows(turns):
            self.passed_over += steps

    def steps_left(self) -> float:
        """Returns the number of steps until the next sequence ends; 0.0 if none decodes."""
        return self.decoding[0][0] - self.steps if self.decoding else 0.0


@dataclass(slots=True)
class _Step:
    """One step of one model. hosted: the model. part: the fraction of the model's decoding sequences that take part in the step.
    chunks: for each chunk of a prompt that the step computes, the sequence and the chunk's number of tokens. seconds: the step's
    length, including wait_s, the time in which it waits for other devices. turns: how many turns (time slices of the device) it was
    planned to take."""

    hosted: Hosted
    part: float
    chunks: list[tuple[SimulatedSequence, int]]
    seconds: float
    wait_s: float
    turns: int  # number of turns that it was planned to take


@dataclass(slots=True)
class _Joined:
    """A step of a split model in which this device takes part, although the engine of the model's first device has planned it.
    until: when the step ends."""

    until: float


@dataclass(slots=True)
class _Rounds:
    """Several rounds of decode steps, simulated as one event. In a round, each model that decodes has an equal share of the time,
    in which it runs as many steps as fit.

    decoded: a tuple of four values for each model. The first is the model. The second is how many steps of a round a single
    sequence takes part in. The third is how many steps the model runs in a round; this is more than the second if not all of its
    sequences fit one step, because they then alternate. (Both numbers may be fractions.) The fourth is how many turns a step may
    take: a turn is a time slice of the device, and models with more work than fits one may use several in a single step.

    round_s: seconds of a round. num: number of rounds, which may be a fraction."""

    decoded: list[tuple[Hosted, float, float, int]]
    round_s: float
    num: float


class SimulatedEngine:
    """The engine of one device. lease_bytes: KV that its models may use beyond what is reserved for them. `advance` moves the time.
    Requests that are submitted between two calls of `advance` take part from the next step on."""

    def __init__(self, costs: Costs, settings: StepSettings) -> None:
        self.costs, self.settings = costs, settings
        self.lease_bytes = 0
        self.first_tokens: list[RequestOutcome] = []  # outcomes added since the caller last took them
        self.ended: list[RequestOutcome] = []
        self.hosted: dict[str, Hosted] = {}
        self.turns = Turns()
        self._followed: dict[str, Hosted] = {}  # models with a share on this device that other engines lead
        self._joined_until = 0.0  # the end of the last step that another engine leads
        self._steps: dict[str, ModelSteps] = {}  # step limits of all models that were ever hosted
        self._under_way: _Step | _Rounds | _Joined | None = None
        self._began = self._now = 0.0  # beginning of what is under way; latest time passed to `advance`

    # ---- time

    def next_at(self) -> float | None:
        """Returns when the step under way, or the rounds (several decode steps simulated as one event), will end. Starts the next
        step or rounds if none are under way; returns None if there is nothing to run."""
        if self._under_way is None:
            self._start(self._now)
        step = self._under_way
        if step is None:
            return None
        if isinstance(step, _Joined):
            return step.until
        return self._began + (step.seconds if isinstance(step, _Step) else step.num * step.round_s)

    def advance(self, now: float) -> None:
        """Moves the time to `now` and ends the steps that are over by then. Requests that got their first token or ended are
        appended to `first_tokens` and `ended`, which the caller empties."""
        while (at := self.next_at()) is not None and at <= now:
            step, self._under_way = self._under_way, None
            self._now = at
            if isinstance(step, _Step):
                self._end_step(step, at)
            elif isinstance(step, _Rounds):
                self._decode(step, step.num)
            self._start(at)
        self._now = max(self._now, now)
        if isinstance(self._under_way, _Rounds):
            self._account(self._under_way)

    # ---- models

    def host(
        self,
        facts: ModelFacts,
        reserved_bytes: int,
        restored: Mapping[int, int] = NOTHING_RESTORED,
        followers: Iterable[SimulatedEngine] = (),
    ) -> None:
        """Adds a loaded model. reserved_bytes: the size of its reserved KV. restored: request id -> number of tokens whose KV was
        restored, used when that request is submitted again. followers: if the model is split, the engines of its further devices,
        which take part in the steps that this engine plans."""
        steps = self._steps.get(facts.name)
        if steps is None:
            steps = self._steps[facts.name] = ModelSteps(self.settings, self.costs.step_seconds(facts))
        hosted = self.hosted[facts.name] = Hosted(facts, reserved_bytes, steps, tuple(followers), restored=dict(restored))
        for engine in hosted.followers:
            engine._followed[facts.name] = hosted
        self.turns.add(facts.name)

    def end_step_of(self, name: str) -> float:
        """Ends the running step of a model that is about to be evicted, as if it were over, and returns the seconds that the step
        would still take; 0.0 if no step of the model runs. A sequence that would end with this step does not end: it gets its last
        token when the model is back."""
        self._interrupt()
        step, hosted = self._under_way, self.hosted[name]
        if not isinstance(step, _Step) or step.hosted is not hosted:
            return 0.0
        self._under_way = None
        ends_at = self._began + step.seconds
        if hosted.steps_left() > step.part:
            hosted.steps += step.part
        for sequence, tokens in step.chunks:
            request = sequence.outcome.request
            if tokens == sequence.prompt_left and request.output_tokens > sequence.outcome.tokens_done + 1:
                sequence.prompt_left = 0
                hosted.prompts.remove(sequence)
                self._end_prompt(hosted, sequence, ends_at)
            else:
                sequence.prompt_left = max(1, sequence.prompt_left - tokens)
        return ends_at - self._now

    def drop(self, name: str) -> list[RequestOutcome]:
        """Evicts a model. Returns the requests that were running on it, which keep the tokens that they have so far."""
        self._interrupt()
        if isinstance(self._under_way, _Rounds):
            self._under_way = None
        hosted = self.hosted.pop(name)
        for engine in hosted.followers:
            del engine._followed[name]
        self.turns.remove(name)
        for _, request_id in hosted.decoding:
            sequence = hosted.sequences[request_id]
            sequence.outcome.tokens_done = int(hosted.steps - sequence.tokens_at_step + _DUE)
        return [sequence.outcome for sequence in hosted.sequences.values()]

    def kv_bytes(self) -> dict[str, int]:
        """Returns model -> bytes of the KV of its running sequences."""
        return {name: hosted.kv_bytes for name, hosted in self.hosted.items()}

    def waiting(self) -> dict[str, int]:
        """Returns model -> number of its requests that have not begun."""
        return {name: len(hosted.waiting) for name, hosted in self.hosted.items() if hosted.waiting}

    def set_lease(self, lease_bytes: int) -> None:
        self._interrupt()
        self.lease_bytes = lease_bytes

    def submit(self, outcome: RequestOutcome, replica: str = "") -> None:
        """Queues a request. outcome: the request and its results so far, such as the number of tokens generated before it was
        paused; the engine adds to it. replica: name of the replica to which the request goes; "": the model itself."""
        self._interrupt()
        request = outcome.request
        hosted = self.hosted[replica or request.model]
        tokens = request.input_tokens + request.output_tokens
        restored = hosted.restored.pop(outcome.request_id, 0)
        prompt_left = max(1, request.input_tokens + outcome.tokens_done - restored)
        sequence = SimulatedSequence(outcome, tokens * hosted.facts.kv_bytes_per_token, prompt_left)
        hosted.sequences[outcome.request_id] = sequence
        hosted.waiting.append(sequence)

    # ---- steps of split models

    def free_at(self, now: float) -> float:
        """Returns when this device is free to take part in a step of a split model, which the engine of the model's first device
        plans at the time `now`. If a step of a split model has just ended here, this device's own models run one step first, if any
        has work."""
        self._now = max(self._now, now)
        self._interrupt()
        if isinstance(self._under_way, _Joined) and self._under_way.until <= now:
            self._under_way = None
        return max(now, self.next_at() or now)

    def join(self, until: float) -> None:
        """Occupies this device, from the end of its current step until the time `until`, with a step of a split model that the
        engine of the model's first device has planned."""
        self._joined_until = until

    def _busy_followed(self) -> list[Hosted]:
        return [hosted for hosted in self._followed.values() if hosted.num_running]

    # ---- steps

    def _start(self, now: float) -> None:
        """Starts the next step, or several rounds of steps if all models only decode."""
        self._began = now
        if self._joined_until > now:
            self._under_way = _Joined(self._joined_until)
            return
        busy = {name: hosted for name, hosted in self.hosted.items() if hosted.num_running or self._fits(hosted)}
        if not busy:
            return
        self._under_way = self._rounds(busy.values()) or self._step(busy, now)

    def _rounds(self, busy: Iterable[Hosted]) -> _Rounds | None:
        """Returns several rounds of decode steps as one event, because simulating every step would take too long. In a round every
        model has an equal share of time, which is as long as the longest step of any of them.

        Returns None if single steps must be simulated: if a model computes prompts, could admit a request, or has few steps left
        until a sequence ends, or if a split model is busy here."""
        models = list(busy)
        if self._busy_followed():
            return None
        if any(hosted.followers or hosted.prompts or hosted.steps_left() < _FEWEST_ROUNDS for hosted in models):
            return None
        taken = []
        for hosted in models:
            turns = self._turns_of(hosted, models)
            if hosted.num_running < hosted.most_running(turns) and self._fits(hosted):
                return None
            rows = hosted.rows(turns)
            taken.append((hosted, rows / len(hosted.decoding), hosted.costs.seconds(rows), turns))
        longest_s = max(seconds for _, _, seconds, _ in taken)
        decoded = [(hosted, part * longest_s / seconds, longest_s / seconds, turns) for hosted, part, seconds, turns in taken]
        num = int(min(hosted.steps_left() / each for hosted, each, _, _ in decoded) + _DUE)
        for hosted, _, steps, turns in decoded:
            if turns and self._fits(hosted):
                patience = PATIENT_STEPS * (hosted.num_running // hosted.costs.max_rows(turns)) - hosted.passed_over
                num = min(num, ceil(patience / steps))
        if len(models) > 1:
            num -= 1  # the last steps are simulated one by one
        return _Rounds(decoded, longest_s * len(models), num) if num >= _FEWEST_ROUNDS else None

    def _turns_of(self, hosted: Hosted, busy: Iterable[Hosted]) -> int:
        backlogged = [one.backlogged for one in busy]  # a follower does not know that of models that others lead
        return turns_of_step(len(backlogged) + len(self._busy_followed()), sum(backlogged), hosted.backlogged)

    def _step(self, busy: Mapping[str, Hosted], now: float) -> _Step:
        backlogged = [name for name, hosted in busy.items() if hosted.backlogged]
        name = self.turns.next(list(busy), backlogged)
        assert name is not None
        hosted, strict = busy[name], self.turns.is_over
        costs, turns = hosted.costs, self._turns_of(hosted, busy.values())
        num_wanted = hosted.num_running + len(hosted.waiting)
        hosted.backlogged = bool(turns) and costs.max_rows(1) < num_wanted
        rows = hosted.rows(turns)
        if hosted.num_running:
            hosted.pass_over(1, turns)
        if rows and (hosted.prompts or (hosted.num_running < hosted.most_running(turns) and self._fits(hosted))):
            rows = costs.rows_beside_prompt(turns, rows, strict)
        part = rows / len(hosted.decoding) if rows else 0.0
        chunks = self._chunks(hosted, turns, rows, strict, now)
        wait_s = max((engine.free_at(now) for engine in hosted.followers), default=now) - now
        seconds = wait_s + costs.seconds(rows, sum(tokens for _, tokens in chunks))
        for engine in hosted.followers:
            engine.join(now + seconds)
        return _Step(hosted, part, chunks, seconds, wait_s, turns)

    def _chunks(self, hosted: Hosted, turns: int, rows: int, strict: bool, now: float) -> list[tuple[SimulatedSequence, int]]:
        """Returns (sequence, number of tokens) for each chunk of a prompt that a step computes: prompts that have begun continue in
        order, then waiting requests are admitted, until the step is full.

        turns: how many turns (time slices of the device) the step may take; 0: any time. rows: how many sequences decode in it.
        strict: True: the step is to end within its turns. False: if even the cheapest step with a chunk of a prompt is longer, the
        step may take as long as that one (at most two turns)."""
        if not (hosted.prompts or hosted.waiting):
            return []
        costs, num_prompts = hosted.costs, len(hosted.prompts) + len(hosted.waiting)
        left = costs.prompt_tokens(turns, rows, num_prompts, strict)
        chunks: list[tuple[SimulatedSequence, int]] = []
        most_rows = hosted.most_running(turns)
        at = 0
        while left > 0:
            if at == len(hosted.prompts) and not (hosted.num_running < most_rows and self._admit(hosted, now)):
                break
            sequence = hosted.prompts[at]
            tokens = min(left, sequence.prompt_left)
            chunks.append((sequence, tokens))
            left -= tokens
            at += 1
            if tokens < sequence.prompt_left:
                left = 0
                hosted.backlogged = hosted.backlogged or bool(turns)
        return chunks

    def _fits(self, hosted: Hosted) -> bool:
        """Returns whether the model's first waiting request could be admitted now: there is one, a place in the batch is free, and
        so is enough KV. If no other request of the model runs, there always is enough KV, because a model's reserved KV holds at
        least one request of full length."""
        if not hosted.waiting or hosted.num_running >= hosted.facts.max_sequences:
            return False
        if not hosted.num_running:
            return True
        beyond = max(0, hosted.kv_bytes + hosted.waiting[0].kv_bytes - hosted.reserved_bytes)
        if hosted.facts.is_split:
            return not beyond
        others = sum(max(0, one.kv_bytes - one.reserved_bytes) for one in self.hosted.values() if one is not hosted)
        return beyond + others <= self.lease_bytes

    def _admit(self, hosted: Hosted, now: float) -> bool:
        """Admits the first waiting request of a model, if it fits, so that its prompt is computed next. Returns whether it was
        admitted."""
        if not self._fits(hosted):
            return False
        sequence = hosted.waiting.popleft()
        sequence.outcome.began_s = now
        hosted.kv_bytes += sequence.kv_bytes
        hosted.prompts.append(sequence)
        hosted.passed_over = 0.0
        return True

    def _interrupt(self) -> None:
        """Shortens the rounds under way (several decode steps simulated as one event) so that they end with the step that is
        running now. Does nothing if a single step is under way."""
        rounds = self._under_way
        if isinstance(rounds, _Rounds):
            of_round = len(rounds.decoded)
            passed = (self._now - self._began) / rounds.round_s
            rounds.num = min(rounds.num, ceil(passed * of_round - _DUE) / of_round)

    def _account(self, rounds: _Rounds) -> None:
        """Updates the models by those steps of `rounds` (several decode steps simulated as one event) that have ended by now, and
        removes these steps from `rounds`."""
        of_round = len(rounds.decoded)
        num = min(rounds.num, int((self._now - self._began) / rounds.round_s * of_round + _DUE) / of_round)
        self._decode(rounds, num)
        self._began += num * rounds.round_s
        rounds.num -= num

    def _decode(self, rounds: _Rounds, num: float) -> None:
        for hosted, each, steps, turns in rounds.decoded:
            hosted.pass_over(num * steps, turns)
            hosted.steps += num * each
            self._end_decoded(hosted)

    def _end_step(self, step: _Step, now: float) -> None:
        hosted = step.hosted
        turns_s = hosted.costs.turns_s(step.turns)
        self.turns.charge(hosted.facts.name, step.seconds, turns_s)
        if hosted.followers:
            hosted.costs.note_wait(step.wait_s)
        hosted.steps += step.part
        self._end_decoded(hosted)
        for sequence, tokens in step.chunks:
            sequence.prompt_left -= tokens
        while hosted.prompts and not hosted.prompts[0].prompt_left:
            self._end_prompt(hosted, hosted.prompts.popleft(), now)

    def _end_decoded(self, hosted: Hosted) -> None:
        """Ends the sequences that have reached their number of tokens."""
        mark = hosted.steps + _DUE
        while hosted.decoding and hosted.decoding[0][0] <= mark:
            self._end(hosted, heappop(hosted.decoding)[1])

    def _end_prompt(self, hosted: Hosted, sequence: SimulatedSequence, now: float) -> None:
        outcome = sequence.outcome
        if outcome.first_token_s is None:
            outcome.first_token_s = now
            self.first_tokens.append(outcome)
        outcome.tokens_done += 1
        left = outcome.request.output_tokens - outcome.tokens_done
        sequence.tokens_at_step = hosted.steps - outcome.tokens_done
        if left <= 0:
            self._end(hosted, outcome.request_id)
        else:
            heappush(hosted.decoding, (hosted.steps + left, outcome.request_id))

    def _end(self, hosted: Hosted, request_id: int) -> None:
        sequence = hosted.sequences.pop(request_id)
        hosted.kv_bytes -= sequence.kv_bytes
        self.ended.append(sequence.outcome)
