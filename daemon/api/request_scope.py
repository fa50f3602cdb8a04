"""One HTTP request's view of the node: the models its tenant may use, and a record for the log and the metrics.

Handlers get it as `context.models` and `context.requests`, so none of them can forget whose request it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from daemon.access.keys import Tenant
from daemon.contracts import Generation, ModelPort, RequestPort
from daemon.errors import HearthError, no_model
from daemon.models.entry import ModelEntry
from daemon.process.logs import fields

log = logging.getLogger("hearthd.request")


class RequestScope:
    """ModelPort and RequestPort of one request."""

    __slots__ = ("_models", "_requests", "_started_s", "generations", "model", "tenant")

    def __init__(self, tenant: Tenant, models: ModelPort, requests: RequestPort) -> None:
        self.tenant, self._models, self._requests = tenant, models, requests
        self._started_s = time.monotonic()
        self.model = ""  # the last one asked for, if there is such a one
        self.generations: list[Generation] = []

    # ---- ModelPort

    def resolve(self, name: str) -> ModelEntry:
        if self.tenant.models is not None and not self.tenant.may_use(self._name_of(name)):
            raise no_model(name)
        entry = self._models.resolve(name)
        self.model = entry.name
        return entry

    def canonical(self, name: str) -> str:
        found = self._models.canonical(name)
        if not self.tenant.may_use(found):
            raise no_model(name)
        return found

    def entries(self) -> Sequence[ModelEntry]:
        entries = self._models.entries()
        return entries if self.tenant.models is None else [entry for entry in entries if self.tenant.may_use(entry.name)]

    def _name_of(self, name: str) -> str:
        try:
            return self._models.canonical(name)
        except HearthError:
            raise no_model(name) from None

    # ---- RequestPort

    def submit(self, generation: Generation) -> None:
        generation.tenant, generation.weight = self.tenant.name, self.tenant.weight
        self.generations.append(generation)
        self._requests.submit(generation)

    def cancel(self, generation: Generation) -> None:
        self._requests.cancel(generation)

    def keep_alive(self, model: ModelEntry, seconds: float) -> None:
        self._requests.keep_alive(model, seconds)

    # ---- the record

    def ended(self, request_id: str, endpoint: str, status: int) -> None:
        """Writes the one line that a request leaves in the log. status: HTTP; 499 if the client had gone."""
        if not log.isEnabledFor(logging.INFO):
            return
        now = time.monotonic()
        record: dict[str, object] = {"request_id": request_id, "status": status}
        if self.tenant.name:
            record["tenant"] = self.tenant.name
        if self.model:
            record["model"] = self.model
        if self.generations:
            record |= _of_generations(self.generations, self._started_s)
        record["total_ms"] = _ms(now - self._started_s)
        log.info("%s", endpoint, extra=fields(**record))


def _of_generations(generations: Sequence[Generation], started_s: float) -> dict[str, object]:
    """Returns what the log says of a request's sequences. Counts are of all of them, times of the first."""
    first = generations[0]
    record: dict[str, object] = {
        "cause": f"req-{first.request_id}",
        "device": first.submitted_device,
        "prompt_tokens": sum(len(each.prompt) for each in generations),
        "cached_tokens": sum(each.num_cached for each in generations),
        "output_tokens": sum(len(each.output) for each in generations),
    }
    if first.submitted_s:
        record["queue_ms"] = _ms(first.submitted_s - first.arrived_s)
    if first.first_token_s:
        record["first_token_ms"] = _ms(first.first_token_s - started_s)
    record["finish"] = ",".join(dict.fromkeys(each.outcome or "open" for each in generations))
    return record


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
