"""The trace of one request: a span for the request, and child spans for the phases of its sequences."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from daemon.traces import trace_context
from daemon.traces.otlp import INTERNAL, SERVER, Event, Span, Value
from daemon.traces.sequence_trace import Happened, Phase, SequenceTrace, Traced, last_end_s

MAX_SEQUENCES = 16  # the most sequences of one request that have spans of their own
PREPARE = "prepare"


class Holder(Traced, Protocol):
    trace: SequenceTrace | None


class Ended(NamedTuple):
    """The facts that the span of an ended request contains. name: the span's name. error: why the request failed, None if it did
    not."""

    name: str
    attributes: Mapping[str, Value]
    error: str | None


class RequestTrace:
    """The trace of one request. If it is not sampled, it has ids but makes no spans.

    trace_id, span_id: in hexadecimal digits. parent_id: the caller's span, "" for none. state: the value of the header tracestate.
    is_sampled: whether spans are made. began_ns: Unix time in nanoseconds at which the request began, possibly in an earlier
    daemon. started_s: monotonic seconds at which it began in this daemon."""

    __slots__ = (
        "_is_taken_over", "_num_left_out", "_offset_ns", "_sequences", "began_ns", "is_sampled", "parent_id", "span_id",
        "started_s", "state", "trace_id",
    )  # fmt: skip

    def __init__(
        self,
        trace_id: str,
        span_id: str,
        parent: trace_context.Parent | None,
        is_sampled: bool,
        started_s: float,
        offset_ns: int,
        began_ns: int,
    ) -> None:
        """parent: the caller's span; None: there is none. started_s: monotonic seconds. offset_ns: what to add to monotonic
        nanoseconds to get Unix time; it stays the same for the whole request, even if the clock is set meanwhile. began_ns: Unix
        time in nanoseconds at which the request began in an earlier daemon; 0: it begins in this daemon."""
        self.trace_id, self.span_id, self.is_sampled = trace_id, span_id, is_sampled
        self.parent_id, self.state = (parent.span_id, parent.state) if parent is not None else ("", "")
        self.started_s, self._offset_ns = started_s, offset_ns
        self._is_taken_over = began_ns > 0
        own_ns = self._ns(started_s)
        self.began_ns = min(began_ns, own_ns) if began_ns else own_ns
        self._sequences: list[SequenceTrace] = []
        self._num_left_out = 0

    @property
    def traceresponse(self) -> str:
        return trace_context.written(self.trace_id, self.span_id, self.is_sampled)

    def follow(self, sequence: Holder) -> None:
        """Sets `sequence.trace`, so that the phases of the sequence become spans of this trace. Does nothing if the trace is not
        sampled; sequences beyond the first MAX_SEQUENCES are only counted."""
        if not self.is_sampled:
            return
        if len(self._sequences) == MAX_SEQUENCES:
            self._num_left_out += 1
            return
        sequence.trace = SequenceTrace()
        self._sequences.append(sequence.trace)

    @property
    def error(self) -> str:
        """Returns the code of the error with which the first failed sequence ended, or "" if none failed."""
        return next((each.error for each in self._sequences if each.error), "")

    def ended(self, told: Ended, now: float) -> list[Span]:
        """Returns all spans of a request that has ended: its own first, then those of its sequences' phases. now: monotonic
        seconds."""
        end_ns = self._ns(last_end_s(self._sequences, now))
        attributes = dict(told.attributes)
        if self._num_left_out:
            attributes["hearth.sequences_left_out"] = self._num_left_out
        happened = [(at, event) for at, each in enumerate(self._sequences) for event in each.happened]
        events = [Event(self._ns(event.at_s), event.name, self._of(at, event)) for at, event in happened]
        if self._is_taken_over:
            events.insert(0, Event(self._ns(self.started_s), "hearth.taken_over_after_restart", {}))
        own = Span(
            told.name,
            SERVER,
            self.trace_id,
            self.span_id,
            self.parent_id,
            self.began_ns,
            end_ns,
            attributes,
            events,
            told.error,
            self.state,
        )
        return [own, *self._children()]

    def handed_over(self) -> list[Span]:
        """Returns the spans of the phases in this daemon, for a request that the next daemon continues. The next daemon makes the
        span of the request itself, under the same id."""
        return self._children()

    def _children(self) -> list[Span]:
        arrivals = [each.arrived_s for each in self._sequences if each.arrived_s]
        before = [Phase(PREPARE, self.started_s, min(arrivals), {})] if arrivals else []
        spans = [self._span(phase, phase.attributes) for phase in before]
        for at, each in enumerate(self._sequences):
            spans += [self._span(phase, self._of(at, phase)) for phase in each.phases]
        return spans

    def _span(self, phase: Phase, attributes: Mapping[str, Value]) -> Span:
        start_ns = max(self._ns(phase.start_s), self.began_ns)
        end_ns = max(self._ns(phase.end_s), start_ns)
        links = [phase.link] if phase.link is not None else []
        ids = self.trace_id, secrets.token_hex(8), self.span_id
        return Span(phase.name, INTERNAL, *ids, start_ns, end_ns, attributes, (), phase.error, self.state, links)

    def _of(self, at: int, what: Phase | Happened) -> Mapping[str, Value]:
        """Returns the attributes of a phase or an event. If the request has several sequences, the sequence's number is added. at:
        that number, from 0."""
        return {**what.attributes, "hearth.sequence": at} if len(self._sequences) > 1 else what.attributes

    def _ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns
