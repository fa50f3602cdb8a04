"""The trace of one sequence, from its acceptance to its end: consecutive phases, and the loads that it waits for.

The times are those that the daemon's metrics use; nothing is measured for a trace alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from daemon.traces.otlp import Value

QUEUE, PREFILL, DECODE, PAUSED, LOAD = "queue", "prefill", "decode", "paused", "load"
WHOLE = ("embed", "score")  # tasks that an engine completes in one step; the phase has the task's name
MAX_PHASES = 64  # the most for one sequence; if it is paused again and again, only the first ones are kept


class Traced(Protocol):
    """The fields of a daemon.contracts.Generation that a trace reads."""

    prompt: list[int]
    output: list[int]
    num_cached: int
    num_resumed: int
    restored_tokens: int
    recomputed_tokens: int
    submitted_device: str
    task: str


class Phase(NamedTuple):
    """A phase of a sequence (queue, prefill, decode, ...), which becomes a span. Times are monotonic seconds. error: why it failed,
    None if it did not. link: trace and span ids of the load's own span, if the phase is a load that is traced."""

    name: str
    start_s: float
    end_s: float
    attributes: dict[str, Value]
    error: str | None = None
    link: tuple[str, str] | None = None


class Happened(NamedTuple):
    """Something that happened to a sequence at one moment, which becomes an event of the request's span. at_s: monotonic
    seconds."""

    at_s: float
    name: str
    attributes: dict[str, Value]


class FinishedLoad(NamedTuple):
    """A load of a model that has ended, for the traces of the sequences that waited for it. Times are monotonic seconds. error: why
    it failed, None if it did not. link: trace and span ids of the load's span, None if the load is not traced."""

    model: str
    started_s: float
    ended_s: float
    attributes: dict[str, Value]
    error: str | None
    link: tuple[str, str] | None


class SequenceTrace:
    """The trace of one sequence: its consecutive phases and the events in them, complete once it has ended. Times are monotonic
    seconds.

    arrived_s: when the sequence was accepted; 0.0 if it has not been. error: the code of the error with which it ended, "" if there
    was none."""

    __slots__ = (
        "_attributes",
        "_num_told",
        "_phase",
        "_recomputed",
        "_restored",
        "_since_s",
        "arrived_s",
        "error",
        "happened",
        "phases",
    )

    def __init__(self) -> None:
        self.phases: list[Phase] = []
        self.happened: list[Happened] = []
        self.arrived_s, self.error = 0.0, ""
        self._phase, self._since_s = "", 0.0
        self._attributes: dict[str, Value] = {}
        self._num_told = self._restored = self._recomputed = 0  # counts of tokens before this phase

    def accepted(self, now: float) -> None:
        self.arrived_s = now
        self._begin(QUEUE, now, {})

    @property
    def waits(self) -> bool:
        return self._phase == QUEUE

    def waits_for(self, reason: str) -> None:
        """Notes why a queued sequence does not run yet; ignored in any other phase. reason: words for operators."""
        if self._phase == QUEUE:
            self._attributes["hearth.reason"] = reason

    def submitted(self, sequence: Traced, now: float) -> None:
        """Ends the present phase and begins the phase of prefill, in which an engine computes the prompt up to the next token. For
        an embedding or a score, the new phase is the whole computation. now: monotonic seconds."""
        self._end(now)
        self._num_told = max(self._num_told, sequence.num_resumed)
        self._restored, self._recomputed = sequence.restored_tokens, sequence.recomputed_tokens
        self._begin(sequence.task if sequence.task in WHOLE else PREFILL, now, {"hearth.device": sequence.submitted_device})

    def begins_to_decode(self, sequence: Traced, now: float) -> None:
        """Ends the phase of prefill and begins that of decoding, because the prefill has produced a token. Does nothing in any
        other phase."""
        if self._phase != PREFILL:
            return
        self._tell_prefill(sequence)
        self._end(now)
        self._begin(DECODE, now, {"hearth.device": sequence.submitted_device})

    def paused(self, sequence: Traced, now: float, cause: str) -> None:
        self._close(sequence, now)
        self._begin(PAUSED, now, {"hearth.cause": cause})

    def lost_engine(self, sequence: Traced, now: float, device: str, reason: str) -> None:
        """Notes that the engine that ran the sequence has ended: an event, and a new phase of waiting for another engine. Does
        nothing if no engine runs the sequence. device: the engine's device. reason: why it has ended."""
        if self._phase in (PREFILL, DECODE, *WHOLE):
            about: dict[str, Value] = {"hearth.device": device, "hearth.reason": reason}
            self.happened.append(Happened(now, "hearth.engine_restart", about))
            self._close(sequence, now)
            self._begin(QUEUE, now, {"hearth.reason": f"the engine of {device} is started again"})

    def loaded(self, load: FinishedLoad) -> None:
        """Adds a finished load of the sequence's model as a phase, if the sequence waited for the load."""
        if self._phase in (QUEUE, PREFILL, PAUSED, *WHOLE) and load.ended_s > self._since_s:
            start_s = max(load.started_s, self.arrived_s)
            self._add(Phase(LOAD, start_s, load.ended_s, load.attributes, load.error, load.link))

    def loaded_before(self, load: FinishedLoad) -> None:
        """Adds, as a phase, a load of the sequence's model that ended before the sequence was accepted, while its prompt was being
        tokenized."""
        self._add(Phase(LOAD, load.started_s, load.ended_s, load.attributes, load.error, load.link))

    def failed(self, code: str) -> None:
        self.error = code

    def ended(self, sequence: Traced, now: float) -> None:
        self._close(sequence, now)

    # ---- phases

    def _tell_prefill(self, sequence: Traced) -> None:
        attributes = self._attributes
        attributes["hearth.prompt_tokens"] = len(sequence.prompt)
        attributes["hearth.cached_tokens"] = sequence.num_cached
        if self._is_again(sequence):
            attributes["hearth.restored_tokens"] = sequence.restored_tokens - self._restored
            attributes["hearth.recomputed_tokens"] = sequence.recomputed_tokens - self._recomputed

    def _is_again(self, sequence: Traced) -> bool:
        return sequence.num_resumed > 0 or any(phase.name == PREFILL for phase in self.phases)

    def _close(self, sequence: Traced, now: float) -> None:
        if self._phase == PREFILL:
            self._tell_prefill(sequence)
        elif self._phase == DECODE:
            self._attributes["hearth.tokens"] = len(sequence.output) - self._num_told
            self._num_told = len(sequence.output)
        elif self._phase in WHOLE:
            self._attributes["hearth.prompt_tokens"] = len(sequence.prompt)
        self._end(now)

    def _begin(self, phase: str, now: float, attributes: dict[str, Value]) -> None:
        self._phase, self._since_s, self._attributes = phase, now, attributes

    def _end(self, now: float) -> None:
        if self._phase:
            self._add(Phase(self._phase, self._since_s, now, self._attributes))
            self._phase = ""

    def _add(self, phase: Phase) -> None:
        if len(self.phases) < MAX_PHASES:
            self.phases.append(phase)


def last_end_s(traces: Sequence[SequenceTrace], otherwise: float) -> float:
    """Returns the latest end of a phase in all traces, or `otherwise` if that is later. All are monotonic seconds."""
    return max([otherwise, *(phase.end_s for trace in traces for phase in trace.phases)])
