"""The context that every handler needs: the ports to the rest of the daemon, settings, limits."""

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
    """The sender of a request that has no tenant: one without a key although keys are set. Its methods raise AssertionError,
    because such a request is served only by endpoints that charge no tokens."""

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
    serves: Callable[[Guarded], bool] = lambda endpoint: True  # tells whether this listener serves an endpoint
    page: PageFeed | None = None  # None: there is no status page
    more_headers: Mapping[str, str] = field(default_factory=dict)  # headers of this request's answer; `sender` adds to them
    answered: Callable[[str, int], None] = lambda endpoint, status: None  # counts an answer: endpoint, HTTP status
    quotas: Quotas = field(default_factory=Quotas)
    audit: AuditLog = field(default_factory=AuditLog)
    sender: SenderPort = _NO_SENDER
    upstreams: Upstreams | None = None  # None: no other server answers for this node's names
    adapters: AdapterPort | None = None  # None: adapters cannot be loaded over HTTP

    def scoped(
        self, models: ModelPort, requests: RequestPort, text: TextPort, sender: SenderPort, more_headers: Mapping[str, str]
    ) -> ApiContext:
        """Returns a copy of this context for one request, with the given ports and sender. more_headers: the headers of the
        request's answer."""
        # dataclasses.replace() would take longer than all checks of a request together
        return ApiContext(
            requests, models, text, self.health, self.settings, self.clock, self.max_body_bytes,
            self.stored, self.background, self.access, self.serves, self.page, more_headers, self.answered,
            self.quotas, self.audit, sender, self.upstreams, self.adapters,
        )  # fmt: skip
