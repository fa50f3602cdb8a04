"""What every handler needs: the ports to the rest of the daemon, settings, limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from daemon.access.admission import Access
from daemon.api.response_store import ResponseStore
from daemon.contracts import Guarded, HealthPort, HttpSettings, ModelPort, RequestPort
from daemon.page.feed import PageFeed
from daemon.streams.stream_clock import StreamClock
from daemon.text.port import TextPort


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
    access: Access = field(default_factory=Access)
    serves: Callable[[Guarded], bool] = lambda endpoint: True  # whether this listener serves it
    page: PageFeed | None = None  # None: there is no status page
    more_headers: Mapping[str, str] = field(default_factory=dict)  # of this request's answer
    answered: Callable[[str, int], None] = lambda endpoint, status: None  # counts an answer: endpoint, HTTP status

    def scoped(self, models: ModelPort, requests: RequestPort, more_headers: Mapping[str, str]) -> ApiContext:
        """Returns the context of one request. It is written out because dataclasses.replace() takes longer than all of a
        request's checks."""
        return ApiContext(
            requests, models, self.text, self.health, self.settings, self.clock, self.max_body_bytes,
            self.stored, self.access, self.serves, self.page, more_headers, self.answered,
        )  # fmt: skip
