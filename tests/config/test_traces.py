"""The table `[traces]` and the variables that fill it."""

from __future__ import annotations

from pathlib import Path

import pytest

from config import trace_endpoint
from config.load import ConfigError, load
from config.provenance import Sources, settings
from config.schema import TracesConfig

ALL = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "https://collector:4318/base/",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Basic%20dXNlcg%3D%3D,x-org=7",
    "OTEL_SERVICE_NAME": "node-7",
    "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
    "OTEL_TRACES_SAMPLER_ARG": "0.25",
    "OTEL_RESOURCE_ATTRIBUTES": "service.name=other,deployment.environment.name=a%2Cb",
}


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "node.toml"
    path.write_text(text)
    return str(path)


def test_nothing_is_on_by_itself() -> None:
    assert load(None, environment={}).traces == TracesConfig()
    assert not TracesConfig().endpoint


def test_the_environment_fills_what_the_file_leaves_out(tmp_path: Path) -> None:
    path = write(tmp_path, 'threads = 1\n[traces]\nservice_name = "mine"\nheaders_file = "secret.txt"\n')
    assert load(None, environment=ALL).traces == TracesConfig(
        endpoint="https://collector:4318/base/v1/traces",
        headers={"authorization": "Basic dXNlcg==", "x-org": "7"},
        sample=0.25,
        service_name="node-7",
        resource_attributes={"deployment.environment.name": "a,b"},
    )
    config = load(path, environment=ALL)
    assert (config.traces.service_name, config.traces.headers_file) == ("mine", str(tmp_path / "secret.txt"))
    rows = {row.key: row for row in settings(config, Sources(path, {}, ALL))}
    assert rows["traces.service_name"].source == f"{path}:3"
    assert rows["traces.endpoint"].source == "$OTEL_EXPORTER_OTLP_ENDPOINT"
    assert rows["traces.sample"].source == "$OTEL_TRACES_SAMPLER_ARG"
    assert rows["traces.headers"].value == {"authorization": "(hidden)", "x-org": "(hidden)"}
    assert {row.reload for key, row in rows.items() if key.startswith("traces.")} == {"live"}


def test_variables_for_traces_win(tmp_path: Path) -> None:
    own = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://other:1/ingest", "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "a=b"}
    config = load(None, environment=ALL | own).traces
    assert (config.endpoint, config.headers) == ("http://other:1/ingest", {"a": "b"})


@pytest.mark.parametrize("off", [{"OTEL_SDK_DISABLED": "TRUE"}, {"OTEL_TRACES_EXPORTER": "none"}])
def test_they_can_be_switched_off(off: dict[str, str]) -> None:
    assert load(None, environment=ALL | off).traces == TracesConfig()


@pytest.mark.parametrize(
    ("sampler", "sample"),
    [("parentbased_always_on", 1.0), ("parentbased_always_off", 0.0), ("parentbased_traceidratio", 0.25), ("", 0.25)],
)
def test_samplers(sampler: str, sample: float) -> None:
    assert load(None, environment=ALL | {"OTEL_TRACES_SAMPLER": sampler}).traces.sample == sample


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, ["OTEL_EXPORTER_OTLP_PROTOCOL", "'grpc'", "4318"]),
        ({"OTEL_TRACES_SAMPLER": "always_on"}, ["OTEL_TRACES_SAMPLER", "'always_on'", "parentbased_always_on"]),
        ({"OTEL_TRACES_SAMPLER_ARG": "often"}, ["OTEL_TRACES_SAMPLER_ARG", "'often'"]),
        ({"OTEL_TRACES_SAMPLER_ARG": "1.5"}, ["OTEL_TRACES_SAMPLER_ARG", "1.5", "at most 1"]),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "secret"}, ["OTEL_EXPORTER_OTLP_HEADERS", "name=value"]),
        ({"OTEL_EXPORTER_OTLP_HEADERS": "a=secret%0A"}, ["OTEL_EXPORTER_OTLP_HEADERS", "'a'", "printable"]),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "collector:4318"}, ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://HOST:PORT"]),
    ],
)
def test_a_variable_that_cannot_be_used(variables: dict[str, str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(None, environment=ALL | variables)
    for word in ["environment", *words]:
        assert word in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("traces = 1", ["traces", "[traces]"]),
        ("[traces]\nendpont = 'x'", ["traces.endpont", "did you mean endpoint?"]),
        ("[traces]\nendpoint = 'http://user:secret@host'", [":2:", "traces.endpoint", "headers_file"]),
        ("[traces]\nendpoint = 'unix:relative'", ["unix:/PATH"]),
        ("[traces]\nendpoint = 'ftp://host'", ["http://HOST:PORT"]),
        ("[traces]\nsample = 2", ["traces.sample", "at most 1"]),
        ("[traces]\nservice_name = ' '", ["traces.service_name", "empty"]),
        ("[traces]\nheaders = 'secret'", ["traces.headers", "a table of texts"]),
        ("[traces.headers]\n'a b' = 'secret'", ["traces.headers", "'a b'"]),
        ("[traces.headers]\nHost = 'secret'", ["'Host'", "hearthd's own"]),
        ('[traces.headers]\nx = "secret\\u000a"', ["traces.headers", "printable"]),
    ],
)
def test_a_table_that_cannot_be_used(tmp_path: Path, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        load(write(tmp_path, text), environment={})
    for word in words:
        assert word in str(error.value)
    assert "secret" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "url", "socket"),
    [
        ("http://h:4318", "http://h:4318/v1/traces", ""),
        ("https://h/", "https://h/v1/traces", ""),
        ("https://h/a/v1/traces", "https://h/a/v1/traces", ""),
        ("http://[::1]:4318", "http://[::1]:4318/v1/traces", ""),
        ("unix:/run/c.sock", "http://localhost/v1/traces", "/run/c.sock"),
        ("unix:///run/c.sock", "http://localhost/v1/traces", "/run/c.sock"),
    ],
)
def test_endpoints(text: str, url: str, socket: str) -> None:
    assert trace_endpoint.parse(text) == (url, socket)
