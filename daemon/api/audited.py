"""Writes entries of the audit log: refusals by the HTTP API, operators' commands and, if the settings ask for it, all requests."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from aiohttp import web

from daemon.api.endpoint import Call
from daemon.api.request_scope import RequestScope
from daemon.errors import HearthError
from daemon.record.audit_log import AuditLog

_OVER_LIMIT = ("rate_limit_exceeded", "request_over_limit")


def refused(
    audit: AuditLog, error: HearthError, request: web.Request, request_id: str, endpoint: str, scope: RequestScope | None
) -> None:
    """Writes an audit log entry if `error` refuses a request for its key or for exceeding a limit of its tenant; other errors are
    not written. endpoint: "" for an unknown path. scope: None if the request was refused before its tenant was known."""
    about = {"address": request.remote, "endpoint": endpoint, "request_id": request_id, "message": error.message}
    if scope is None and error.status in (401, 403):
        audit.write_refusal(error.code, "key_refused", error.code, **error.details, **about)
    elif scope is not None and error.code in _OVER_LIMIT:
        tenant = scope.tenant.name
        audit.write_refusal(f"limit {tenant}", "limit_refused", error.code, tenant=tenant, key=scope.key.sum_start, **about)


@contextmanager
def command(audit: AuditLog, call: Call, name: str, model: str, options: Mapping[str, object] | None = None) -> Iterator[None]:
    """Returns a context manager for an operator's command: it writes one audit log entry with the result of the code inside it
    ("ok", an error's code, "cancelled" or "internal"), and lets exceptions pass. name: the command's name in `hearth`. model: the
    model or adapter that it changes. options: the command's further arguments."""
    result, message = "internal", None
    try:
        yield
        result = "ok"
    except HearthError as error:
        result, message = error.code, error.message
        raise
    except asyncio.CancelledError:
        result, message = "cancelled", "the client left before the command ended"
        raise
    finally:
        about = {"tenant": call.tenant or None, "key": call.key or None, "address": call.request.remote}
        audit.write(
            "command", result, **about, request_id=call.request_id, command=name, model=model, options=options, message=message
        )


def request(audit: AuditLog, request: web.Request, request_id: str, endpoint: str, status: int, scope: RequestScope) -> None:
    """Writes an audit log entry for a request that has ended. endpoint: its name. status: the HTTP status; 499 if the client had
    gone."""
    audit.write(
        "request",
        "ok" if status < 400 else str(status),
        tenant=scope.tenant.name,
        key=scope.key.sum_start,
        address=request.remote,
        endpoint=endpoint,
        status=status,
        request_id=request_id,
        **scope.counted(),
    )
