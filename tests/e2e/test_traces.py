"""Traces of a real node: a cold model's first request, a crash, switching off, a collector that hangs, a restart."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from daemon.traces import exporter
from tests.daemon.service_manager import NotifySocket
from tests.daemon.traces.collector import CollectorThread
from tests.daemon.traces.otlp_schema import SpanRead, request_of
from tests.e2e.checkpoints import make_model
from tests.e2e.node import SAFETY_S, Node
from tests.e2e.raw_stream import RawStream
from tests.e2e.service_node import ServiceNode

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CHAT = {"model": "mid", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}
ENDLESS = {"model": "mid", "prompt": "once upon a time", "max_tokens": 100, "ignore_eos": True, "stream": True}


@pytest.fixture
def collector() -> Iterator[CollectorThread]:
    with CollectorThread() as running:
        yield running


def config(url: str, more: str = "") -> str:
    return f'[traces]\nendpoint = "{url}"\n{more}'


def ask(node: Node, body: dict[str, Any], **headers: str) -> tuple[Any, Any]:
    """Returns the answer and its headers."""
    request = urllib.request.Request(
        node.url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=SAFETY_S) as answer:
        return json.loads(answer.read()), answer.headers


def has_request(trace_id: str = "") -> Any:
    """Returns what says whether the span of a request has arrived, with all below it, which come together."""
    return lambda spans: any(span.kind == 2 and span.trace_id.startswith(trace_id) for span in spans)


def the_request(spans: list[SpanRead]) -> tuple[SpanRead, list[SpanRead]]:
    (own,) = [span for span in spans if span.kind == 2]
    return request_of(spans, own.trace_id)


def test_requests_a_crash_and_switching_off(tmp_path: Path, collector: CollectorThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "node-7")
    make_model(tmp_path / "n" / "models" / "mid")
    (tmp_path / "n" / "secret").write_text("Authorization: Bearer top-secret\n")
    with Node(tmp_path / "n", config=config(collector.url, 'headers_file = "secret"\n'), null_step_ms=15.0) as node:
        began_ns = time.time_ns()
        answer, headers = ask(node, CHAT, traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="a=b", **{"X-Request-Id": "mine"})
        ended_ns = time.time_ns()
        own, children = request_of(collector.wait_for(has_request(TRACE), "the request"), TRACE)
        assert headers["traceresponse"] == f"00-{TRACE}-{own.span_id}-01"
        assert (own.name, own.parent_id, own.state, own.resource["service.name"]) == ("chat mid", SPAN, "a=b", "node-7")
        assert began_ns <= own.start_ns <= own.end_ns <= ended_ns
        told = own.attributes
        usage = answer["usage"]
        assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"] > 0
        assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 5
        assert (told["gen_ai.response.finish_reasons"], told["hearth.request_id"]) == (["length"], "mine")
        by_name = {span.name: span for span in children}
        assert sorted(by_name) == sorted(span.name for span in children) == ["decode", "load", "prefill", "prepare", "queue"]
        assert by_name["prepare"].end_ns == by_name["queue"].start_ns
        assert by_name["queue"].end_ns == by_name["prefill"].start_ns
        assert by_name["prefill"].end_ns == by_name["decode"].start_ns
        assert by_name["decode"].attributes["hearth.tokens"] == 5
        assert own.start_ns <= by_name["load"].start_ns <= by_name["prepare"].end_ns, "it did not wait for the prompt"
        assert by_name["load"].attributes["hearth.load.source"] == "disk"
        assert by_name["load"].attributes["hearth.load.read_bytes"] > 0
        assert collector.collector.headers["Authorization"] == "Bearer top-secret"
        assert f"request_id=mine status=200 trace_id={TRACE} model=mid" in node.log_text()
        assert "top-secret" not in node.log_text() + node.cli("config", "--all").stdout + node.cli("status", "--json").stdout
        rows = {row["key"]: row for row in node.json("config")}
        assert rows["traces.endpoint"]["source"] == f"{node.config}:2"
        assert rows["traces.service_name"]["source"] == "$OTEL_SERVICE_NAME"
        metrics = node.get("/metrics")[1]
        assert "hearth_trace_spans_dropped_total 0.0" in metrics
        assert f"hearth_trace_spans_sent_total {len(collector.spans)}.0" in metrics
        # a crash: the stream goes on, and its trace says so
        stream = RawStream(node, "/v1/completions", ENDLESS)
        (engine,) = node.engine_pids()
        stream.wait_for_events(5)
        os.kill(engine, signal.SIGKILL)
        stream.join()
        spans = collector.wait_for(lambda spans: len([span for span in spans if span.kind == 2]) == 2, "the second request")
        own, children = the_request([span for span in spans if span.trace_id != TRACE])
        ((event, _, about),) = own.events
        assert (event, about["hearth.device"]) == ("hearth.engine_restart", "cpu:0")
        assert "SIGKILL" in about["hearth.reason"]
        phases = [span.name for span in children if span.name not in ("prepare", "load")]
        assert phases == ["queue", "prefill", "decode", "queue", "prefill", "decode"]
        assert sum(span.attributes["hearth.tokens"] for span in children if span.name == "decode") == 100
        assert len({span.trace_id for span in spans if span.name == "load mid"}) == 2, "each load has a trace of its own"
        # off again, at once
        node.config.write_text("")
        assert node.cli("reload").returncode == 0
        assert "traceresponse" not in ask(node, CHAT)[1]
        # a collector that hangs holds up nothing
        with socket.create_server(("127.0.0.1", 0)) as silent:
            node.config.write_text(config(f"http://127.0.0.1:{silent.getsockname()[1]}"))
            assert node.cli("reload").returncode == 0
            assert ask(node, CHAT)[1]["traceresponse"]
            silent.settimeout(SAFETY_S)
            with silent.accept()[0]:  # it is being sent spans
                assert node.stop() == 0
    assert "spans were not sent before the end" in node.log_text()
    assert exporter.CLOSE_S <= 1.0


def test_over_a_restart(tmp_path: Path, collector: CollectorThread, notify: NotifySocket) -> None:
    """Both daemons' spans are in one trace; the request's own comes from the second one and began in the first."""
    make_model(tmp_path / "n" / "models" / "mid")
    node = ServiceNode(tmp_path / "n", notify, config=config(collector.url), null_step_ms=25.0, flags=["--drain-timeout-s", "5"])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        node.listeners = [("http", listener)]
        with node:
            stream = RawStream(node, "/v1/completions", ENDLESS)
            stream.wait_for_events(10)
            node.restart(signal.SIGUSR2)
            assert "1 of 1 connections of before the restart go on" in node.log_text()
            before = {span.name: span for span in collector.wait_for(bool, "spans of the first daemon") if span.name != "load mid"}
            assert set(before) == {"prepare", "load", "queue", "prefill", "decode"}
            stream.join()
            own, children = the_request(collector.wait_for(has_request(), "the request"))
    assert {span.trace_id for span in before.values()} == {own.trace_id}
    assert own.start_ns == before["prepare"].start_ns
    ((event, at_ns, _),) = own.events
    assert event == "hearth.taken_over_after_restart"
    assert before["decode"].end_ns < at_ns
    decoded = [span for span in children if span.name == "decode"]
    assert len(decoded) == 2
    assert sum(span.attributes["hearth.tokens"] for span in decoded) == 100
    assert len({span.resource["process.pid"] for span in children}) == 2
