"""Which requests are traced, and what becomes of their spans."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from config.schema import TracesConfig
from daemon.process.long_tasks import LongTasks
from daemon.traces import otlp
from daemon.traces.request_trace import MAX_SEQUENCES, Ended
from daemon.traces.tracer import Tracer
from daemon.traces.traces import Traces
from tests.daemon.traces.collector import Collector
from tests.daemon.traces.otlp_schema import SpanRead, read, request_of
from tests.e2e.node import ROOT

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
RESOURCE, SCOPE = otlp.resource_json({"service.name": "hearthd"}), otlp.scope_json("hearthd", "1")


class Out:
    """Takes what a tracer exports."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.num = 0

    def __call__(self, spans: bytes, num: int) -> None:
        self.bodies.append(spans)
        self.num += num

    @property
    def spans(self) -> list[SpanRead]:
        found = read(otlp.request(RESOURCE, SCOPE, self.bodies))
        assert len(found) == self.num
        return found


class Sequence:
    """A Generation, as far as traces know it."""

    def __init__(self) -> None:
        self.prompt, self.output = [1, 2, 3], [4]
        self.num_cached = self.num_resumed = self.restored_tokens = self.recomputed_tokens = 0
        self.submitted_device, self.task = "cpu:0", "generate"
        self.trace: Any = None


def drawn(low: int) -> bytes:
    """Returns what a request draws; low: of the trace id, what decides about a ratio."""
    return bytes(7) + b"\x01" + low.to_bytes(8, "big") + b"\x01" * 8


@pytest.mark.parametrize(("sample", "first_left_out"), [(1.0, None), (0.5, 1 << 63), (0.25, 1 << 62), (0.0, 0)])
def test_a_share_of_traces_is_taken_by_their_ids(sample: float, first_left_out: int | None) -> None:
    """Services with the same share take the same traces, and a larger share takes all of a smaller one's (TraceIdRatioBased)."""
    tracer = Tracer(sample, Out())
    for low, is_taken in ((0, sample > 0), ((1 << 64) - 1, sample == 1), ((1 << 62) - 1, sample >= 0.25)):
        assert tracer.begin((), (), drawn(low), 1.0).is_sampled is is_taken
    if first_left_out:
        assert tracer.begin((), (), drawn(first_left_out - 1), 1.0).is_sampled
    if first_left_out is not None:
        assert not tracer.begin((), (), drawn(first_left_out), 1.0).is_sampled


@pytest.mark.parametrize("sample", [0.0, 1.0])
@pytest.mark.parametrize("flags", ["00", "01"])
def test_the_caller_decides_for_its_traces(sample: float, flags: str) -> None:
    trace = Tracer(sample, Out()).begin([f"00-{TRACE}-{SPAN}-{flags}"], ["a=b"], drawn(5), 1.0)
    assert (trace.trace_id, trace.parent_id, trace.state) == (TRACE, SPAN, "a=b")
    assert trace.is_sampled is (flags == "01")
    assert trace.traceresponse == f"00-{TRACE}-{'01' * 8}-{flags}"
    sequence = Sequence()
    trace.follow(sequence)
    assert (sequence.trace is None) is (flags == "00"), "what is not taken costs its sequences nothing"


def test_what_is_below_a_request() -> None:
    out = Out()
    tracer = Tracer(1.0, out)
    trace = tracer.begin([f"00-{TRACE}-{SPAN}-01"], ["a=b"], drawn(5), 100.0)
    sequences = [Sequence() for _ in range(MAX_SEQUENCES + 2)]
    for at, sequence in enumerate(sequences):
        trace.follow(sequence)
        if sequence.trace is not None:
            sequence.trace.accepted(100.5 + at)
            sequence.trace.ended(sequence, 101.5 + at)
    tracer.ended(trace, Ended("chat m", {"n": 1}, "broken"), 101.0)  # before the last phase has ended
    own, children = request_of(out.spans, TRACE)
    assert (own.name, own.parent_id, own.attributes) == ("chat m", SPAN, {"n": 1, "hearth.sequences_left_out": 2})
    assert own.status == {"code": 2, "message": "broken"}
    assert [(span.name, span.attributes.get("hearth.sequence")) for span in children] == [
        ("prepare", None),
        *(("queue", at) for at in range(MAX_SEQUENCES)),
    ]
    assert own.end_ns - own.start_ns == 16_500_000_000


def test_over_a_restart_a_request_keeps_its_span() -> None:
    out = Out()
    tracer = Tracer(1.0, out)
    first = tracer.begin((), (), drawn(5), 100.0)
    sequence = Sequence()
    first.follow(sequence)
    sequence.trace.accepted(100.1)
    sequence.trace.ended(sequence, 100.2)
    tracer.handed_over(first)
    again = tracer.begin((), (), drawn(5), 200.0, first.began_ns)
    assert (again.trace_id, again.span_id, again.began_ns) == (first.trace_id, first.span_id, first.began_ns)
    tracer.ended(again, Ended("chat m", {}, None), 201.0)
    own, children = request_of(out.spans, first.trace_id)
    assert [span.name for span in children] == ["prepare", "queue"]
    assert own.start_ns == first.began_ns
    assert [name for name, *_ in own.events] == ["hearth.taken_over_after_restart"]
    unsampled = Tracer(0.0, out).begin((), (), drawn(5), 100.0)
    tracer.handed_over(unsampled)
    assert out.num == 3


def test_a_clock_that_was_set_back_turns_no_span_around() -> None:
    trace = Tracer(1.0, Out()).begin((), (), drawn(5), 100.0, began_ns=1 << 62)
    (own,) = trace.ended(Ended("chat m", {}, None), 101.0)
    assert own.end_ns - own.start_ns == 1_000_000_000


async def test_settings_switch_it_on_and_off_and_what_waits_goes_where_it_should() -> None:
    collectors = [await Collector().start() for _ in range(2)]
    tasks = LongTasks()
    traces = Traces(tasks)
    traces.use(TracesConfig(), {})
    assert traces.tracer is None
    for collector in collectors:
        traces.use(TracesConfig(endpoint=collector.url, service_name="n", resource_attributes={"a": "b"}), {})
        tracer = traces.tracer
        assert tracer is not None
        traces.use(TracesConfig(endpoint=collector.url, service_name="n", resource_attributes={"a": "b"}), {})
        assert traces.tracer is tracer, "nothing has changed"
        tracer.ended(tracer.begin((), (), drawn(5), 100.0), Ended("chat m", {}, None), 101.0)
    traces.use(TracesConfig(), {})
    assert traces.tracer is None
    for collector in collectors:
        await collector.wait_for(lambda collector=collector: len(collector.taken) == 1)
        resource = collector.taken[0].resource
        assert resource | {"service.name": "n", "a": "b"} == resource
    await collectors[0].wait_for(lambda: traces.counts.num_sent == 2)  # counted when the answers are here
    assert (traces.counts.num_dropped, traces.problems()) == (0, [])
    await traces.close()
    for collector in collectors:
        await collector.stop()


def test_off_imports_nothing_of_it() -> None:
    code = "import sys, daemon.lifecycle, daemon.main\nprint(sorted(m for m in sys.modules if m.startswith('daemon.traces.')))"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    small = ("headers", "span_counts", "trace_context", "traces")
    assert out.strip() == str([f"daemon.traces.{name}" for name in small])
