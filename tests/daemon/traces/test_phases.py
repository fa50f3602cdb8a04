"""The phases of sequences, as the dispatcher tells them with the real node scheduler and an engine that notes what it is sent."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest

from config.schema import NodeConfig
from daemon.contracts import Generation
from daemon.errors import HearthError
from daemon.traces.request_trace import Ended, RequestTrace
from daemon.traces.tracer import Tracer
from engine import protocol
from engine.protocol import FINISH_LENGTH, FINISH_STOP, SamplingParams
from scheduler.node import events
from tests.daemon.test_dispatcher import MIB, Sink
from tests.daemon.test_pauses import Contended
from tests.daemon.traces.otlp_schema import SpanRead, request_of
from tests.daemon.traces.test_tracer import Out, drawn


class TracedNode(Contended):
    """A node with room for one model, whose requests are traced."""

    def __init__(self) -> None:
        super().__init__(NodeConfig(chunk_bytes=MIB))
        self.out = Out()
        self.tracer = Tracer(1.0, self.out)
        self.dispatcher.tracer = lambda: self.tracer

    def begin(self) -> RequestTrace:
        return self.tracer.begin((), (), drawn(5), time.monotonic())

    def traced(
        self, task: str = "generate", request_id: int = 0, trace: RequestTrace | None = None
    ) -> tuple[Generation, RequestTrace]:
        trace = trace or self.begin()
        params = SamplingParams(max_tokens=8)
        generation = Generation(self.entries["a"], [1, 2, 3], params, Sink(), request_id=request_id, task=task)
        trace.follow(generation)
        self.dispatcher.submit(generation)
        return generation, trace

    def spans_of(self, trace: RequestTrace) -> tuple[SpanRead, list[SpanRead]]:
        """Returns the request's span, and those below it but for the first one."""
        self.tracer.ended(trace, Ended("chat a", {}, None), time.monotonic())
        own, (prepare, *children) = request_of(self.out.spans, trace.trace_id)
        assert prepare.name == "prepare"
        return own, children

    def end(self, generation: Generation, token: int = 19) -> None:
        self.step({generation.request_id: [token]}, finish={generation.request_id: FINISH_STOP})


def follow_each_other(spans: list[SpanRead]) -> None:
    """Asserts that each span but those of loads begins where the one before it ends."""
    phases = [span for span in spans if span.name != "load"]
    for before, after in pairwise(phases):
        assert before.end_ns == after.start_ns, (before, after)


async def test_a_cold_model() -> None:
    node = TracedNode()
    generation, trace = node.traced()
    load = node.loaded()
    node.step({generation.request_id: [10]}, cached={generation.request_id: 2})
    node.step({generation.request_id: [11]})
    node.end(generation)
    own, spans = node.spans_of(trace)
    assert sorted(span.name for span in spans) == ["decode", "load", "prefill", "queue"]
    follow_each_other(spans)
    by_name = {span.name: span for span in spans}
    assert "a is loading" in by_name["queue"].attributes["hearth.reason"]
    assert by_name["prefill"].attributes == {"hearth.device": "cpu:0", "hearth.prompt_tokens": 3, "hearth.cached_tokens": 2}
    assert by_name["decode"].attributes == {"hearth.device": "cpu:0", "hearth.tokens": 3}
    told = by_name["load"].attributes
    assert (told["hearth.load.source"], told["hearth.load.read_bytes"], told["hearth.load.reason"]) == ("disk", 1, "request")
    assert told["hearth.load.seconds"] == 0.1
    assert told["hearth.load.weights_bytes"] == load.weights_chunks * MIB
    assert (own.events, own.status) == ([], {})
    (whole,) = [span for span in node.out.spans if span.name == "load a"]
    assert by_name["load"].links == [(whole.trace_id, whole.span_id)]
    assert (whole.parent_id, whole.kind, whole.attributes) == ("", 1, told)
    assert whole.trace_id != trace.trace_id


async def test_a_model_that_is_loaded_while_the_prompt_is_tokenized() -> None:
    node = TracedNode()
    trace, expectation = node.begin(), node.dispatcher.expect(node.entries["a"])
    node.loaded()
    generation, _ = node.traced(request_id=expectation.request_id, trace=trace)
    expectation.over()
    node.end(generation)
    _, spans = node.spans_of(trace)
    assert sorted(span.name for span in spans) == ["decode", "load", "prefill", "queue"]
    (load,) = [span for span in spans if span.name == "load"]
    (queue,) = [span for span in spans if span.name == "queue"]
    assert load.end_ns <= queue.start_ns
    assert load.attributes["hearth.load.reason"] == "request"
    assert not node.dispatcher._expected


async def test_a_model_that_is_there() -> None:
    node = TracedNode()
    first, _ = node.traced()
    node.loaded()
    node.end(first)
    generation, trace = node.traced()
    node.end(generation)
    _, spans = node.spans_of(trace)
    assert [(span.name, "hearth.reason" in span.attributes) for span in spans] == [
        ("queue", False), ("prefill", False), ("decode", False),
    ]  # fmt: skip


async def test_a_prompt_behind_the_weights() -> None:
    """On the cpu device requests are submitted while the load goes on."""
    node = TracedNode()
    generation, trace = node.traced()
    (load,) = node.engine.take(protocol.LoadModel)
    node.message(protocol.LoadStreams(load.placement_id, "a"))
    node.message(protocol.LoadDone(load.placement_id, "a", 0.1, 0, adopted=True))
    node.end(generation)
    _, spans = node.spans_of(trace)
    by_name = {span.name: span for span in spans}
    assert by_name["queue"].end_ns < by_name["load"].end_ns < by_name["prefill"].end_ns
    assert by_name["load"].attributes["hearth.load.source"] == "device"


async def test_a_pause() -> None:
    node = TracedNode()
    generation, trace = node.traced()
    node.loaded()
    node.step({generation.request_id: [10]})
    node.unload()
    node.step({generation.request_id: [11]})  # was on its way already
    node.evicted()
    node.loaded()
    node.message(protocol.TokensOut("a", 9, 0.01, [generation.request_id], [12], resumed={generation.request_id: (4, 1)}))
    node.end(generation)
    _, spans = node.spans_of(trace)
    follow_each_other(spans)
    phases = [span for span in spans if span.name != "load"]
    assert [span.name for span in phases] == ["queue", "prefill", "decode", "paused", "prefill", "decode"]
    assert [span.attributes.get("hearth.tokens") for span in phases if span.name == "decode"] == [1, 3]
    assert phases[3].attributes["hearth.cause"].startswith("cli-")
    assert phases[4].attributes | {"hearth.restored_tokens": 4, "hearth.recomputed_tokens": 1} == phases[4].attributes
    assert len([span for span in spans if span.name == "load"]) == 2


async def test_an_engine_that_dies() -> None:
    node = TracedNode()
    generation, trace = node.traced()
    node.loaded()
    node.step({generation.request_id: [10]})
    node.told.engine_down("cpu:0", (generation.request_id,), "was ended by SIGKILL")
    node.up()
    node.loaded()
    node.message(protocol.TokensOut("a", 9, 0.01, [generation.request_id], [12], resumed={generation.request_id: (0, 4)}))
    node.end(generation)
    own, spans = node.spans_of(trace)
    follow_each_other(spans)
    assert [span.name for span in spans if span.name != "load"] == ["queue", "prefill", "decode", "queue", "prefill", "decode"]
    assert [(name, about) for name, _, about in own.events] == [
        ("hearth.engine_restart", {"hearth.device": "cpu:0", "hearth.reason": "was ended by SIGKILL"})
    ]
    assert [span.status for span in spans if span.name == "load"] == [{}, {}]


async def test_an_engine_that_dies_with_a_load() -> None:
    node = TracedNode()
    generation, trace = node.traced()
    node.told.engine_down("cpu:0", (), "was ended by SIGSEGV")
    node.dispatcher.cancel(generation)
    own, spans = node.spans_of(trace)
    assert {span.name: span.status.get("message", "") for span in spans} == {"queue": "", "load": "was ended by SIGSEGV"}
    assert own.events == [], "it ran nowhere"
    assert not node.tracer._loads


async def test_loads_that_fail_or_are_given_up() -> None:
    node = TracedNode()
    generation, trace = node.traced()
    (load,) = node.engine.take(protocol.LoadModel)
    node.message(protocol.LoadFailed(load.placement_id, "a", "model.safetensors: short", permanent=True))
    assert isinstance(generation.sink.error, HearthError)  # type: ignore[attr-defined]
    assert trace.error == "model_failed"
    _, spans = node.spans_of(trace)
    assert {span.name: span.status.get("message", "") for span in spans} == {"queue": "", "load": "model.safetensors: short"}
    node.dispatcher.command(lambda now, cause: events.LoadRequested(now=now, cause=cause, model="b"))
    node.dispatcher.command(lambda now, cause: events.UnloadRequested(now=now, cause=cause, model="b"))
    (last,) = [span for span in node.out.spans if span.name == "load b"]
    assert last.status["message"].startswith("given up: ")
    assert not node.tracer._loads


async def test_ends_of_all_kinds() -> None:
    node = TracedNode()
    cancelled, _ = node.traced()
    node.dispatcher.cancel(cancelled)
    failed, broken = node.traced()
    node.loaded()
    node.message(protocol.RequestFailed(failed.request_id, "nan_logits", "logits are not finite"))
    assert broken.error == "nan_logits"
    silent, trace = node.traced()
    node.step({silent.request_id: []}, finish={silent.request_id: FINISH_LENGTH})
    _, spans = node.spans_of(trace)
    assert [span.name for span in spans] == ["queue", "prefill"]
    node.dispatcher.post(events.DrainRequested(now=time.monotonic(), cause="shutdown", stopping=True))
    refused = node.tracer.begin((), (), drawn(5), time.monotonic())
    generation = Generation(node.entries["a"], [1], SamplingParams(max_tokens=1), Sink())
    refused.follow(generation)
    with pytest.raises(HearthError):
        node.dispatcher.submit(generation)
    assert refused.error == "server_restarting"
    assert generation.trace is not None
    assert [phase.name for phase in generation.trace.phases] == ["queue"]


@pytest.mark.parametrize("task", ["embed", "score"])
async def test_an_embedding_and_a_score(task: str) -> None:
    node = TracedNode()
    generation, trace = node.traced(task)
    node.loaded()
    node.message(protocol.EmbeddingsOut("a", 1, 0.01, [generation.request_id], [b"1234"]))
    _, spans = node.spans_of(trace)
    embed = next(span for span in spans if span.name == task)
    assert embed.attributes == {"hearth.device": "cpu:0", "hearth.prompt_tokens": 3}


async def test_one_that_is_not_taken_costs_nothing() -> None:
    node = TracedNode()
    generation, _ = node.request()
    assert generation.trace is None
    node.loaded()
    node.end(generation)
    assert [span.name for span in node.out.spans] == ["load a"]
