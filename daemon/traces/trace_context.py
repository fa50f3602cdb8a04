"""Reads and makes the headers by which a request is part of its caller's trace: traceparent and tracestate
(https://www.w3.org/TR/trace-context/)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

RESPONSE_HEADER = "traceresponse"  # https://w3c.github.io/trace-context/#traceresponse-header
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?\Z", re.DOTALL)
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
_SAMPLED = 0x01
_KEY = r"(?:[a-z][a-z0-9_*/-]{0,255}|[a-z0-9][a-z0-9_*/-]{0,240}@[a-z][a-z0-9_*/-]{0,13})"
_MEMBER = re.compile(rf"{_KEY}=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e]\Z")
MAX_MEMBERS = 32
MAX_STATE_CHARACTERS = 1024  # each span repeats it; the specification asks for 512


class Parent(NamedTuple):
    """The span of the caller, as its request's headers name it. trace_id, span_id: in hexadecimal digits. state: the tracestate, ""
    for none."""

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str


def parent_of(traceparents: Sequence[str], tracestates: Sequence[str]) -> Parent | None:
    """Returns the parent span that a request's headers name. Returns None if they name none or are malformed; then a new trace
    begins. Of a header of a later version only the fields of version 00 are read."""
    if len(traceparents) != 1:
        return None
    match = _TRACEPARENT.match(traceparents[0])
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    if version == "ff" or (version == "00" and rest is not None) or trace_id == _NO_TRACE or span_id == _NO_SPAN:
        return None
    return Parent(trace_id, span_id, bool(int(flags, 16) & _SAMPLED), _state(tracestates))


def written(trace_id: str, span_id: str, is_sampled: bool) -> str:
    """Returns the value of a traceparent or traceresponse header."""
    return f"00-{trace_id}-{span_id}-{'01' if is_sampled else '00'}"


def _state(headers: Sequence[str]) -> str:
    """Returns the members of all tracestate headers, joined with commas. Members at the end are left out if the result would exceed
    MAX_STATE_CHARACTERS. Returns "" if a header is not valid or there are more than MAX_MEMBERS."""
    if not headers:
        return ""
    members = [stripped for member in ",".join(headers).split(",") if (stripped := member.strip(" \t"))]
    if len(members) > MAX_MEMBERS or not all(map(_MEMBER.match, members)):
        return ""
    while len(state := ",".join(members)) > MAX_STATE_CHARACTERS:
        members.pop()
    return state
