"""One HTTP request's view of the node: the models that its tenant may use, how much of the tenant's limits the request has used,
and its record for the log and the metrics.

Handlers get it as `context.models`, `context.requests` and `context.sender`, so that every call of theirs is made for its tenant.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from daemon.access.cors import expose
from daemon.access.limit_refusal import error_of
from daemon.access.quotas import Charge, OverLimit, Quotas, Standing
from daemon.access.tenant import Key
from daemon.contracts import Expectation, Generation, ModelPort, RequestPort
from daemon.errors import BadRequest
from daemon.models.asker import Asker
from daemon.models.entry import ModelEntry
from daemon.process import moment
from daemon.process.logs import fields
from daemon.process.moment import Moment

if TYPE_CHECKING:
    from daemon.traces.request_trace import RequestTrace

log = logging.getLogger("hearthd.request")
ASKED_CHARACTERS = 128  # the most characters of a client's model name that are logged


class RequestScope:
    """The ModelPort, RequestPort and SenderPort of one request, with the rights and limits of its tenant. key: the sender's key.
    headers: the answer's headers, to which the headers about the tenant's limits are added. trace: the request's trace; None while
    tracing is off. started_s: when the request arrived, in monotonic seconds."""

    __slots__ = (
        "_charge",
        "_expectation",
        "_is_charged_before",
        "_limit_headers",
        "_models",
        "_quotas",
        "_requests",
        "adapter",
        "asked",
        "generations",
        "headers",
        "key",
        "model",
        "started_s",
        "tenant",
        "trace",
    )

    def __init__(
        self,
        key: Key,
        models: ModelPort,
        requests: RequestPort,
        quotas: Quotas,
        headers: dict[str, str],
        limit_headers: Callable[[Standing, float], Mapping[str, str]],
        is_charged_before: bool = False,
    ) -> None:
        """Makes the scope of a request that has just been admitted. headers: the answer's headers; the scope adds to them.
        limit_headers: takes what is left of the tenant's limits and the Unix time, and returns the headers that tell it to the
        client. is_charged_before: whether an earlier daemon has counted the request against its tenant's limits."""
        self._is_charged_before = is_charged_before
        self.key, self.tenant, self._models, self._requests = key, key.tenant, models, requests
        self._quotas, self.headers, self._limit_headers = quotas, headers, limit_headers
        self._charge: Charge | None = None
        self._expectation: Expectation | None = None
        self.started_s = time.monotonic()
        self.model = ""  # the last model that was resolved, "" for none
        self.asked = ""  # the requested name, if it came by the table of names or is an adapter's name, else ""
        self.adapter = ""  # the adapter with which the model answers, "" for none
        self.generations: list[Generation] = []
        self.trace: RequestTrace | None = None

    # ---- ModelPort, for this tenant; the argument `asker` is ignored

    def resolve(self, name: str, asker: Asker | None = None) -> ModelEntry:
        entry = self._models.resolve(name, self.tenant)
        self.model = entry.name
        self.adapter = "" if entry.adapter is None else entry.adapter.name
        self.asked = "" if name == entry.own_name or name in entry.own_aliases else name[:ASKED_CHARACTERS]
        return entry

    def canonical(self, name: str, asker: Asker | None = None) -> str:
        return self._models.canonical(name, self.tenant)

    def knows(self, name: str, asker: Asker | None = None) -> bool:
        return self._models.knows(name, self.tenant)

    def entries(self) -> Sequence[ModelEntry]:
        entries = self._models.entries()
        return entries if self.tenant.models is None else [entry for entry in entries if self.tenant.may_use(entry.own_name)]

    def further_names(self, asker: Asker | None = None) -> Mapping[str, Sequence[str]]:
        return self._models.further_names(self.tenant)

    # ---- RequestPort

    def submit(self, generation: Generation) -> None:
        if self._charge is None:
            self.charge(len(generation.prompt), "prompt")  # in case an endpoint forgot to charge: no request is free
        generation.tenant, generation.weight = self.tenant.name, self.tenant.weight
        self.generations.append(generation)
        if self.trace is not None:
            self.trace.follow(generation)
        if self._expectation is not None:
            generation.request_id = self._expectation.request_id
        self._requests.submit(generation)
        self._expectation_over()

    def expect(self, model: ModelEntry, tenant: str = "") -> Expectation:
        """Announces to the dispatcher that a request for the model will come, while its prompt is tokenized, and returns the
        Expectation. If the tenant is over its limits, nothing is announced and the Expectation is empty. tenant: ignored, because
        the scope knows the tenant."""
        self._expectation_over()
        may_be_over = self.tenant.limits.any and not self._is_charged_before
        if may_be_over and self._quotas.is_over(self.tenant, moment.now()):
            return Expectation(0, self._expectation_over)
        self._expectation = self._requests.expect(model, self.tenant.name)
        return Expectation(self._expectation.request_id, self._expectation_over)

    def _expectation_over(self) -> None:
        if self._expectation is not None:
            over, self._expectation = self._expectation.over, None
            over()

    def cancel(self, generation: Generation) -> None:
        self._requests.cancel(generation)

    def forward(self, generation: Generation) -> None:
        if self._charge is None:
            self.charge(0, "prompt")  # see submit()
        generation.tenant = self.tenant.name
        self.generations.append(generation)
        self._requests.forward(generation)

    def forwarded(self, generation: Generation, outcome: str) -> None:
        self._requests.forwarded(generation, outcome)

    def keep_alive(self, model: ModelEntry, seconds: float) -> None:
        self._requests.keep_alive(model, seconds)

    # ---- SenderPort

    def charge(self, num_prompt_tokens: int, field: str) -> None:
        if not self.tenant.name:
            return  # no keys are set
        now = moment.now()
        if self._is_charged_before:
            self._charge = self._quotas.readmit(self.tenant, self._num_made, now)
            return
        admitted = self._quotas.admit(self.tenant, num_prompt_tokens, self._num_made, now)
        self._tell_limits(now)
        if isinstance(admitted, OverLimit):
            raise error_of(admitted, self.tenant.name, field)
        self._charge = admitted

    def priority(self, asked: int | None) -> int:
        if asked is None:
            return self.tenant.priority
        highest = self.tenant.max_priority
        if highest is not None and asked > highest:
            message = f"priority: {asked} is above {highest}, the highest that the tenant {self.tenant.name!r} may ask for"
            raise BadRequest("invalid_request", f"{message} (max_priority)", param="priority")
        return asked

    def was_charged(self) -> bool:
        """Returns whether the request was counted against the tenant's limits, by this daemon or an earlier one."""
        return self._charge is not None or self._is_charged_before

    def close(self) -> None:
        """Ends the counting of the request against the tenant's limits: adds the tokens that it has generated, and gives back the
        tokens of prompts that never reached an engine. It must be called at the request's end."""
        self._expectation_over()
        if self._charge is not None:
            charge, self._charge = self._charge, None
            now = moment.now()
            self._quotas.end(charge, sum(len(each.prompt) for each in self.generations if _is_unused(each)), now)
            self._tell_limits(now)

    def _num_made(self) -> int:
        # a prompt that another server counts was not charged at the admission, because its length was unknown
        return sum(
            len(each.output) - each.num_resumed if each.reported is None else each.num_prompt_tokens + each.num_output_tokens
            for each in self.generations
        )

    def _tell_limits(self, now: Moment) -> None:
        if self.tenant.limits.any:
            told = self._limit_headers(self._quotas.standing(self.tenant, now), now.unix_s)
            self.headers.update(told)
            expose(self.headers, told)

    # ---- the record

    def counted(self) -> dict[str, object]:
        """Returns the model, the tokens and the duration of a request that has ended, as fields of its audit log entry."""
        return {
            "model": self.model,
            **({"adapter": self.adapter} if self.adapter else {}),
            "prompt_tokens": sum(each.num_prompt_tokens for each in self.generations if not each.is_copy),
            "output_tokens": sum(each.num_output_tokens - each.num_resumed for each in self.generations),
            "duration_s": round(time.monotonic() - self.started_s, 3),
        }

    def ended(self, request_id: str, endpoint: str, status: int) -> None:
        """Writes the request's only line in the log. endpoint: its name. status: the HTTP status; 499 if the client had gone."""
        if not log.isEnabledFor(logging.INFO):
            return
        now = time.monotonic()
        record: dict[str, object] = {"request_id": request_id, "status": status}
        if self.trace is not None:
            record["trace_id"] = self.trace.trace_id
        if self.tenant.name:
            record["tenant"] = self.tenant.name
        if self.model:
            record["model"] = self.model
        if self.adapter:
            record["adapter"] = self.adapter
        if self.asked:
            record["asked"] = self.asked
        if self.generations:
            record |= _of_generations(self.generations, self.started_s)
        record["total_ms"] = _ms(now - self.started_s)
        log.info("%s", endpoint, extra=fields(**record))


def _is_unused(generation: Generation) -> bool:
    """Returns whether the prompt of this sequence was charged but never reached an engine. Of several sequences of one prompt, only
    the first can be unused, because the prompt is charged once."""
    return not generation.submitted_s and not generation.output and not generation.is_copy


def _of_generations(generations: Sequence[Generation], started_s: float) -> dict[str, object]:
    """Returns the log fields of a request's sequences: sums of their token counts, and the times of the first one. started_s: when
    the request arrived, in monotonic seconds."""
    first = generations[0]
    num_prompt = num_cached = num_output = 0
    for each in generations:
        num_prompt += each.num_prompt_tokens
        num_cached += each.num_cached
        num_output += each.num_output_tokens
    record: dict[str, object] = {
        "cause": f"req-{first.request_id}",
        **({"upstream": first.model.upstream} if first.model.upstream else {"device": first.submitted_device}),
        "prompt_tokens": num_prompt,
        "cached_tokens": num_cached,
        "output_tokens": num_output,
    }
    if first.submitted_s:
        record["queue_ms"] = _ms(first.submitted_s - first.arrived_s)
    if first.first_token_s:
        record["first_token_ms"] = _ms(first.first_token_s - started_s)
    record["finish"] = ",".join(dict.fromkeys(each.outcome or "open" for each in generations))
    return record


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
