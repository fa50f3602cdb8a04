"""What every handler needs: the ports to the rest of the daemon, settings, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from daemon.access.admission import Access
from daemon.access.quotas import Quotas
from daemon.api.background import BackgroundRuns
from daemon.api.response_store import ResponseStore
from daemon.contracts import AdapterPort, Guarded, HealthPort, HttpSettings, ModelPort, RequestPort, SenderPort
from daemon.page.feed import PageFeed
from daemon.record.audit_log import AuditLog
from daemon.streams.stream_clock import StreamClock
from daemon.text.port import TextPort
from daemon.upstreams.upstreams import Upstreams


class _NoSender:
    """Stands in where a request has no tenant: a stranger's, who is served nothing that counts."""

    def charge(self, num_prompt_tokens: int, field: str) -> None:
        raise AssertionError("charged without a tenant")

    def priority(self, asked: int | None) -> int:
        raise AssertionError("asked for without a tenant")


_NO_SENDER = _NoSender()


@dataclass(slots=True)
class ApiContext:
    requests: RequestPort
    models: ModelPort
    text: TextPort
    health: HealthPort
    settings: HttpSettings
    clock: StreamClock
    max_body_bytes: int
    stored: ResponseStore
    background: BackgroundRuns
    access: Access = field(default_factory=Access)
    serves: Callable[[Guarded], bool] = lambda endpoint: True  # whether this listener serves it
    page: PageFeed | None = None  # None: there is no status page
    more_headers: Mapping[str, str] = field(default_factory=dict)  # of this request's answer; `sender` adds to them
    answered: Callable[[str, int], None] = lambda endpoint, status: None  # counts an answer: endpoint, HTTP status
    quotas: Quotas = field(default_factory=Quotas)
    audit: AuditLog = field(default_factory=AuditLog)
    sender: SenderPort = _NO_SENDER
    upstreams: Upstreams | None = None  # None: this node answers for all its names itself
    adapters: AdapterPort | None = None  # None: none are loaded over HTTP

    def scoped(self, models: ModelPort, requests: RequestPort, sender: SenderPort, more_headers: Mapping[str, str]) -> ApiContext:
        """Returns the context of one request. It is written out because dataclasses.replace() takes longer than all of a
        request's checks."""
        return ApiContext(
            requests, models, self.text, self.health, self.settings, self.clock, self.max_body_bytes,
            self.stored, self.background, self.access, self.serves, self.page, more_headers, self.answered,
            self.quotas, self.audit, sender, self.upstreams, self.adapters,
        )  # fmt: skip
