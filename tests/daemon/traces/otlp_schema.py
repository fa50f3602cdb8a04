"""Reads an OTLP request for traces in JSON, strictly: every field must be one of trace.proto's, of its type and form.

Source: opentelemetry-proto, trace/v1/trace.proto, common/v1/common.proto, resource/v1/resource.proto, and the rules for JSON in
https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

REPEATED = "repeated "
MESSAGES: dict[str, dict[str, str]] = {
    "ExportTraceServiceRequest": {"resourceSpans": "repeated ResourceSpans"},
    "ResourceSpans": {"resource": "Resource", "scopeSpans": "repeated ScopeSpans", "schemaUrl": "string"},
    "Resource": {"attributes": "repeated KeyValue", "droppedAttributesCount": "uint32"},
    "ScopeSpans": {"scope": "InstrumentationScope", "spans": "repeated Span", "schemaUrl": "string"},
    "InstrumentationScope": {"name": "string", "version": "string", "attributes": "repeated KeyValue"},
    "Span": {
        "traceId": "id16",
        "spanId": "id8",
        "traceState": "string",
        "parentSpanId": "id8",
        "flags": "uint32",
        "name": "string",
        "kind": "SpanKind",
        "startTimeUnixNano": "fixed64",
        "endTimeUnixNano": "fixed64",
        "attributes": "repeated KeyValue",
        "events": "repeated Event",
        "links": "repeated Link",
        "status": "Status",
    },
    "Event": {"timeUnixNano": "fixed64", "name": "string", "attributes": "repeated KeyValue"},
    "Link": {"traceId": "id16", "spanId": "id8", "traceState": "string", "attributes": "repeated KeyValue"},
    "Status": {"message": "string", "code": "StatusCode"},
    "KeyValue": {"key": "string", "value": "AnyValue"},
    "AnyValue": {
        "stringValue": "string",
        "boolValue": "bool",
        "intValue": "int64",
        "doubleValue": "double",
        "arrayValue": "ArrayValue",
    },
    "ArrayValue": {"values": "repeated AnyValue"},
}
REQUIRED = {
    "Span": ("traceId", "spanId", "name", "kind", "startTimeUnixNano", "endTimeUnixNano"),
    "KeyValue": ("key", "value"),
    "Event": ("timeUnixNano", "name"),
    "Link": ("traceId", "spanId"),
}
TEXTS = {"id16": r"(?!0{32})[0-9a-f]{32}", "id8": r"(?!0{16})[0-9a-f]{16}", "fixed64": r"[1-9]\d{0,19}", "int64": r"-?\d{1,19}"}
NUMBERS = {"uint32": 1 << 32, "SpanKind": 6, "StatusCode": 3}


@dataclass
class SpanRead:
    """A span with plain values. resource: its resource's attributes."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    links: list[tuple[str, str]]
    state: str
    status: dict[str, Any]
    resource: dict[str, Any] = field(repr=False)


def read(body: bytes) -> list[SpanRead]:
    """Returns the spans of a request. Raises AssertionError naming the field that is wrong."""
    request = json.loads(body)
    check("ExportTraceServiceRequest", request, "")
    found = []
    for resource in request["resourceSpans"]:
        about = _plain(resource["resource"]["attributes"])
        assert about.get("service.name"), "a resource without service.name"
        found += [_span(span, about) for scope in resource["scopeSpans"] for span in scope["spans"]]
    ids = [span.span_id for span in found]
    assert len(ids) == len(set(ids))
    return found


def check(kind: str, value: Any, where: str) -> None:
    if kind.startswith(REPEATED):
        assert isinstance(value, list), where
        for at, each in enumerate(value):
            check(kind.removeprefix(REPEATED), each, f"{where}[{at}]")
    elif kind in MESSAGES:
        assert isinstance(value, dict), where
        for name, each in value.items():
            assert name in MESSAGES[kind], f"{where}.{name} is no field of {kind}"
            check(MESSAGES[kind][name], each, f"{where}.{name}")
        for name in REQUIRED.get(kind, ()):
            assert name in value, f"{where} has no {name}"
        assert kind != "AnyValue" or len(value) == 1, f"{where}: {value}"
    elif kind in TEXTS:
        assert isinstance(value, str), where
        assert re.fullmatch(TEXTS[kind], value), f"{where}: {value!r} is no {kind}"
    elif kind in NUMBERS:
        assert type(value) is int, where
        assert 0 <= value < NUMBERS[kind], f"{where}: {value}"
    else:
        assert type(value) in {"string": (str,), "bool": (bool,), "double": (float, int)}[kind], f"{where}: {value!r} is no {kind}"


def _plain(pairs: list[dict[str, Any]]) -> dict[str, Any]:
    keys = [pair["key"] for pair in pairs]
    assert len(keys) == len(set(keys)), f"an attribute twice: {keys}"
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    ((kind, plain),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in plain["values"]]
    return int(plain) if kind == "intValue" else plain


def _span(span: dict[str, Any], resource: dict[str, Any]) -> SpanRead:
    return SpanRead(
        name=span["name"],
        kind=span["kind"],
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        attributes=_plain(span.get("attributes", [])),
        events=[(each["name"], int(each["timeUnixNano"]), _plain(each.get("attributes", []))) for each in span.get("events", [])],
        links=[(each["traceId"], each["spanId"]) for each in span.get("links", [])],
        state=span.get("traceState", ""),
        status=span.get("status", {}),
        resource=resource,
    )


def request_of(spans: list[SpanRead], trace_id: str) -> tuple[SpanRead, list[SpanRead]]:
    """Returns a request's own span and those below it, by their begin, after looking at what holds for all of them: they are its
    children, have its state, and lie within it."""
    mine = [span for span in spans if span.trace_id == trace_id]
    (own,) = [span for span in mine if span.kind == 2]
    children = sorted((span for span in mine if span is not own), key=lambda span: (span.start_ns, span.end_ns))
    for span in children:
        assert span.parent_id == own.span_id, span
        assert span.state == own.state, span
        assert own.start_ns <= span.start_ns <= span.end_ns <= own.end_ns, span
    for _, at_ns, _ in own.events:
        assert own.start_ns <= at_ns <= own.end_ns
    return own, children
