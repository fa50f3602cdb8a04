"""One HTTP request's view of the node: the models its tenant may use, and a record for the log and the metrics.

Handlers get it as `context.models` and `context.requests`, so none of them can forget whose request it is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from daemon.access.keys import Tenant
from daemon.contracts import Generation, ModelPort, RequestPort
from daemon.models.asker import Asker
from daemon.models.entry import ModelEntry
from daemon.process.logs import fields

log = logging.getLogger("hearthd.request")
ASKED_CHARACTERS = 128  # of a name that a client chose, in the log


class RequestScope:
    """ModelPort and RequestPort of one request."""

    __slots__ = ("_models", "_requests", "_started_s", "asked", "generations", "model", "tenant")

    def __init__(self, tenant: Tenant, models: ModelPort, requests: RequestPort) -> None:
        self.tenant, self._models, self._requests = tenant, models, requests
        self._started_s = time.monotonic()
        self.model = ""  # the last one asked for, if there is such a one
        self.asked = ""  # the name that the table of names led to it, if one did
        self.generations: list[Generation] = []

    # ---- ModelPort, for this tenant; an `asker` is not looked at

    def resolve(self, name: str, asker: Asker | None = None) -> ModelEntry:
        entry = self._models.resolve(name, self.tenant)
        self.model = entry.name
        self.asked = "" if name == entry.name or name in entry.aliases else name[:ASKED_CHARACTERS]
        return entry

    def canonical(self, name: str, asker: Asker | None = None) -> str:
        return self._models.canonical(name, self.tenant)

    def knows(self, name: str, asker: Asker | None = None) -> bool:
        return self._models.knows(name, self.tenant)

    def entries(self) -> Sequence[ModelEntry]:
        entries = self._models.entries()
        return entries if self.tenant.models is None else [entry for entry in entries if self.tenant.may_use(entry.name)]

    def further_names(self, asker: Asker | None = None) -> Mapping[str, Sequence[str]]:
        return self._models.further_names(self.tenant)

    # ---- RequestPort

    def submit(self, generation: Generation) -> None:
        generation.tenant, generation.weight = self.tenant.name, self.tenant.weight
        self.generations.append(generation)
        self._requests.submit(generation)

    def cancel(self, generation: Generation) -> None:
        self._requests.cancel(generation)

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
        if self.asked:
            record["asked"] = self.asked
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
