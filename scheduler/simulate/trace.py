"""One line of a trace: who asked for what, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """`time_s`: seconds since the trace's beginning."""

    time_s: float
    model: str
    input_tokens: int
    output_tokens: int
