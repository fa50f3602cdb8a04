"""The control API on the Unix sockets, which `hearth` and scripts use.

Whoever may open the control socket may do everything; whoever may open the status socket may only read. Commands answer with
NDJSON: progress lines, then one line `{"event": "result", "ok": ..}`. An error that is known before the first line is an HTTP
status. Its body, and the `error` of a failed result, is `{code, message, details}`. daemon/operate/control_status.py maps the
statuses to exit codes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from config.devices import NoGpus
from daemon.api.app import http_log
from daemon.contracts import LoadedAdapter
from daemon.errors import BadRequest, HearthError, NotNow, ServerFault, from_refusal
from daemon.http.answers import SERVER
from daemon.http.connection import ANSWERING, Answering, Runner
from daemon.node.node import NodeParts
from daemon.operate import audited, key_rows, operator_views
from daemon.operate.control_status import EXIT_FAULT, STATUS_OF_EXIT
from daemon.process import shortage
from scheduler.node import events
from scheduler.node.actions import Refusal

log = logging.getLogger("hearthd.control")
FOLLOW_LIMIT = 4096
NUM_FOLLOWERS = 64  # clients that may follow the events, per socket
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_COMMANDS: dict[str, Callable[..., events.Event]] = {
    "load": events.LoadRequested,
    "unload": events.UnloadRequested,
    "pin": events.PinRequested,
    "unpin": events.UnpinRequested,
    "enable": events.EnableRequested,
    "disable": events.DisableRequested,
}
_REMEMBERED = ("pin", "unpin", "enable", "disable")


def make_control_app(node: NodeParts, read_only: bool = False) -> web.Application:
    """Returns the aiohttp application of the control socket. read_only: returns the application of the status socket instead, which
    every user of the machine may open and which refuses commands."""
    api = ControlApi(node)
    app = web.Application(middlewares=[_errors, audited.commands(lambda: node.audit)])
    app[ANSWERING] = Answering(error_object)
    app.on_response_prepare.append(_name_server)
    app.router.add_get("/control/v1/status", api.status)
    app.router.add_get("/control/v1/models", api.models)
    app.router.add_get("/control/v1/names", api.names)
    app.router.add_get("/control/v1/queue", api.queue)
    app.router.add_get("/control/v1/version", api.version)
    app.router.add_get("/control/v1/events", api.event_lines)
    app.router.add_get("/control/v1/why/{name:(?s:.+)}", api.why)
    app.router.add_get("/control/v1/plan/{name:(?s:.+)}", api.plan)
    app.router.add_get("/control/v1/experts/{name:(?s:.+)}", api.experts)
    app.router.add_get("/control/v1/room", api.room)
    app.router.add_get("/control/v1/history", api.history)
    app.router.add_get("/control/v1/top", api.top)
    app.router.add_get("/control/v1/gpus", api.gpus)
    app.router.add_get("/control/v1/keys", api.keys)
    app.router.add_get("/control/v1/config", api.config)
    if read_only:
        app.router.add_post("/{path:(?s:.*)}", _denied)
        return app
    app.router.add_post("/control/v1/models/{name:(?s:.+)}/{command:[^/]+}", api.command)
    app.router.add_post("/control/v1/drain", api.drain)
    app.router.add_post("/control/v1/resume", api.resume)
    app.router.add_post("/control/v1/reload", api.reload)
    return app


def make_control_runner(node: NodeParts, shutdown_timeout_s: float, read_only: bool = False) -> Runner:
    """Returns the runner that serves the application of `make_control_app`. shutdown_timeout_s: how long a stop of the daemon waits
    for answers that are still being written, in seconds. read_only: as in make_control_app."""
    return Runner(
        make_control_app(node, read_only),
        access_log=None,
        logger=http_log,
        handler_cancellation=True,
        auto_decompress=False,  # request bodies are not used here, so there is no need to decompress them
        shutdown_timeout=shutdown_timeout_s,
    )


async def _denied(request: web.Request) -> web.StreamResponse:
    raise BadRequest("permission_denied", "This socket is for reading only; commands go to the control socket.", status=403)


async def _name_server(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = SERVER


def error_object(error: HearthError) -> dict[str, Any]:
    details: dict[str, object] = dict(error.details)
    if error.retry_after_s is not None:
        details["retry_after_s"] = error.retry_after_s
    return {"code": error.code, "message": error.message, "details": details}


def error_status(error: HearthError) -> int:
    return STATUS_OF_EXIT.get(error.exit_code, STATUS_OF_EXIT[EXIT_FAULT])


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except HearthError as error:
        return _json(error_object(error), error_status(error))
    except web.HTTPException as error:
        code = "not_found" if error.status == 404 else "invalid_request"
        message = f"{request.method} {request.path}: {error.reason}"
        return _json({"code": code, "message": message, "details": {}}, 404 if error.status == 404 else 400)
    except asyncio.CancelledError:
        raise
    except Exception as error:
        if isinstance(error, ConnectionError) and (request.transport is None or request.transport.is_closing()):
            return web.Response()  # the client is gone; raising would log a traceback
        if (short := shortage.in_place_of(error)) is not None:
            return _json(error_object(short), error_status(short))
        log.exception("%s %s failed", request.method, request.path)
        return _json({"code": "internal", "message": "hearthd failed on this command; see its log", "details": {}}, 500)


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(value).encode() + b"\n", status=status, content_type="application/json")


def _line(value: dict[str, Any]) -> bytes:
    return json.dumps(value).encode() + b"\n"


class ControlApi:
    def __init__(self, node: NodeParts) -> None:
        self._node = node
        self._num_followers = 0

    async def status(self, request: web.Request) -> web.Response:
        return _json(self._node.status() | {"keys_ending": key_rows.ending(self._node)})

    async def models(self, request: web.Request) -> web.Response:
        return _json([*self._node.rows(), *self._node.adapter_rows()])

    async def names(self, request: web.Request) -> web.Response:
        return _json(self._node.registry.names.rows())

    async def queue(self, request: web.Request) -> web.Response:
        return _json(self._node.queue_rows())

    async def version(self, request: web.Request) -> web.Response:
        return _json(self._node.version())

    async def why(self, request: web.Request) -> web.Response:
        return _json(self._node.why(request.match_info["name"]))

    async def plan(self, request: web.Request) -> web.Response:
        return _json(operator_views.plan(self._node, request.match_info["name"]))

    async def experts(self, request: web.Request) -> web.Response:
        return _json(operator_views.experts(self._node, request.match_info["name"]))

    async def room(self, request: web.Request) -> web.Response:
        """Answers GET /room: which models would be evicted from each device to free `?bytes=SIZE` on it. `&device=NAME`: only for
        that device."""
        return _json(operator_views.room(self._node, request.query.get("bytes", ""), request.query.get("device", "")))

    async def history(self, request: web.Request) -> web.Response:
        """Answers GET /history: the last placements (loads and evictions of models), oldest first. `?model=NAME`: only those of
        this model."""
        return _json(operator_views.history(self._node, request.query.get("model", "")))

    async def top(self, request: web.Request) -> web.Response:
        return _json(operator_views.top(self._node))

    async def gpus(self, request: web.Request) -> web.Response:
        try:
            return _json(await self._node.gpu_rows())
        except NoGpus as error:
            raise BadRequest("not_found", f"No GPUs: {error}.", status=404) from None

    async def keys(self, request: web.Request) -> web.Response:
        return _json(key_rows.rows(self._node))

    async def config(self, request: web.Request) -> web.Response:
        return _json(self._node.settings.rows())

    async def event_lines(self, request: web.Request) -> web.StreamResponse:
        """Answers with the node's recent events, one JSON object a line. With `?follow=1`, new events follow until the client
        closes the connection. Raises NotNow if too many clients follow already."""
        if request.query.get("follow") not in ("1", "true"):
            response = await _start_lines(request)
            with contextlib.suppress(ConnectionError):  # the client closed the connection
                for event in self._node.ring.history():
                    await response.write(_line(event))
            return response
        if self._num_followers >= NUM_FOLLOWERS:
            raise NotNow("too_many_followers", f"{NUM_FOLLOWERS} clients follow the events on this socket already.")
        self._num_followers += 1
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(FOLLOW_LIMIT)
        stop = self._node.ring.follow(lambda event: _offer(queue, event))
        try:
            response = await _start_lines(request)
            with contextlib.suppress(ConnectionError):
                for event in self._node.ring.history():
                    await response.write(_line(event))
                while True:
                    await response.write(_line(await queue.get()))
        finally:
            stop()
            self._num_followers -= 1
        return response

    async def command(self, request: web.Request) -> web.StreamResponse:
        """Runs a command on a model: load, unload, pin, unpin, enable or disable. Answers with progress lines and the result.
        `?wait=0`: answers as soon as the scheduler has accepted the command. `unload?to=warm`: keeps the copy of the weights in
        host memory. `load?adapter=DIR`: loads the LoRA adapter in this folder under the given name; `&replace=1`: also if that
        replaces a loaded one. `unload` also unloads such an adapter."""
        command = request.match_info["command"]
        make = _COMMANDS.get(command)
        if make is None:
            raise BadRequest("not_found", f"no command {command!r}; known: {', '.join(_COMMANDS)}", status=404)
        asked, node = request.match_info["name"], self._node
        if command == "load" and (path := request.query.get("adapter")) is not None:
            in_place = request.query.get("replace") == "1"
            return await self._adapter(request, node.adapters.load(asked, path, in_place), "adapter")
        if command == "unload" and (loaded := self._loaded_adapter(asked)):
            return await self._adapter(request, node.adapters.unload(loaded), "absent")
        name = node.registry.names.local(asked)
        queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue(FOLLOW_LIMIT)
        stop = node.ring.follow(lambda event: _offer(queue, event) if event.get("model") == name else None)
        try:
            options = _options(command, request)
            done = node.dispatcher.command(lambda now, cause: make(now=now, cause=cause, model=name, **options))
            if done.done():
                _raise_refusal(done)  # raises the refusal as an HTTP status
            # the command has taken effect, whether or not anybody waits for the load
            saved = _saved(request, await node.state_keeper.remember(command, name)) if command in _REMEMBERED else {}
            response = await _start_lines(request)
            if not done.done() and request.query.get("wait") == "0":
                await response.write(_line({"event": "result", "ok": True, "model": name, "waiting": True, **saved}))
                return response
            try:
                await self._pass_on(response, queue, done)
                _raise_refusal(done)
                result = {"event": "result", "ok": True, "model": name, "state": node.state_of(name), **saved}
            except HearthError as error:
                if (not_saved := request.get(audited.FAILED)) is not None:
                    error.message += f"\n{not_saved.message}"
                request[audited.FAILED] = error
                result = saved | {
                    "event": "result",
                    "ok": False,
                    "model": name,
                    "error": error_object(error),
                    "status": error_status(error),
                }
            await response.write(_line(result))
            return response
        finally:
            stop()

    def _loaded_adapter(self, name: str) -> str:
        """Returns the name of the LoRA adapter that has this name or alias, if a command has loaded it; "" if there is none."""
        registry = self._node.registry
        if registry.was_loaded(name):
            return name
        record = registry.names.adapter(name)
        return record.name if record is not None and registry.was_loaded(record.name) else ""

    async def _adapter(self, request: web.Request, work: Awaitable[LoadedAdapter], state: str) -> web.StreamResponse:
        """Waits for the loading or unloading of a LoRA adapter and answers with the result. work: the loading or unloading, which
        is awaited. state: the adapter's state after it, "adapter" or "absent", for the answer."""
        done = await work
        response = await _start_lines(request)
        result = {"event": "result", "ok": True, "model": done.name, "base": done.base, "state": state}
        result |= _saved(request, done.not_saved)
        await response.write(_line(result))
        return response

    async def _pass_on(
        self, response: web.StreamResponse, queue: asyncio.Queue[dict[str, Any]], done: asyncio.Future[Refusal | None]
    ) -> None:
        """Writes the events of a command's model to the client as lines until the command is done. queue: the events. done: the
        result of the command."""
        getter: asyncio.Future[Any] | None = None
        try:
            while not done.done():
                getter = getter or asyncio.ensure_future(queue.get())
                either: list[asyncio.Future[Any]] = [getter, done]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if getter.done():
                    await response.write(_line(getter.result()))
                    getter = None
            while not queue.empty():
                await response.write(_line(queue.get_nowait()))
        finally:
            if getter is not None:
                getter.cancel()

    async def drain(self, request: web.Request) -> web.Response:
        return await self._gate(request, events.DrainRequested)

    async def resume(self, request: web.Request) -> web.Response:
        return await self._gate(request, events.ResumeRequested)

    async def _gate(self, request: web.Request, make: Callable[..., events.Event]) -> web.Response:
        """Drains or resumes the model of `?model=NAME`, or the whole node if no model is named. make: makes the scheduler's event,
        either DrainRequested or ResumeRequested. Raises HearthError if the scheduler refuses."""
        name = request.query.get("model", "")
        model = self._node.registry.names.local(name) if name else ""
        refusal = await self._node.dispatcher.command(lambda now, cause: make(now=now, cause=cause, model=model))
        if refusal is not None:
            raise from_refusal(refusal)
        return _json({"ok": True, "model": model, "draining": self._node.draining})

    async def reload(self, request: web.Request) -> web.Response:
        if self._node.reload is None:
            raise ServerFault("internal", "this node cannot be reloaded")
        return _json(await self._node.reload())


def _options(command: str, request: web.Request) -> dict[str, str]:
    """Returns the further fields of a command's event that the query sets: `to` (cold or warm) for unload, {} otherwise. Raises
    BadRequest for another value of `to`."""
    to = request.query.get("to")
    if command != "unload" or to is None:
        return {}
    if to not in ("cold", "warm"):
        raise BadRequest("invalid_request", f"to={to!r}: allowed are cold and warm", param="to")
    return {"to": to}


def _saved(request: web.Request, error: HearthError | None) -> dict[str, Any]:
    """Returns the fields of a command's result that say whether its effect survives a restart. If it does not, the request is also
    marked for the audit log. error: why the effect could not be saved; None: it was saved."""
    if error is None:
        return {"saved": True}
    request[audited.FAILED] = error
    return {"saved": False, "error": error_object(error), "status": error_status(error)}


def _raise_refusal(done: asyncio.Future[Refusal | None]) -> None:
    """Raises a HearthError if a command was refused. done: the command's result, which must be there already: None, or the
    refusal."""
    refusal = done.result()
    if refusal is not None:
        raise from_refusal(refusal)


async def _start_lines(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    return response


def _offer(queue: asyncio.Queue[dict[str, Any]], event: dict[str, Any]) -> None:
    """Puts an event into the queue of a client that follows the events. If the queue is full the event is dropped, because a client
    that does not read must not fill the memory."""
    with contextlib.suppress(asyncio.QueueFull):
        queue.put_nowait(event)
