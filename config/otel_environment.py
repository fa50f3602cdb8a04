"""Reads the environment variables that OpenTelemetry defines for every program: they fill the keys of `[traces]` that the file
leaves out.

Source: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/ and .../protocol/exporter/
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import unquote

from config.trace_endpoint import PATH

_ENDPOINTS = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"  # for traces only, and for all signals
_HEADERS = "OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS"
_PROTOCOLS = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"
_SAMPLER, _SAMPLER_ARG = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_FIXED_SAMPLERS = {"parentbased_always_on": 1.0, "parentbased_always_off": 0.0}
_RATIO_SAMPLER = "parentbased_traceidratio"


class Given(NamedTuple):
    """The value that an environment variable sets for a key of `[traces]`. variable: the variable's name."""

    value: Any
    variable: str


class BadVariable(Exception):
    """Raised for an environment variable whose value cannot be used. variable: its name. message: what is wrong with the value."""

    def __init__(self, variable: str, message: str) -> None:
        super().__init__(f"{variable}: {message}")
        self.variable, self.message = variable, message


def given(environment: Mapping[str, str]) -> dict[str, Given]:
    """Returns the values that environment variables set: key of `[traces]` -> value and variable (Given); {} if they switch tracing
    off. An empty variable counts as unset. Raises BadVariable for a variable whose value cannot be used."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return {}
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return {}  # "none", or an exporter that hearthd does not have
    found: dict[str, Given] = {}
    endpoint = _endpoint(environment)
    if endpoint is not None:
        found["endpoint"] = endpoint
    headers = _first(environment, _HEADERS)
    if headers is not None:
        found["headers"] = Given(_pairs(headers), headers.variable)
    sample = _sample(environment)
    if sample is not None:
        found["sample"] = sample
    resource = _set(environment, "OTEL_RESOURCE_ATTRIBUTES")
    attributes = _pairs(resource) if resource is not None else {}
    name = _set(environment, "OTEL_SERVICE_NAME")
    if name is not None:
        found["service_name"] = name
    elif resource is not None and "service.name" in attributes:
        found["service_name"] = Given(attributes["service.name"], resource.variable)
    attributes.pop("service.name", None)
    if resource is not None and attributes:
        found["resource_attributes"] = Given(attributes, resource.variable)
    return found


def _set(environment: Mapping[str, str], variable: str) -> Given | None:
    value = environment.get(variable, "").strip()
    return Given(value, variable) if value else None


def _first(environment: Mapping[str, str], variables: Sequence[str]) -> Given | None:
    return next((found for variable in variables if (found := _set(environment, variable)) is not None), None)


def _endpoint(environment: Mapping[str, str]) -> Given | None:
    found, protocol = _first(environment, _ENDPOINTS), _first(environment, _PROTOCOLS)
    if found is not None and found.variable == _ENDPOINTS[1]:
        found = Given(found.value.rstrip("/") + PATH, found.variable)  # the URL is a base: each signal has its own path below it
    if found is not None and protocol is not None and protocol.value not in ("http/json", "http/protobuf"):
        raise BadVariable(
            protocol.variable,
            f"{protocol.value!r} is not spoken here; hearthd sends OTLP over HTTP (http/json), to port 4318 as a rule",
        )
    return found


def _sample(environment: Mapping[str, str]) -> Given | None:
    sampler, argument = _set(environment, _SAMPLER), _set(environment, _SAMPLER_ARG)
    if sampler is not None and sampler.value in _FIXED_SAMPLERS:
        return Given(_FIXED_SAMPLERS[sampler.value], _SAMPLER)
    if sampler is not None and sampler.value != _RATIO_SAMPLER:
        known = ", ".join([_RATIO_SAMPLER, *_FIXED_SAMPLERS])
        raise BadVariable(_SAMPLER, f"{sampler.value!r} must be one of {known}")
    if argument is None:
        return None
    try:
        return Given(float(argument.value), _SAMPLER_ARG)
    except ValueError:
        raise BadVariable(_SAMPLER_ARG, f"{argument.value!r} must be a number from 0 to 1") from None


def _pairs(found: Given) -> dict[str, str]:
    """Returns the pairs of a value such as `a=1,b=x%20y` as a dict, with the percent-encoding decoded. Raises BadVariable for a
    part that is no pair."""
    pairs = {}
    for part in found.value.split(","):
        name, equals, value = part.partition("=")
        if not part.strip():
            continue
        if not equals or not name.strip():
            raise BadVariable(found.variable, "must be pairs as in name=value,other=value, percent-encoded")  # may be a secret
        pairs[unquote(name.strip())] = unquote(value.strip())
    return pairs
