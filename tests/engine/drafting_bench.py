"""Runs requests through an engine's parts in one process (constraints, batch scheduler, model), with drafts and without, so that
tests and benchmarks/lossless.py can compare what comes out.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from engine.contracts.loads import LocksMasks
from engine.contracts.steps import HostedModel
from engine.protocol import LoadModel, RequestFailed, SamplingParams, Submit, TokensOut
from engine.serve.answers import answer
from engine.serve.constraints import Constraints
from engine.serve.kv_caches import make_kv_cache
from engine.serve.requests import batch_request
from engine.serve.served_models import Place, ServedModel
from scheduler.batch.batch_scheduler import BatchLimits, BatchScheduler
from scheduler.batch.chunk_pool import ChunkPool
from scheduler.batch.drafting import Drafter
from scheduler.batch.plan import IntArray
from scheduler.batch.step_limits import StepLimits
from scheduler.batch.step_room import StepRoom

NO_CHUNKS: IntArray = np.zeros(0, np.int32)
NOBODY = np.zeros(0, np.int64)
SAFETY_S = 60.0


@dataclass(slots=True)
class Answer:
    """What a client gets. logprobs: one entry a token, (the token's own, ids of alternatives, theirs)."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[float, list[int], list[float]]] = field(default_factory=list)
    finish: int = 0
    error: str = ""


@dataclass(slots=True)
class Run:
    """Requests that ran to their ends. num_decode_rows: rows of steps that only decoded. seconds: all of it, from the first request
    on."""

    answers: dict[int, Answer]
    num_steps: int = 0
    num_decode_rows: int = 0
    num_drafted: int = 0
    num_held: int = 0
    seconds: float = 0.0


class Bench:
    """A model that is loaded, and what its requests need. spec: its checkpoint's folder is read for grammars. locks: page-locks
    masks."""

    def __init__(
        self,
        model: HostedModel,
        spec: LoadModel,
        num_chunks: int,
        chunk_bytes: int,
        batched_tokens: int = 64,
        locks: LocksMasks | None = None,
    ) -> None:
        self.model, self.spec, self._batched_tokens, self._locks = model, spec, batched_tokens, locks
        self._chunks = num_chunks, chunk_bytes

    def run(
        self,
        requests: dict[int, tuple[list[int], SamplingParams]],
        drafter: Drafter | None = None,
        jumps: bool = True,
        limits: StepLimits | None = None,
        preempt_at: int = -1,
        kill_at: int = -1,
        at_once: int = 0,
    ) -> Run:
        """Runs requests, given as (prompt, settings). jumps: whether what a grammar forces is drafted. limits: decide how many
        drafts are worth their rows; None: all are. preempt_at, kill_at: a step behind which a sequence is
        preempted, and one behind which the grammar process is killed. at_once: requests that
        are there at a time; 0: all."""
        done = Run({request_id: Answer() for request_id in requests})
        left, waiting = len(requests), iter(requests.items())
        constraints, served = Constraints(self._locks), self._served(drafter, jumps or drafter is not None)
        scheduler = served.scheduler
        poller = select.poll()
        poller.register(constraints.fileno(), select.POLLIN)
        began_s = time.monotonic()
        try:
            open_ = 0
            while left:
                assert time.monotonic() < began_s + SAFETY_S * (1 + len(requests) / 50), "requests do not end"
                ends = []
                for request_id, (prompt, params) in islice(waiting, (at_once or left) - open_):
                    request = batch_request(Submit(request_id, self.spec.model, prompt, params), self.spec, self.model.vocab_size)
                    assert request is not None
                    assert not isinstance(request, RequestFailed), request
                    ends += constraints.submit(served, request, params, [])
                    open_ += 1
                ends += constraints.receive() + constraints.ready(served)
                for end in ends:
                    done.answers[end.request_id].finish, done.answers[end.request_id].error = 1, end.error
                left, open_ = left - len(ends), open_ - len(ends)
                plan = scheduler.plan(done.num_steps, StepRoom(limits))
                if plan is None:
                    if not ends and left and open_ == (at_once or open_):
                        poller.poll(1000)
                    continue
                done.num_steps += 1
                masks = constraints.masks(served, plan)
                result = self.model.execute(plan, scheduler.table, masks)
                asked = scheduler.table.request_id[plan.slots]
                outcome = scheduler.finish_step(plan, result.ids, result.bad)
                assert not outcome.bad, f"rows of {outcome.bad} are not finite"
                if masks is not None:
                    constraints.sampled(served, masks, outcome)
                if limits is not None:
                    limits.note(plan, result.seconds)
                if plan.all_decode:
                    done.num_decode_rows += len(plan.slots)
                told = answer(served, plan, result, outcome, asked)
                assert isinstance(told, TokensOut)
                ended = deliver(done, told)
                for request_id in ended:
                    constraints.drop(self.spec.model, request_id)
                left, open_ = left - len(ended), open_ - len(ended)
                if done.num_steps == preempt_at:
                    scheduler.preempt_one()
                if done.num_steps == kill_at:
                    os.kill(constraints._models[self.spec.model].port.pid, signal.SIGKILL)
        finally:
            done.seconds = time.monotonic() - began_s
            constraints.close(self.spec.model)
        return done

    def _served(self, drafter: Drafter | None, drafts: bool) -> ServedModel:
        num_chunks, chunk_bytes = self._chunks
        spec = self.spec
        kv = make_kv_cache(spec, self.model.kv_groups, ChunkPool(num_chunks, chunk_bytes, num_chunks), self._batched_tokens)
        limits = BatchLimits(
            spec.max_sequences, spec.max_model_len, self._batched_tokens, tuple(spec.eos_token_ids), "f", spec.kv_dtype
        )
        scheduler = BatchScheduler(spec.model, kv, limits, drafter)
        if not drafts:
            scheduler._drafts = None
        return ServedModel(spec, self.model, scheduler, Place(NO_CHUNKS, NO_CHUNKS), StepLimits(0.01, 2.0))


def deliver(done: Run, told: TokensOut) -> list[int]:
    """Adds a step's tokens to the answers, as the daemon does, and returns the requests that ended."""
    logprobs, start = told.logprobs, 0
    if logprobs is not None:
        for request_id, chosen, count in zip(logprobs.request_ids, logprobs.chosen, logprobs.counts, strict=True):
            entry = chosen, logprobs.top_ids[start : start + count], logprobs.top[start : start + count]
            done.answers[request_id].logprobs.append(entry)
            start += count
    ids = iter(told.ids)
    for request_id, count in zip(told.request_ids, told.counts or [1] * len(told.request_ids), strict=True):
        done.answers[request_id].tokens += islice(ids, count)
    done.num_drafted += sum(told.drafted)
    done.num_held += len(told.ids) - len(told.request_ids)
    ended = [request_id for request_id, finish in zip(told.request_ids, told.finish, strict=False) if finish]
    for request_id, finish in zip(told.request_ids, told.finish, strict=False):
        done.answers[request_id].finish = finish or done.answers[request_id].finish
    return ended


def differences(plain: dict[int, Answer], drafted: dict[int, Answer], tolerance: float = 1e-5) -> list[str]:
    """Returns in which answers to the same requests differ: texts, ends, and log-probabilities by more than `tolerance`."""
    found = []
    for request_id, one in plain.items():
        other = drafted[request_id]
        if (one.tokens, one.finish, one.error) != (other.tokens, other.finish, other.error):
            found.append(f"request {request_id}: {one} and {other}")
            continue
        if len(one.logprobs) != len(other.logprobs) or (one.logprobs and len(one.logprobs) != len(one.tokens)):
            found.append(f"request {request_id}: {len(one.logprobs)} and {len(other.logprobs)} log-probabilities")
        for own, others in zip(one.logprobs, other.logprobs, strict=False):
            apart = [abs(a - b) for a, b in zip([own[0], *own[2]], [others[0], *others[2]], strict=True)]
            if max(apart) > tolerance:
                found.append(f"request {request_id}: log-probabilities differ by {max(apart)}")
    return found


def knowing(texts: dict[int, list[int]], accuracy: float, vocab_size: int, of: Sequence[int] | None = None) -> Drafter:
    """Returns a drafter that knows whole texts (prompt and output), and errs at each token with 1 - accuracy. of: the requests that
    it drafts for."""
    known = [text for request_id, text in texts.items() if of is None or request_id in of]
    rng = np.random.default_rng(0)

    def draft(tokens: IntArray, num: int) -> IntArray:
        so_far = tokens.tolist()
        text: list[int] = next((one for one in known if one[: len(so_far)] == so_far), so_far)
        right = text[len(so_far) : len(so_far) + num]
        return np.array([token if rng.random() < accuracy else (token + 1) % vocab_size for token in right], np.int32)

    return draft
