"""Switches the node's tracing on and off, as the settings say. Tracing is off unless the settings name a collector; a reload of the
settings may switch it. The modules that it needs are imported only when it is switched on."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING

from config import trace_endpoint
from config.schema import TracesConfig
from daemon.process.long_tasks import LongTasks
from daemon.process.version import VERSION
from daemon.traces.span_counts import SpanCounts

if TYPE_CHECKING:
    from daemon.traces.exporter import Exporter
    from daemon.traces.otlp import Value
    from daemon.traces.tracer import Tracer


class Traces:
    """Switches tracing on and off as the settings say, and holds the tracer. tracer: None while tracing is off. The methods are
    called on the event loop."""

    def __init__(self, tasks: LongTasks) -> None:
        self.tracer: Tracer | None = None
        self.counts = SpanCounts()
        self._tasks = tasks
        self._exporter: Exporter | None = None
        self._used: tuple[TracesConfig, Mapping[str, str]] = TracesConfig(), {}

    def use(self, config: TracesConfig, headers: Mapping[str, str]) -> None:
        """Applies the settings of `[traces]`. headers: HTTP headers for the collector. Spans that are queued for an earlier
        collector are still sent to that one."""
        if self._used == (config, headers):
            return
        if self._exporter is not None:
            self._tasks.once("sending the last traces", self._exporter.close())
        self._used, self.tracer, self._exporter = (config, headers), None, None
        if not config.endpoint:
            return
        from daemon.traces.exporter import Exporter
        from daemon.traces.tracer import Tracer

        self._exporter = Exporter(trace_endpoint.parse(config.endpoint), headers, _resource(config), self.counts)
        self.tracer = Tracer(config.sample, self._exporter.add)
        self._tasks.start("sending traces", self._exporter.run)

    def problems(self) -> list[str]:
        """Returns the problems for `hearth status`: a sentence while spans cannot be sent, [] otherwise."""
        return self._exporter.problems() if self._exporter is not None else []

    async def close(self) -> None:
        """Switches tracing off and sends the queued spans, if the collector accepts them within about a second."""
        self.tracer = None
        if self._exporter is not None:
            await self._exporter.close()


def _resource(config: TracesConfig) -> bytes:
    from daemon.traces.otlp import resource_json

    host = socket.gethostname()
    own: dict[str, Value] = {
        "service.name": config.service_name,
        "service.version": VERSION,
        "service.instance.id": f"{host}:{os.getpid()}",
        "host.name": host,
        "process.pid": os.getpid(),
    }
    return resource_json({**own, **config.resource_attributes})
