"""The HTTP application: paths to handlers, errors to OpenAI's shape, request ids."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

from config.units import parse_bytes
from daemon import shortage
from daemon.access import Access
from daemon.api import paths
from daemon.api.context import ApiContext
from daemon.api.embeddings import embeddings
from daemon.api.generate import generate
from daemon.api.page import page, page_events
from daemon.api.request_id import request_id
from daemon.api.request_scope import RequestScope
from daemon.api.responses import SERVER, error_response, json_response, model_object
from daemon.api.schema import CHAT, COMPLETIONS
from daemon.api.tokenize import tokenize
from daemon.connection import ANSWERING, Answering, Runner
from daemon.contracts import HealthPort, HttpSettings, ModelPort, RequestPort, TextPort
from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.logs import fields
from daemon.page.feed import PageFeed
from daemon.stream_clock import StreamClock
from daemon.version import VERSION

log = logging.getLogger("hearthd.api")
http_log = logging.getLogger("hearthd.http")
_NO_HEADERS: Mapping[str, str] = {}
CLIENT_GONE = 499  # what the log says of a request nobody waited for


def make_app(
    requests: RequestPort,
    models: ModelPort,
    text: TextPort,
    settings: HttpSettings,
    health: HealthPort,
    access: Access | None = None,
    only: frozenset[str] | None = None,
    without: frozenset[str] = frozenset(),
    feed: PageFeed | None = None,
    answered: Callable[[str, int], None] = lambda endpoint, status: None,
) -> web.Application:
    """Serve it through `make_runner`: without its settings a client's disconnect goes unnoticed. access: default: no keys, this
    machine's names only. only, without: the endpoints (daemon/api/paths.py) that are served or not.
    feed: what the status page shows; None: there is none. answered: told the endpoint ("" for an unknown path) and the status of
    each answer."""
    context = ApiContext(
        requests=requests,
        models=models,
        text=text,
        health=health,
        settings=settings,
        clock=StreamClock(lambda: settings.sse_comment_every_s, lambda: settings.request_timeout_s),
        max_body_bytes=parse_bytes(settings.max_body_bytes),
        access=access or Access(),
        only=only,
        without=without,
        page=feed,
        answered=answered,
    )

    async def handle(request: web.Request) -> web.StreamResponse:
        if "Expect" in request.headers:
            _expect(request)
        return await _answer_errors(request, context)

    app = web.Application()  # body.py limits the size; paths.py is the router
    app[ANSWERING] = Answering(HearthError.body, answered, handle)
    return app


def make_runner(app: web.Application, shutdown_timeout_s: float = 30.0, **options: Any) -> Runner:
    """handler_cancellation: a disconnect ends the handler, which cancels the request. auto_decompress off: compressed bodies are
    refused, never inflated."""
    return Runner(
        app,
        handler_cancellation=True,
        auto_decompress=False,
        access_log=None,
        logger=http_log,
        shutdown_timeout=shutdown_timeout_s,
        tcp_keepalive=False,  # connections have it from the listener (daemon/listeners.py): a system call less for each
        **options,
    )


def _not_malformed_http(record: logging.LogRecord) -> bool:
    """aiohttp logs a traceback for every body that breaks off; anybody could fill the log with them."""
    error = record.exc_info[1] if record.exc_info else None
    if not isinstance(error, (HttpProcessingError, web.RequestPayloadError)):
        return True
    log.debug("malformed HTTP: %s", error)
    return False


http_log.addFilter(_not_malformed_http)


def _expect(request: web.Request) -> None:
    """`Expect: 100-continue`; any other expectation is ignored, as HTTP allows."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.transport is not None:
        request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")


async def _answer_errors(request: web.Request, context: ApiContext) -> web.StreamResponse:
    name = request_id(request.headers.get("X-Request-Id"))
    target = paths.target(request.rel_url.raw_path)
    cors = context.access.cors
    more_headers = cors.headers(request, target) if cors is not None else _NO_HEADERS
    scope: RequestScope | None = None
    status = CLIENT_GONE
    try:
        preflight = cors.preflight(request, target) if more_headers and cors is not None else None
        tenant = context.access.admit(request, target) if preflight is None else None
        if preflight is not None:
            response: web.StreamResponse = preflight
        elif tenant is not None:
            scope = RequestScope(tenant, context.models, context.requests)
            response = await _handle(request, context.scoped(scope, scope, more_headers), target, name)
        elif target is not None and target.endpoint == paths.PAGE:
            response = await _handle(request, context, target, name)
        else:
            response = _tell_stranger(context, target)
        status = response.status
    except HearthError as error:
        response = error_response(error)
        status = error.status
        if status == 401:
            response.headers.add("WWW-Authenticate", 'Bearer realm="hearthd"')
            if request.method in ("GET", "HEAD"):
                response.headers.add("WWW-Authenticate", 'Basic realm="hearthd", charset="UTF-8"')
        if error.status in (408, 413, 415) or error.code == "invalid_body":
            response.force_close()  # the rest of the body is not waited for
    except Exception as error:
        if isinstance(error, ConnectionError) and request.transport is None:
            raise  # the client is gone
        answer: HearthError | None = shortage.in_place_of(error)
        if answer is None:
            log.exception("%s %s failed", request.method, target.endpoint if target else "?", extra=fields(request_id=name))
            answer = ServerFault("internal_error", f"the server failed on this request ({name})")
        response = error_response(answer)
        status = response.status
    finally:
        context.answered(target.endpoint if target is not None else "", status)
        if scope is not None and target is not None and request.method == "POST" and target.endpoint != paths.PING:
            scope.ended(name, target.endpoint, status)
    if not response.prepared:
        response.headers["X-Request-Id"] = name
        response.headers["Server"] = SERVER
        if more_headers:
            response.headers.update(more_headers)
        if request.method == "CONNECT":
            response.force_close()  # what follows would be meant for another host
    return response


async def _handle(request: web.Request, context: ApiContext, target: paths.Target | None, request_id: str) -> web.StreamResponse:
    if target is None or target.endpoint in context.without or (context.only is not None and target.endpoint not in context.only):
        raw_path = request.rel_url.raw_path[:256]
        near = paths.nearest(raw_path)
        hint = f"did you mean {near}?" if near else "chats go to /v1/chat/completions, and /v1/models lists what there is"
        raise BadRequest("not_found", f"no such path: {raw_path}; {hint}", status=404)
    allowed = paths.METHODS[target.endpoint]
    if request.method not in allowed:
        error = BadRequest("method_not_allowed", f"use {allowed[0]} for this path, not {request.method[:32]}", status=405)
        response = error_response(error)
        response.headers["Allow"] = ", ".join(allowed)
        return response
    if target.endpoint == paths.CHAT:
        return await generate(request, context, CHAT, target.scope, request_id)
    if target.endpoint == paths.COMPLETIONS:
        return await generate(request, context, COMPLETIONS, target.scope, request_id)
    if target.endpoint == paths.EMBEDDINGS:
        return await embeddings(request, context, target.scope, request_id)
    if target.endpoint in (paths.TOKENIZE, paths.DETOKENIZE):
        return await tokenize(request, context, target.endpoint, target.scope)
    if target.endpoint == paths.METRICS:
        model = None if target.scope is None else context.models.canonical(target.scope)
        return web.Response(
            body=context.health.metrics(model), headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        )
    if target.endpoint in (paths.PAGE, paths.PAGE_EVENTS):
        if context.page is None:
            raise BadRequest("not_found", "this server has no status page", status=404)
        return page(request) if target.endpoint == paths.PAGE else await page_events(request, context.page, request_id)
    if target.scope is not None:
        context.models.resolve(target.scope)
    if target.endpoint == paths.MODELS:
        entries = context.models.entries() if target.scope is None else [context.models.resolve(target.scope)]
        return json_response({"object": "list", "data": [model_object(entry) for entry in entries]})
    if target.endpoint == paths.MODEL:
        assert target.model_id is not None
        return json_response(model_object(_find(context.models, target.model_id)))
    if target.endpoint == paths.VERSION:
        return json_response({"version": VERSION})
    if target.endpoint == paths.LOAD:
        return json_response({"server_load": context.health.num_open()})
    good, body = _health(context, target)
    return json_response(body, 200 if good else 503)


def _health(context: ApiContext, target: paths.Target) -> tuple[bool, dict[str, object]]:
    if target.endpoint == paths.PING:
        return True, {"status": "ok"}
    return context.health.ready() if target.endpoint == paths.READYZ else context.health.health()


def _tell_stranger(context: ApiContext, target: paths.Target | None) -> web.StreamResponse:
    """Health for load balancers without a key: yes or no, and nothing of the node's inside."""
    assert target is not None
    good, body = _health(context, target)
    return json_response({"status": body["status"]}, 200 if good else 503)


def _find(models: ModelPort, name: str) -> Any:
    """A listed model, also one that a request would be refused for."""
    for entry in models.entries():
        if entry.name == name:
            return entry
    return models.resolve(name)
