"""Runs the HTTP application: passes requests to their endpoints, converts errors to the form of the client's API (such as
OpenAI's), and gives each request an id.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from config.units import parse_bytes
from daemon.access.admission import Access
from daemon.access.quotas import Quotas
from daemon.access.tenant import Key
from daemon.api import audited, router
from daemon.api.background import BackgroundRuns
from daemon.api.context import ApiContext
from daemon.api.endpoint import OPENAI, Call, Endpoint
from daemon.api.forwarding import answer_elsewhere
from daemon.api.progress import Progress
from daemon.api.request_scope import RequestScope
from daemon.api.response_store import ResponseStore
from daemon.contracts import AdapterPort, Guarded, HealthPort, HttpSettings, ModelPort, RequestPort
from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.http.answers import SERVER, error_response
from daemon.http.connection import ANSWERING, Answering, Connection, Runner
from daemon.http.no_client import owner_of
from daemon.http.request_id import request_id
from daemon.page.feed import PageFeed
from daemon.process import shortage
from daemon.process.logs import fields
from daemon.record.audit_log import AuditLog
from daemon.streams.stream_clock import StreamClock
from daemon.text.places import Share
from daemon.text.port import TextPort
from daemon.upstreams.upstreams import Upstreams

if TYPE_CHECKING:
    from daemon.traces.tracer import Tracer

log = logging.getLogger("hearthd.api")
http_log = logging.getLogger("hearthd.http")
_NO_HEADERS: Mapping[str, str] = {}
CLIENT_GONE = 499  # the status in the log if the client left before the answer


def make_app(
    requests: RequestPort,
    models: ModelPort,
    text: TextPort,
    settings: HttpSettings,
    health: HealthPort,
    access: Access | None = None,
    serves: Callable[[Guarded], bool] = lambda endpoint: True,
    feed: PageFeed | None = None,
    answered: Callable[[str, int], None] = lambda endpoint, status: None,
    stored: ResponseStore | None = None,
    quotas: Quotas | None = None,
    audit: AuditLog | None = None,
    tracer: Callable[[], Tracer | None] = lambda: None,
    upstreams: Upstreams | None = None,
    adapters: AdapterPort | None = None,
    background: BackgroundRuns | None = None,
) -> web.Application:
    """Returns the aiohttp application of the HTTP API. It must be served through `make_runner`, whose settings make aiohttp notice
    that a client has disconnected. A feature whose parameter is None is off.

    access: decides who may use the API; by default no key is required, and the Host header must be an address or a name of this
    machine. serves: tells whether this listener serves an endpoint. feed: the feed of the status page. answered: called for each
    answer with the endpoint's name ("" for an unknown path) and the HTTP status. stored: the store of finished /v1/responses
    answers, which later requests may continue. quotas: the tenants' use of their limits, shared by all listeners. tracer: returns
    the tracer, None while tracing is off. upstreams: the model names that other servers answer. adapters: loads LoRA adapters for
    requests over HTTP. background: the background responses in progress; finished ones are in `stored`."""
    stored = stored or ResponseStore(0)
    context = ApiContext(
        requests=requests,
        models=models,
        text=text,
        health=health,
        settings=settings,
        clock=StreamClock(lambda: settings.sse_comment_every_s, lambda: settings.request_timeout_s),
        max_body_bytes=parse_bytes(settings.max_body_bytes),
        access=access or Access(),
        serves=serves,
        page=feed,
        answered=answered,
        stored=stored,
        background=background or BackgroundRuns(stored),
        quotas=quotas or Quotas(),
        audit=audit or AuditLog(),
        upstreams=upstreams,
        adapters=adapters,
    )

    def handle(request: web.Request) -> Awaitable[web.StreamResponse]:
        if "Expect" in request.headers:
            _expect(request)
        return _answer_errors(request, context, tracer)

    app = web.Application()  # body.py limits the size; router.py finds the endpoint
    app[ANSWERING] = Answering(HearthError.body, answered, handle)
    return app


def make_runner(app: web.Application, shutdown_timeout_s: float = 30.0, **options: Any) -> Runner:
    """Returns the aiohttp runner that serves the application. With its settings a client's disconnect cancels the request, and a
    compressed body is refused instead of inflated. shutdown_timeout_s: how long a shutdown waits for open requests, in seconds.
    options: further arguments of Runner."""
    return Runner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        logger=http_log,
        shutdown_timeout=shutdown_timeout_s,
        tcp_keepalive=False,  # the listener has set it already (daemon/http/listeners.py), which saves a system call per connection
        **options,
    )


def _not_malformed_http(record: logging.LogRecord) -> bool:
    """A logging filter for aiohttp's log. Returns False for the record of a malformed request, and logs one debug line in place of
    its traceback, with which any client could fill the log."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        return True
    log.debug("malformed HTTP: %s", error)
    return False


http_log.addFilter(_not_malformed_http)


def _expect(request: web.Request) -> None:
    """Sends the interim response `100 Continue` to a client that waits for it (the header `Expect: 100-continue`). Any other
    expectation is ignored, as HTTP allows."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _answer_errors(request: web.Request, context: ApiContext, tracer: Callable[[], Tracer | None]) -> web.StreamResponse:
    progress = _progress(request)
    name = progress.request_id
    target = router.target(request.rel_url.raw_path)
    endpoint = target.endpoint if target is not None else None
    is_recorded = _is_recorded(request, endpoint)
    cors = context.access.cors
    more_headers = cors.headers(request, endpoint) if cors is not None else _NO_HEADERS
    scope: RequestScope | None = None
    status, code = CLIENT_GONE, ""
    try:
        preflight = cors.preflight(request, endpoint) if more_headers and cors is not None else None
        if preflight is not None:
            response: web.StreamResponse = preflight
        else:
            key = context.access.admit(request, endpoint, per_model=target is not None and target.scope is not None)
            if key is not None:
                more_headers = own_headers = dict(more_headers)
                render = (OPENAI if endpoint is None else endpoint.api).limit_headers
                is_charged = progress.before is not None and progress.before.is_charged
                scope = RequestScope(key, context.models, context.requests, context.quotas, own_headers, render, is_charged)
                progress.is_charged = scope.was_charged
                if is_recorded and (by := tracer()) is not None:
                    from daemon.api import traced  # imported only when tracing is on

                    traced.begin(by, request, progress, scope)
                tenant = key.tenant
                text = context.text.of(Share(tenant.name, tenant.weight)) if tenant.name else context.text
                context = context.scoped(scope, scope, text, scope, own_headers)
            response = await _handle(request, context, target, progress, key)
        status = response.status
    except HearthError as error:
        if progress.run is not None:
            progress.run.fail(error)
        response = _error(error, endpoint, request)
        status, code = error.status, error.code
        if context.audit.is_on:
            audited.refused(context.audit, error, request, name, endpoint.name if endpoint is not None else "", scope)
        if status == 401:
            response.headers.add("WWW-Authenticate", 'Bearer realm="hearthd"')
            if request.method in ("GET", "HEAD"):
                response.headers.add("WWW-Authenticate", 'Basic realm="hearthd", charset="UTF-8"')
        if error.status in (408, 413, 415) or error.code == "invalid_body":
            response.force_close()  # the server does not wait for the rest of the body
    except Exception as error:
        if isinstance(error, ConnectionError) and request.transport is None:
            raise  # the client is gone
        answer: HearthError | None = shortage.in_place_of(error)
        if answer is None:
            log.exception(
                "%s %s failed", request.method, endpoint.name if endpoint is not None else "?", extra=fields(request_id=name)
            )
            answer = ServerFault("internal_error", f"the server failed on this request ({name})")
        if progress.run is not None:
            progress.run.fail(answer)
        response = _error(answer, endpoint, request)
        status, code = response.status, answer.code
    finally:
        if progress.run is None:  # the client of a background response was counted when the request was accepted
            context.answered(endpoint.name if endpoint is not None else "", status)
        if scope is not None:
            scope.close()
        if isinstance(connection := request.protocol, Connection):
            connection.in_progress = None
        if scope is not None and scope.trace is not None and endpoint is not None and (by := tracer()) is not None:
            from daemon.api import traced

            try:
                traced.end(by, request, progress, scope, endpoint, status, code)
            except Exception:  # the answer is more important
                log.exception("the trace of a request failed", extra=fields(request_id=name))
        if progress.is_handed_over:
            scope = None  # the next daemon writes the request's log line
        if scope is not None and endpoint is not None and is_recorded:
            scope.ended(name, endpoint.name, status)
            if context.audit.with_requests:
                audited.request(context.audit, request, name, endpoint.name, status, scope)
    if progress.is_open and not progress.takes_over and request.transport is not None:
        log.warning("a stream ends at the restart: status %d", status, extra=fields(request_id=name))
        request.transport.abort()  # the client already has the beginning of another answer, so this one cannot be sent
    if not response.prepared:
        response.headers["X-Request-Id"] = name
        response.headers["Server"] = SERVER
        if more_headers:
            response.headers.update(more_headers)
        if request.method == "CONNECT":
            response.force_close()  # bytes that follow are meant for another host
    return response


def _is_recorded(request: web.Request, endpoint: Endpoint | None) -> bool:
    """Returns whether a request is logged and traced: only a POST to an endpoint that reads a body is. endpoint: None for an
    unknown path."""
    return endpoint is not None and endpoint.body is not None and request.method == "POST"


def _progress(request: web.Request) -> Progress:
    """Makes a Progress, the state of one request from which a later daemon can continue it, and returns it. The Progress is also
    stored as `in_progress` of the request's connection. If an earlier daemon received the request and handed the request's state
    over at a restart, the Progress contains that state."""
    connection = request.protocol
    name = request_id(request.headers.get("X-Request-Id"))
    if not isinstance(connection, Connection):
        return Progress(name)
    progress = connection.in_progress = Progress(name, connection.take_before(), owner_of(connection.transport))
    return progress


def _error(error: HearthError, endpoint: Endpoint | None, request: web.Request) -> web.Response:
    return error_response(error, router.error_form(endpoint, request.rel_url.raw_path, request.headers)(error))


async def _handle(
    request: web.Request, context: ApiContext, target: router.Target | None, progress: Progress, key: Key | None
) -> web.StreamResponse:
    """Passes a request to its endpoint, or to another server that answers for its model, and returns the response. target: the
    endpoint of the path; None for an unknown path. key: the sender's key; None if keys are set and the request has none. Raises
    HearthError: 404 for a path that is unknown or not served by this listener, and any error of the endpoint."""
    if target is None or not context.serves(target.endpoint):
        raw_path = request.rel_url.raw_path[:256]
        if target is not None:
            hint = "another listener of this node serves it: see --admin-listen"
        elif near := router.nearest(raw_path):
            hint = f"did you mean {near}?"
        else:
            hint = router.main_paths(raw_path)
        raise BadRequest("not_found", f"no such path: {raw_path}; {hint}", status=404)
    endpoint = target.endpoint
    if request.method not in endpoint.methods:
        error = BadRequest("method_not_allowed", f"use {endpoint.methods[0]} for this path, not {request.method[:32]}", status=405)
        response = _error(error, endpoint, request)
        response.headers["Allow"] = ", ".join(endpoint.methods)
        return response
    sender = "" if key is None else key.tenant.name
    call = Call(request, context, endpoint, target.scope, target.path_id, progress, key is None, sender)
    call.key = "" if key is None else key.sum_start
    upstreams = context.upstreams
    if endpoint.passes_on and upstreams is not None and upstreams.by_name:
        passed_on = await answer_elsewhere(call, upstreams, endpoint.passes_on)
        if passed_on is not None:
            return passed_on
    return await endpoint.handle(call)
