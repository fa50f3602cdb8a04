"""`python -m daemon.api.reference` prints docs/reference/http.md, from the endpoints, the body types and the table of error codes.

A field's meaning is written next to its type; a test finds fields and codes without a meaning.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
from msgspec import Struct

from daemon.api.bodies.response_format import GRAMMAR_FIELDS
from daemon.api.bodies.unsupported import WITHOUT_EFFECT, neutral_values
from daemon.api.endpoint import FieldTable
from daemon.api.endpoints.registry import ENDPOINTS
from daemon.api.error_codes import CODES
from daemon.http import connection

CONTROL = {
    "GET /control/v1/status": "`hearth status`",
    "GET /control/v1/models": "`hearth ps`, `hearth models`",
    "GET /control/v1/queue": "`hearth queue`",
    "GET /control/v1/version": "`hearth version`",
    "GET /control/v1/events": "`hearth events`, a JSON object a line; `?follow=1` goes on",
    "GET /control/v1/why/{name}": "`hearth why`",
    "GET /control/v1/plan/{name}": "`hearth plan`: what loading the model would do now, with the scores; nothing is done",
    "GET /control/v1/gpus": "`hearth gpus`: the machine's GPUs as the driver tells of them, and the faults seen since the start",
    "GET /control/v1/config": "`hearth config`: all settings as they are used, and where each is set",
    "GET /control/v1/keys": "`hearth keys`: the tenants of the keys file, their limits, what is left of them, the next expiry",
    "GET /control/v1/names": "`hearth models`: the table of names, where each entry leads now, and why models are skipped",
    "GET /control/v1/room": "`hearth evict --dry-run`: who would leave to free `?bytes=N`, on each device or `&device=NAME`",
    "GET /control/v1/experts/{name}": "`hearth experts`: tokens that passed through each expert of the model, by layer and device",
    "GET /control/v1/history": "`hearth history`: the last placements with victims and scores; `?model=NAME`",
    "GET /control/v1/top": "`hearth top`: devices, models, tokens and the last swaps, as they are now",
    "POST /control/v1/models/{name}/{command}": "load, unload, pin, unpin, enable, disable: progress, a JSON object a line, the "
    "last one the result; `?wait=0` answers at once; `unload?to=warm` leaves its weights in host memory; `load?adapter=DIR` "
    "loads the LoRA adapter in a folder by this name, `&replace=1` in place of one that was loaded so",
    "POST /control/v1/drain": "`hearth drain`; `?model=NAME`",
    "POST /control/v1/resume": "`hearth resume`; `?model=NAME`",
    "POST /control/v1/reload": "`hearth reload`: what was applied and what needs a restart",
}


def tables() -> list[FieldTable]:
    """Returns the tables of body fields of all endpoints, in order, each only once."""
    bodies = [endpoint.body for endpoint in ENDPOINTS if endpoint.body is not None]
    return list({table.type: table for body in bodies for table in body.tables}.values())


def body_fields(body: type[Struct]) -> dict[str, str]:
    """Returns the fields that a body type declares itself, not those that it inherits: name -> type and range in words. Fields that
    are not served are left out."""
    own = set(body.__annotations__) - set(neutral_values(body))
    info: Any = msgspec.inspect.type_info(body)
    return {field.name: _type(field.type) for field in info.fields if field.name in own}


def _type(kind: Any) -> str:
    inspect = msgspec.inspect
    if isinstance(kind, inspect.UnionType):
        return " or ".join(_type(one) for one in kind.types if not isinstance(one, inspect.NoneType))
    if isinstance(kind, inspect.IntType | inspect.FloatType):
        name = "integer" if isinstance(kind, inspect.IntType) else "number"
        least, most = kind.ge if kind.ge is not None else kind.gt, kind.le
        if most is not None and abs(most) >= 2**31 - 1:
            most = None
        if least is not None and least < -(2**30):
            least = None
        if least is None and most is None:
            return name
        above = "above " if kind.gt is not None else ""
        return f"{name} {above}{_number(least)} to {_number(most)}" if most is not None else f"{name} from {_number(least)}"
    if isinstance(kind, inspect.ListType):
        most_items = f", at most {kind.max_length}" if kind.max_length else ""
        return f"list of {_type(kind.item_type).split(' ')[0]}s{most_items}"
    if isinstance(kind, inspect.DictType | inspect.StructType):
        return "object"
    names: dict[Any, str] = {
        **dict.fromkeys((inspect.StrType, inspect.LiteralType), "text"),
        **dict.fromkeys((inspect.RawType, inspect.AnyType), "JSON"),
        inspect.BoolType: "boolean",
    }
    return names.get(type(kind), type(kind).__name__)


def _number(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "any"
    return f"{value:g}" if abs(value) < 1e6 else str(int(value))


def reference() -> str:
    lines = [
        "# HTTP",
        "",
        "Made by `python -m daemon.api.reference` from the code; do not edit by hand.",
        "",
        "All but `/ping`, `/version`, `/load`, the status page and what loads adapters are there twice: as written here, and below",
        "`/m/MODEL`, for that model alone. Where keys are set each path needs `Authorization: Bearer KEY`, except the *open* ones;",
        "those marked *admin* need a tenant with `admin = true` as soon as there is one, and those marked *operator* always.",
        "Without keys the latter are for connections from the node's own machine. The key may also stand in `x-api-key` or",
        "`api-key`.",
        "`X-Request-Id` is taken from the request or made, and always returned. Where [traces](../operations.md#traces) are on,",
        "`traceparent` and `tracestate` are read and `traceresponse` is returned. `OPTIONS` is answered to pages of",
        "`allowed_origins` ([keys.md](keys.md#pages-of-other-sites)).",
        "",
        "| method | path | key | what it is |",
        "|---|---|---|---|",
    ]
    for endpoint in ENDPOINTS:
        access = "operator" if endpoint.operating else "open" if endpoint.open else "admin" if endpoint.watching else "yes"
        lines.append(f"| {endpoint.methods[0]} | `{endpoint.paths[0]}` | {access} | {endpoint.about} |")
    for title, body, meanings in tables():
        lines += ["", f"## {title}", "", "| field | type | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {text} | {meanings.get(name, '')} |" for name, text in body_fields(body).items()]
    lines += ["", "Of " + ", ".join(f"`{name}`" for name in GRAMMAR_FIELDS) + " one may be given.", ""]
    lines += [
        "Fields that other servers know and this one does not serve are refused by name, with any value but null and these:",
        "",
    ]
    lines += ["| field | where | asks for nothing |", "|---|---|---|"]
    types = {table.type for table in tables()}
    for title, body, _ in tables():
        inherited = dict(item for base in body.__mro__[1:] if base in types for item in neutral_values(base).items())
        for name, values in neutral_values(body).items():
            if inherited.get(name) != values:
                shown = ", ".join(f"`{value}`" for value in values)
                lines.append(f"| `{name}` | {title.lower()} | {shown} |")
    lines += ["", "`functions` are passed over where `function_call` is `none`. Fields that are not known are ignored."]
    lines[-1] += " Accepted, and without effect: " + ", ".join(f"`{name}`" for name in WITHOUT_EFFECT) + "."
    lines += [
        "",
        "## Streams",
        "",
        "`data: {…}` per step and `data: [DONE]` at the end, as OpenAI has it. A silent stream gets a comment every",
        'sse_comment_every_s. An error after the first byte is a last event `data: {"error": {…}}`, without `[DONE]`.',
        "Anthropic's and Ollama's streams have their own forms: [messages.md](messages.md), [ollama.md](ollama.md).",
        "",
        "## Connections",
        "",
        f"Address and headers of a request have to be in {connection.HEAD_LIMIT_S:g} s after connecting, or after their first byte",
        "on a connection that is used again; its body within body_read_timeout_s. A header may have "
        f"{connection.HEADER_BYTES >> 10} KiB, all of them together",
        f"about {connection.HEAD_BYTES >> 10} KiB. A connection that is not used is closed after an hour. One client",
        "may have max_connections_per_address connections open; `admin_listen` and Unix sockets don't count.",
        "",
        "## Errors",
        "",
        '`{"error": {"message", "type", "param", "code"}}`. 429 and 503 carry `Retry-After` where trying again makes',
        "sense. What to do about each: [operations.md](../operations.md#refusals). What cannot be read as HTTP/1.1 is answered",
        "in the same form, and the connection is closed.",
        "",
        "| code | status | what it means |",
        "|---|---|---|",
        *[f"| `{code}` | {status} | {meaning} |" for code, (status, meaning, _) in CODES.items()],
        "",
        "## The control API",
        "",
        "HTTP over the Unix sockets. The control socket takes all of it, the status socket the GETs. An error is `{code, message,",
        "details}`; its status and the exit code of `hearth` go together: 400 2, 403 6, 404 3, 409 4, 500 1, 503 5, 507 7.",
        "",
        "| request | what it is |",
        "|---|---|",
        *[f"| `{request}` | {text} |" for request, text in CONTROL.items()],
    ]
    return "\n".join(lines) + "\n"


def codes_table() -> str:
    """Returns the part of docs/operations.md that is generated from the table of error codes."""
    lines = ["| code | status | what it means | what to do |", "|---|---|---|---|"]
    lines += [f"| `{code}` | {status} | {meaning} | {do} |" for code, (status, meaning, do) in CODES.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(codes_table() if sys.argv[1:] == ["codes"] else reference())
