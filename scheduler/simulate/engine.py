"""One device's engine: its models share the device's time evenly while they have work, each runs its prompts first and then decodes
all its sequences together. Between two events every rate is constant, so nothing is stepped token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush
from types import MappingProxyType

from scheduler.node.events import ModelFacts
from scheduler.simulate.costs import Costs
from scheduler.simulate.outcome import RequestOutcome

_DUE_S = 1e-9
NOTHING_RESTORED: Mapping[int, int] = MappingProxyType({})


@dataclass(slots=True, eq=False)
class Job:
    """A request in the engine. `restored_tokens`: whose KV came back with the model; they are not computed again."""

    outcome: RequestOutcome
    kv_bytes: int
    restored_tokens: int = 0
    tokens_at_step: float = 0.0  # steps of its model when it began to decode, less the tokens it had then


@dataclass(slots=True, eq=False)
class Hosted:
    """A loaded model. `steps`: decode steps so far; a sequence ends when they reach its mark."""

    facts: ModelFacts
    reserved_bytes: int
    fixed_s: float
    each_s: float
    steps: float = 0.0
    waiting: deque[Job] = field(default_factory=deque)  # for a place in the batch or for KV
    prompts: deque[Job] = field(default_factory=deque)
    prompt_left_s: float = 0.0
    decoding: list[tuple[float, int]] = field(default_factory=list)  # heap of (mark, request)
    jobs: dict[int, Job] = field(default_factory=dict)  # all of them
    restored: dict[int, int] = field(default_factory=dict)  # request that is to come back -> tokens whose KV is there
    kv_bytes: int = 0

    @property
    def active(self) -> bool:
        return bool(self.prompts or self.decoding)

    @property
    def num_running(self) -> int:
        return len(self.prompts) + len(self.decoding)

    def kv_tokens(self) -> dict[int, int]:
        """Request -> tokens whose KV is there, in the order in which they came."""
        decoding = {request_id for _, request_id in self.decoding}
        return {
            request_id: num_tokens
            for request_id, job in self.jobs.items()
            if (num_tokens := self._kv_tokens(job, request_id in decoding))
        }

    def _kv_tokens(self, job: Job, decodes: bool) -> int:
        """Of a prompt that is under way nothing but what was restored counts."""
        if not decodes:
            return job.restored_tokens
        return job.outcome.request.input_tokens + int(self.steps - job.tokens_at_step)

    def step_s(self) -> float:
        return self.fixed_s + self.each_s * len(self.decoding)

    def need_s(self) -> float:
        """Device seconds to its next event."""
        if self.prompts:
            return self.prompt_left_s
        return max(0.0, self.decoding[0][0] - self.steps) * self.step_s()

    def spend(self, device_s: float) -> None:
        if self.prompts:
            self.prompt_left_s -= device_s
        else:
            self.steps += device_s / self.step_s()


class SimulatedEngine:
    """`lease_bytes`: KV its models may use beyond their reserves."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs
        self.lease_bytes = 0
        self.first_tokens: list[RequestOutcome] = []  # since they were last taken
        self.hosted: dict[str, Hosted] = {}
        self._active: dict[str, Hosted] = {}
        self._at = 0.0

    def next_at(self) -> float | None:
        """When something of it ends next."""
        if not self._active:
            return None
        return self._at + min(hosted.need_s() for hosted in self._active.values()) * len(self._active)

    def advance(self, now: float) -> None:
        if self._active and now > self._at:
            share_s = (now - self._at) / len(self._active)
            for hosted in self._active.values():
                hosted.spend(share_s)
        self._at = max(self._at, now)

    def host(self, facts: ModelFacts, reserved_bytes: int, restored: Mapping[int, int] = NOTHING_RESTORED) -> None:
        """`restored`: request -> tokens whose KV comes with the model, for when it is submitted again."""
        self.hosted[facts.name] = Hosted(facts, reserved_bytes, *self.costs.decode_s(facts), restored=dict(restored))

    def kv_bytes(self) -> dict[str, int]:
        """What running sequences have taken, by model."""
        return {name: hosted.kv_bytes for name, hosted in self.hosted.items()}

    def waiting(self) -> dict[str, int]:
        """Requests that have not begun, by model."""
        return {name: len(hosted.waiting) for name, hosted in self.hosted.items() if hosted.waiting}

    def drop(self, name: str) -> list[RequestOutcome]:
        """Evicts; what ran there keeps the tokens it has and is returned."""
        hosted = self.hosted.pop(name)
        self._active.pop(name, None)
        for _, request_id in hosted.decoding:
            job = hosted.jobs[request_id]
            job.outcome.tokens_done = int(hosted.steps - job.tokens_at_step)
        return [job.outcome for job in hosted.jobs.values()]

    def submit(self, outcome: RequestOutcome) -> None:
        hosted = self.hosted[outcome.request.model]
        tokens = outcome.request.input_tokens + outcome.request.output_tokens
        restored = hosted.restored.pop(outcome.request_id, 0)
        job = Job(outcome, tokens * hosted.facts.kv_bytes_per_token, restored)
        hosted.jobs[outcome.request_id] = job
        hosted.waiting.append(job)
        self.admit(hosted)

    def admit(self, hosted: Hosted) -> None:
        """Takes in what has a place in the batch and KV; a model's reserve holds one request of its longest at least."""
        while hosted.waiting and hosted.num_running < hosted.facts.max_sequences:
            job = hosted.waiting[0]
            beyond = max(0, hosted.kv_bytes + job.kv_bytes - hosted.reserved_bytes)
            others = sum(max(0, one.kv_bytes - one.reserved_bytes) for one in self.hosted.values() if one is not hosted)
            if hosted.num_running and beyond + others > self.lease_bytes:
                break
            hosted.waiting.popleft()
            hosted.kv_bytes += job.kv_bytes
            if not hosted.prompts:
                hosted.prompt_left_s = self._prompt_s(job)
            hosted.prompts.append(job)
        if hosted.active:
            self._active[hosted.facts.name] = hosted

    def _prompt_s(self, job: Job) -> float:
        request = job.outcome.request
        num_tokens = request.input_tokens + job.outcome.tokens_done - job.restored_tokens
        return self.costs.prefill_s(self.hosted[request.model].facts, max(1, num_tokens))

    def collect(self, now: float) -> list[RequestOutcome]:
        """What is finished by now; first tokens are noted in the outcomes, and here until somebody takes them."""
        ended: list[RequestOutcome] = []
        for hosted in list(self._active.values()):
            if hosted.need_s() > _DUE_S:
                continue
            if hosted.prompts:
                self._end_prompt(hosted, now, ended)
            else:
                mark = hosted.steps + _DUE_S
                while hosted.decoding and hosted.decoding[0][0] <= mark:
                    self._end(hosted, heappop(hosted.decoding)[1], ended)
            self.admit(hosted)
            if not hosted.active:
                del self._active[hosted.facts.name]
        if ended:
            for hosted in self.hosted.values():  # KV that was freed may be what another waits for
                if hosted.waiting:
                    self.admit(hosted)
        return ended

    def _end_prompt(self, hosted: Hosted, now: float, ended: list[RequestOutcome]) -> None:
        job = hosted.prompts.popleft()
        if hosted.prompts:
            hosted.prompt_left_s = self._prompt_s(hosted.prompts[0])
        outcome = job.outcome
        if outcome.first_token_s is None:
            outcome.first_token_s = now
            self.first_tokens.append(outcome)
        outcome.tokens_done += 1
        left = outcome.request.output_tokens - outcome.tokens_done
        job.tokens_at_step = hosted.steps - outcome.tokens_done
        if left <= 0:
            self._end(hosted, outcome.request_id, ended)
        else:
            heappush(hosted.decoding, (hosted.steps + left, outcome.request_id))

    def _end(self, hosted: Hosted, request_id: int, ended: list[RequestOutcome]) -> None:
        job = hosted.jobs.pop(request_id)
        hosted.kv_bytes -= job.kv_bytes
        ended.append(job.outcome)
