"""Decides which requests and loads are traced, and gives their spans to the exporter."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from daemon.traces import otlp, trace_context
from daemon.traces.otlp import INTERNAL, Span, Value
from daemon.traces.request_trace import Ended, RequestTrace
from daemon.traces.sequence_trace import FinishedLoad
from scheduler.node.groups import joined

MAX_LOADS = 256  # the most loads in progress that are traced; further ones are not


class Load(Protocol):
    """The fields of a scheduler.node.actions.Load that a trace reads."""

    @property
    def placement_id(self) -> int: ...
    @property
    def model(self) -> str: ...
    @property
    def leases(self) -> Mapping[str, int]: ...
    @property
    def reason(self) -> str: ...
    @property
    def weights_chunks(self) -> int: ...


class _OpenLoad:
    """A load of a model in progress, whose span is made at its end. devices: its device, or all devices that the model is split
    over. started_s: monotonic seconds. trace_id, span_id: in hexadecimal digits."""

    __slots__ = ("attributes", "devices", "model", "span_id", "started_s", "trace_id")

    def __init__(self, load: Load, weights_bytes: int, now: float) -> None:
        self.model, self.started_s = load.model, now
        self.devices = tuple(load.leases)
        self.trace_id, self.span_id = secrets.token_hex(16), secrets.token_hex(8)
        self.attributes: dict[str, Value] = {
            "hearth.model": load.model,
            "hearth.device": joined(self.devices),
            "hearth.load.reason": load.reason,
            "hearth.load.weights_bytes": weights_bytes,
        }


class Tracer:
    """Makes the traces of requests and loads; each load is a trace of its own. Times are monotonic seconds."""

    def __init__(self, sample: float, export: Callable[[bytes, int], None]) -> None:
        """sample: the share, from 0 to 1, of traces that are sampled; for a request whose caller has a trace, the caller's flag
        decides. export: takes encoded spans and how many they are."""
        self._below = round(sample * (1 << 64))
        self._out = export
        self._loads: dict[int, _OpenLoad] = {}  # by placement id

    def _is_sampled(self, trace_id: str) -> bool:
        """Returns whether a trace without a parent is sampled, by the rule of OpenTelemetry's TraceIdRatioBased."""
        return int(trace_id[16:], 16) < self._below

    def begin(
        self, traceparents: Sequence[str], tracestates: Sequence[str], drawn: bytes, started_s: float, began_ns: int = 0
    ) -> RequestTrace:
        """Returns the trace of a request that has just arrived, as a part of its caller's trace if the headers name one.
        traceparents, tracestates: the values of the headers with these names. drawn: 24 or more random bytes, from which the ids
        are made; they must be the same for a request that began in an earlier daemon. started_s: when the request began in this
        daemon. began_ns: Unix time in nanoseconds at which it began in an earlier daemon; 0: the request is new."""
        parent = trace_context.parent_of(traceparents, tracestates)
        trace_id = parent.trace_id if parent is not None else drawn[:16].hex()
        is_sampled = parent.is_sampled if parent is not None else self._is_sampled(trace_id)
        return RequestTrace(trace_id, drawn[16:24].hex(), parent, is_sampled, started_s, _offset_ns(), began_ns)

    def ended(self, trace: RequestTrace, told: Ended, now: float) -> None:
        """Exports the spans of a sampled request that has ended. told: what the request's span says about the request. now:
        monotonic seconds."""
        self._export(trace.ended(told, now))

    def handed_over(self, trace: RequestTrace) -> None:
        """Exports the spans of this daemon's part of a request that the next daemon continues."""
        if trace.is_sampled and (spans := trace.handed_over()):
            self._export(spans)

    def _export(self, spans: Sequence[Span]) -> None:
        self._out(otlp.encoded(spans), len(spans))

    # ---- loads

    def load_sent(self, load: Load, weights_bytes: int, now: float) -> None:
        if len(self._loads) < MAX_LOADS:
            self._loads[load.placement_id] = _OpenLoad(load, weights_bytes, now)

    def load_ended(
        self, placement_id: int, now: float, attributes: dict[str, Value] | None = None, error: str | None = None
    ) -> FinishedLoad | None:
        """Ends the trace of a load, exports its span if it is sampled, and returns the load; None if its beginning was not traced.
        attributes: attributes that the span gets besides those of the load's beginning. error: why the load failed; None: it did
        not."""
        load = self._loads.pop(placement_id, None)
        return None if load is None else self._finish(load, now, attributes or {}, error)

    def loads_lost(self, device: str, now: float, reason: str) -> list[FinishedLoad]:
        """Ends as failed the loads in progress on a device whose engine has ended. Exports the spans of those that are sampled, and
        returns the loads. reason: why they failed."""
        lost = [placement_id for placement_id, load in self._loads.items() if device in load.devices]
        return [self._finish(self._loads.pop(placement_id), now, {}, reason) for placement_id in lost]

    def _finish(self, load: _OpenLoad, now: float, attributes: dict[str, Value], error: str | None) -> FinishedLoad:
        told = load.attributes | attributes
        ids = load.trace_id, load.span_id
        is_sampled = self._is_sampled(load.trace_id)
        if is_sampled:
            offset_ns = _offset_ns()
            start_ns, end_ns = (int(each * 1e9) + offset_ns for each in (load.started_s, now))
            self._export([Span(f"load {load.model}", INTERNAL, *ids, "", start_ns, end_ns, told, (), error)])
        return FinishedLoad(load.model, load.started_s, now, told, error, ids if is_sampled else None)


def _offset_ns() -> int:
    """Returns what has to be added to the monotonic clock to get Unix time, in nanoseconds."""
    return time.time_ns() - time.monotonic_ns()
