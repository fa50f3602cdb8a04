"""Writes to the audit log the commands that come over the control sockets: who sent them, the arguments, and how they ended."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.record.audit_log import AuditLog

FAILED = web.RequestKey("failed", HearthError)  # the error of a command that has begun its answer, or took effect and was not saved
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_PEER = struct.Struct("iII")  # struct ucred of unix(7): pid, uid, gid


def _peer(request: web.Request) -> dict[str, int]:
    """Returns `uid` and `pid` of the client's process at the other end of the Unix socket, {} if they are not known. Under
    systemd's PrivateUsers, the uid of all users but hearthd's own and root is 65534."""
    sock = request.get_extra_info("socket")
    if sock is None:
        return {}
    try:
        pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    except OSError:
        return {}
    return {"uid": uid, "pid": pid}


def commands(audit: Callable[[], AuditLog]) -> Middleware:
    """Returns a middleware of aiohttp that writes each POST request, that is, each command, to the audit log when the command has
    ended. audit: returns the current audit log."""

    @web.middleware
    async def write_command(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.method != "POST" or not audit().is_on:
            return await handler(request)
        who = _peer(request)  # read now, because the connection may be closed at the end
        failed: HearthError | None = HearthError("cancelled", "the client left before the command ended, which goes on")
        try:
            response = await handler(request)
            failed = request.get(FAILED)
        except HearthError as error:
            failed = error
            raise
        except asyncio.CancelledError:
            failed = request.get(FAILED, failed)
            raise
        except web.HTTPException as error:
            failed = BadRequest("not_found", f"{request.method} {request.path}: {error.reason}", status=error.status)
            raise
        except Exception:
            failed = ServerFault("internal", "hearthd failed on this command; see its log")
            raise
        finally:
            _write(audit(), request, who, failed)
        return response

    return write_command


def _write(audit: AuditLog, request: web.Request, who: dict[str, int], error: HearthError | None) -> None:
    options: dict[str, Any] = dict(request.query)
    model = request.match_info.get("name") or options.pop("model", "")
    audit.write(
        "command",
        "ok" if error is None else error.code,
        **who,
        command=request.path.rpartition("/")[2],
        model=model,
        options=options or None,
        message=None if error is None else error.message,
    )
