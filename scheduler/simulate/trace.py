"""Defines the requests of which a trace consists, each with its time, its model and the lengths of its prompt and answer in
tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class TraceRequest:
    """One request of a trace. time_s: seconds since the beginning of the trace. input_tokens, output_tokens: the lengths of its
    prompt and its answer."""

    time_s: float
    model: str
    input_tokens: int
    output_tokens: int
