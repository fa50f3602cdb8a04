"""What every handler has at hand."""

from __future__ import annotations

from dataclasses import dataclass

from daemon.contracts import HealthPort, HttpSettings, ModelPort, RequestPort, TextPort
from daemon.stream_clock import StreamClock


@dataclass(slots=True, frozen=True)
class ApiContext:
    requests: RequestPort
    models: ModelPort
    text: TextPort
    health: HealthPort
    settings: HttpSettings
    clock: StreamClock
    max_body_bytes: int
