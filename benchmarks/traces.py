"""Measures what tracing costs: CPU of the daemon's process for a streamed completion, and of making and sending the spans of one
request.

`server`: three servers of this version (null runner) take turns under the same load: `off` (no collector is named), `unsampled`
(tracing is on and this request is not taken) and `sampled` (every request is). `us_per_request` is the CPU time of the daemon's own
process over the requests, the median of the turns; `more_us` the median of what a turn took more than that of `off` beside it.

`spans`: the five spans of a chat, made, encoded and sent to a collector in another process, by hearthd and, if it is installed, by
opentelemetry-sdk with its exporter for OTLP over HTTP. `us_per_trace` is this process's CPU time over the traces.
usage: python -m benchmarks.traces [--only server|spans] [--streams 32] [--turns 8] [--traces 4000]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import pathlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import uvloop
from aiohttp import web

from benchmarks.checkpoints import make
from benchmarks.load import drive
from benchmarks.serve import STORE
from benchmarks.server import Server
from config.trace_endpoint import TraceEndpoint
from daemon.contracts import Generation
from daemon.models.entry import ModelEntry
from daemon.traces.exporter import BATCH, SEND_EVERY_S, Exporter
from daemon.traces.otlp import Value, resource_json
from daemon.traces.request_trace import Ended
from daemon.traces.span_counts import SpanCounts
from daemon.traces.tracer import Tracer
from engine.protocol import SamplingParams

NUM_OUT = 16  # tokens of a request: few, so that what each request costs shows
SPANS = ("prepare", "queue", "prefill", "decode")
ABOUT: dict[str, Value] = {
    "gen_ai.operation.name": "chat",
    "gen_ai.provider.name": "hearthd",
    "gen_ai.request.model": "feather",
    "gen_ai.response.model": "feather",
    "gen_ai.response.id": "chatcmpl-0123456789abcdef01234567",
    "gen_ai.usage.input_tokens": 128,
    "gen_ai.usage.output_tokens": NUM_OUT,
    "gen_ai.usage.cache_read.input_tokens": 0,
    "gen_ai.response.finish_reasons": ["length"],
    "gen_ai.request.max_tokens": NUM_OUT,
    "gen_ai.request.temperature": 1.0,
    "gen_ai.request.top_p": 1.0,
    "http.request.method": "POST",
    "http.route": "/v1/chat/completions",
    "http.response.status_code": 200,
    "url.scheme": "http",
    "url.path": "/v1/chat/completions",
    "network.protocol.version": "1.1",
    "user_agent.original": "OpenAI/Python 2.8.0",
    "hearth.request_id": "0123456789abcdef01234567",
}


def _collect(told: Any) -> None:
    """A collector that takes everything and looks at nothing."""

    async def serve() -> None:
        async def take(request: web.Request) -> web.Response:
            await request.read()
            return web.Response(body=b"{}", content_type="application/json")

        app = web.Application(client_max_size=64 << 20)
        app.router.add_post("/v1/traces", take)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        told.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    uvloop.run(serve())


@contextlib.contextmanager
def collector() -> Iterator[int]:
    """Yields the port of a collector in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_collect, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


# ---- server


def _cpu_s(pid: int) -> float:
    """Returns the CPU seconds of all threads of a process; its own times have a resolution of 10 ms."""
    tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def server(streams: int, num_turns: int) -> dict[str, Any]:
    feather = make(STORE, "feather")
    num = 12 * streams
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(collector())
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hearth-bench-")))
        sides = {}
        for name, sample in (("off", ""), ("unsampled", "0.0"), ("sampled", "1.0")):
            path = folder / f"{name}.toml"
            path.write_text(f'[traces]\nendpoint = "http://127.0.0.1:{port}"\nsample = {sample}\n' if sample else "")
            flags = ["--runner", "null", "--null-step-ms", "2", "--config", str(path)]
            sides[name] = stack.enter_context(Server(feather.parent, ["cpu=1GiB"], flags, folder))
            sides[name].cli("load", "feather")
            uvloop.run(drive(sides[name].url, ["feather"], streams, streams, 16, NUM_OUT))
        cost: dict[str, list[float]] = {name: [] for name in sides}
        failed = 0
        for number in range(num_turns):
            for name in sides if number % 2 else reversed(sides):
                before_s = _cpu_s(sides[name].pid)
                results = uvloop.run(drive(sides[name].url, ["feather"], num, streams, 16, NUM_OUT, seed=number))
                if name == "sampled":
                    time.sleep(SEND_EVERY_S + 0.5)  # the last batch is sent
                cost[name].append(1e6 * (_cpu_s(sides[name].pid) - before_s) / num)
                failed += sum(not result.ok for result in results)
    medians = {f"{name}_us_per_request": round(statistics.median(values), 1) for name, values in cost.items()}
    for name in ("unsampled", "sampled"):
        more = [after - before for before, after in zip(cost["off"], cost[name], strict=True)]
        medians[f"{name}_more_us"] = round(statistics.median(more), 1)  # than the turn of `off` beside it
    return {
        "benchmark": "traces",
        "what": "server",
        "streams": streams,
        "requests_a_turn": num,
        "turns": num_turns,
        "failed": failed,
    } | medians


# ---- spans


def _generation() -> Generation:
    entry = ModelEntry("feather", "", (), 4096, 1000, (), None, 0, "")
    return Generation(entry, [1] * 128, SamplingParams(max_tokens=NUM_OUT), None, submitted_device="cpu:0")  # type: ignore[arg-type]


def _live(tracer: Tracer, number: int) -> None:
    """Makes the trace that a traced chat makes."""
    now = time.monotonic()
    trace = tracer.begin((), (), number.to_bytes(24), now)
    assert trace.traceresponse
    generation = _generation()
    trace.follow(generation)
    generation.output = []
    if (life := generation.trace) is not None:
        life.accepted(now + 0.001)
        life.submitted(generation, now + 0.002)
        life.begins_to_decode(generation, now + 0.1)
        generation.output = [1] * NUM_OUT
        life.ended(generation, now + 0.5)
    if trace.is_sampled:
        tracer.ended(trace, Ended("chat feather", dict(ABOUT), None), now + 0.5)


async def ours(port: int, num: int, sample: float) -> tuple[float, int]:
    """Returns the CPU microseconds of a trace, and how many spans were sent."""
    counts = SpanCounts()
    exporter = Exporter(TraceEndpoint(f"http://127.0.0.1:{port}/v1/traces"), {}, resource_json({"service.name": "hearthd"}), counts)
    tracer = Tracer(sample, exporter.add)
    running = asyncio.ensure_future(exporter.run())
    before_s = time.process_time()
    for number in range(num):
        _live(tracer, number)
        while sample and 5 * number - counts.num_sent > 4 * BATCH:  # noqa: ASYNC110 - no more than a node would have waiting
            await asyncio.sleep(0.001)
    await exporter.close()
    await running
    assert not counts.num_dropped
    return 1e6 * (time.process_time() - before_s) / num, counts.num_sent


def sdk(port: int, num: int) -> tuple[float, int] | None:
    """The same spans by opentelemetry-sdk; None if it is not installed."""
    try:
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        return None
    provider = TracerProvider(resource=Resource({"service.name": "hearthd"}))
    provider.add_span_processor(
        BatchSpanProcessor(
            OTLPSpanExporter(f"http://127.0.0.1:{port}/v1/traces"), max_queue_size=1 << 20, max_export_batch_size=BATCH
        )
    )
    tracer = provider.get_tracer("hearthd")
    before_s = time.process_time()
    for _ in range(num):
        now = time.time_ns()
        own = tracer.start_span("chat feather", kind=trace.SpanKind.SERVER, start_time=now, attributes=ABOUT)
        context = trace.set_span_in_context(own)
        for name in SPANS:
            about = {"hearth.device": "cpu:0", "hearth.prompt_tokens": 128, "hearth.cached_tokens": 0} if name == "prefill" else {}
            child = tracer.start_span(name, context, start_time=now + 1_000_000, attributes=about)
            child.end(now + 2_000_000)
        own.end(now + 500_000_000)
    provider.shutdown()
    return 1e6 * (time.process_time() - before_s) / num, num * (1 + len(SPANS))


def spans(num: int) -> dict[str, Any]:
    with collector() as port:
        found: dict[str, Any] = {"benchmark": "traces", "what": "spans", "traces": num}
        uvloop.run(ours(port, 200, 1.0))
        found["unsampled_us_per_trace"] = round(uvloop.run(ours(port, num, 0.0))[0], 1)
        sampled, num_sent = uvloop.run(ours(port, num, 1.0))
        found |= {"us_per_trace": round(sampled, 1), "spans_sent": num_sent}
        other = sdk(port, num)
        found["sdk_us_per_trace"] = None if other is None else round(other[0], 1)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["server", "spans"])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--traces", type=int, default=4000)
    args = parser.parse_args()
    if args.only != "server":
        print(json.dumps(spans(args.traces)), flush=True)
    if args.only != "spans":
        print(json.dumps(server(args.streams, args.turns)), flush=True)


if __name__ == "__main__":
    main()
