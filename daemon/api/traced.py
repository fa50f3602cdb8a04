"""The spans of HTTP requests, with the attributes of OpenTelemetry's conventions for HTTP and generative AI.

No span contains prompts, outputs or keys.
"""

from __future__ import annotations

import time

from aiohttp import web

from daemon.access.cors import expose
from daemon.api.endpoint import Endpoint
from daemon.api.progress import Progress
from daemon.api.request_scope import RequestScope
from daemon.traces.otlp import Value
from daemon.traces.request_trace import MAX_SEQUENCES, Ended
from daemon.traces.trace_context import RESPONSE_HEADER
from daemon.traces.tracer import Tracer

_WITHOUT_TEXT = ("embeddings", "rerank", "score")


def begin(tracer: Tracer, request: web.Request, progress: Progress, scope: RequestScope) -> None:
    """Begins the trace of a request, or continues the one that an earlier daemon has begun, and adds the trace's header to the
    answer's headers. The trace is `scope.trace`."""
    headers, before = request.headers, progress.before
    trace = scope.trace = tracer.begin(
        headers.getall("traceparent", ()),
        headers.getall("tracestate", ()),
        progress.drawn("trace"),
        scope.started_s,
        before.began_ns if before is not None else 0,
    )
    progress.began_ns = trace.began_ns
    scope.headers[RESPONSE_HEADER] = trace.traceresponse
    expose(scope.headers, (RESPONSE_HEADER,))


def end(
    tracer: Tracer, request: web.Request, progress: Progress, scope: RequestScope, endpoint: Endpoint, status: int, code: str
) -> None:
    """Ends the trace of a request, or hands it over if the next daemon continues the request. status: the HTTP status; 499 if the
    client had gone. code: the code of the error that was answered, or ""."""
    trace = scope.trace
    if trace is None or not trace.is_sampled:
        return
    if progress.is_handed_over:
        tracer.handed_over(trace)
        return
    code = code or trace.error  # the error of a stream that had begun
    error = code if status >= 500 or (status == 200 and code) else None
    name, attributes = _model(scope, endpoint)
    attributes |= _http(request, endpoint, status) | {"hearth.request_id": progress.request_id}
    if scope.tenant.name:
        attributes["hearth.tenant"] = scope.tenant.name
    if code:
        attributes["error.type"] = code
    tracer.ended(trace, Ended(name, attributes, error), time.monotonic())


def _http(request: web.Request, endpoint: Endpoint, status: int) -> dict[str, Value]:
    attributes: dict[str, Value] = {
        "http.request.method": request.method,
        "http.route": endpoint.paths[0],
        "http.response.status_code": status,
        "url.scheme": request.scheme,
        "url.path": request.rel_url.raw_path,
        "network.protocol.version": f"{request.version.major}.{request.version.minor}",
    }
    agent = request.headers.get("User-Agent")
    if agent:
        attributes["user_agent.original"] = agent
    return attributes


def _model(scope: RequestScope, endpoint: Endpoint) -> tuple[str, dict[str, Value]]:
    """Returns the name of a request's span, and the span's attributes about the model, the sequences and their tokens."""
    if not endpoint.operation:
        return f"POST {endpoint.paths[0]}", {"hearth.model": scope.model, **_adapter(scope)} if scope.model else {}
    attributes: dict[str, Value] = {"gen_ai.operation.name": endpoint.operation, "gen_ai.provider.name": "hearthd"}
    answers = scope.adapter or scope.model
    asked = scope.asked or answers
    if asked:
        attributes |= {"gen_ai.request.model": asked, "gen_ai.response.model": answers}
    if scope.adapter:
        attributes |= {"hearth.model": scope.model, **_adapter(scope)}
    if scope.generations:
        attributes |= _sequences(scope, endpoint)
    return f"{endpoint.operation} {asked}" if asked else endpoint.operation, attributes


def _adapter(scope: RequestScope) -> dict[str, Value]:
    """Returns the attribute for the LoRA adapter with which the model answers, if there is one."""
    return {"hearth.adapter": scope.adapter} if scope.adapter else {}


def _sequences(scope: RequestScope, endpoint: Endpoint) -> dict[str, Value]:
    generations = scope.generations
    first, prompts = generations[0], [each for each in generations if not each.is_copy]
    attributes: dict[str, Value] = {
        "gen_ai.response.id": first.public_id,
        "gen_ai.usage.input_tokens": sum(each.num_prompt_tokens for each in prompts),
    }
    if endpoint.operation not in _WITHOUT_TEXT:
        attributes |= {
            "gen_ai.usage.output_tokens": sum(each.num_output_tokens for each in generations),
            "gen_ai.usage.cache_read.input_tokens": sum(each.num_cached for each in prompts),
            "gen_ai.response.finish_reasons": [each.outcome for each in generations[:MAX_SEQUENCES] if each.outcome],
            "gen_ai.request.max_tokens": first.params.max_tokens,
            "gen_ai.request.temperature": float(first.params.temperature),
            "gen_ai.request.top_p": float(first.params.top_p),
        }
    if len(generations) > 1:
        attributes["hearth.sequences"] = len(generations)
    if num_pauses := sum(each.num_pauses for each in generations):
        attributes["hearth.pauses"] = num_pauses
    return attributes
