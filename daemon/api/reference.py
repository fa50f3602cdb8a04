"""`python -m daemon.api.reference` prints docs/reference/http.md, from the paths, the body types and the table of codes.

What a type cannot say, a field's meaning, stands here; a test finds fields, paths and codes without one.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import msgspec
from msgspec import Struct

from daemon import connection
from daemon.api import paths, schema
from daemon.api.embeddings_body import EmbeddingsBody
from daemon.api.error_codes import CODES
from daemon.api.response_format import GRAMMAR_FIELDS
from daemon.api.text_bodies import DetokenizeBody, TokenizeBody
from daemon.api.unsupported import WITHOUT_EFFECT, neutral_values

ENDPOINTS = {
    "chat": "OpenAI's chat completions; `stream: true` answers with server-sent events",
    "completions": "OpenAI's completions: `prompt` is text, a list of texts, token ids, or a list of those",
    "embeddings": "OpenAI's embeddings, of encoder models",
    "models": "OpenAI's list of models; below `/m/MODEL` that one alone",
    "model": "one of them; a `/` in its id may be written as it is or as %2F",
    "tokenize": "token ids of a text or of messages",
    "detokenize": "the text of token ids",
    "healthz": "200 while the event loop turns and no roll-back is overdue, else 503; JSON says which device and why. "
    "`degraded` with 200: a task of the daemon failed in the last minute and was started again",
    "health": "the same, by vLLM's name",
    "readyz": "200 while requests are taken and an engine is up, else 503 with the reason",
    "ping": "200, also to POST: the server answers",
    "version": '`{"version"}` of hearthd',
    "load": '`{"server_load"}`: the requests that are open, waiting or running; one for several answers counts as several',
    "metrics": "Prometheus, see [metrics.md](metrics.md)",
    "page": "the status page",
    "page_events": "what the status page shows, as server-sent events",
}
FIELDS = {
    "model": "name or alias; below `/m/MODEL` it may be left out",
    "messages": "role and content (text, or text parts), tool calls and their results, refusals of the assistant",
    "input": "text, a list of texts, token ids, or a list of those",
    "encoding_format": "float, or base64 of little-endian float32; default float",
    "dimensions": "the model's own, or a size its checkpoint was trained to be cut to",
    "prompt": "what is completed, or tokenised",
    "temperature": "0 is greedy; default: the model's settings, then the checkpoint's, then 1",
    "top_p": "nucleus; 0: the likeliest token",
    "top_k": "-1 and 0: all",
    "min_p": "of the likeliest token's probability",
    "seed": "the same seed, prompt and settings give the same text",
    "max_tokens": "default: what the context leaves",
    "max_completion_tokens": "the same",
    "min_tokens": "before that no end token counts",
    "ignore_eos": "goes on after end tokens",
    "stop": "up to 16 strings; the text ends before them",
    "stop_token_ids": "tokens that end the text",
    "stream": "server-sent events",
    "stream_options": "include_usage: a last chunk with the usage; continuous_usage_stats: usage in each chunk. Where a model was "
    "paused to make room, usage has an object `hearth` too: preemptions, restored_tokens, recomputed_tokens",
    "user": "read and not used",
    "priority": "where KV runs short, sequences of lower priority give way first",
    "n": "answers per prompt",
    "best_of": "must equal n; 0: not asked for",
    "presence_penalty": "taken off once for each token that is there",
    "frequency_penalty": "taken off for each time it is there",
    "repetition_penalty": "divides the score of tokens that are there; 1: none",
    "logit_bias": "token id to bias",
    "allowed_token_ids": "no other tokens come, end tokens neither",
    "bad_words": "up to 256 texts of up to 128 characters; their tokens do not come one after the other",
    "response_format": "text, json_object, or json_schema: the answer follows it",
    "regex": "the answer matches it",
    "grammar": "the answer follows it (Lark)",
    "guided_json": "vLLM's name for a schema",
    "guided_regex": "vLLM's name for regex",
    "guided_grammar": "vLLM's name for grammar",
    "guided_choice": "one of these texts",
    "structured_outputs": "vLLM's newer name for them: json, regex, grammar or choice",
    "logprobs": "log-probabilities of the tokens; of a completion with that many alternatives",
    "top_logprobs": "alternatives per token",
    "prompt_logprobs": "log-probabilities of the prompt's tokens, with that many alternatives; not in streams",
    "echo": "the prompt before the answer, with its log-probabilities if asked for",
    "tools": "functions the model may call",
    "tool_choice": "auto, none, required, or one function by name",
    "parallel_tool_calls": "false: one call at most",
    "add_generation_prompt": "as the template has it; default true",
    "chat_template_kwargs": "given to the template",
    "documents": "given to the template",
    "add_special_tokens": "default true",
    "cache_salt": "only requests with the same salt, of the same tenant, share cached prefixes",
    "truncate_prompt_tokens": "the last so many tokens of the prompt are kept, special ones beside them; -1: as many as fit",
    "continue_final_message": "the reply continues the last message, the assistant's, and holds the continuation only",
    "reasoning_effort": "given to the template; `none` turns `enable_thinking` off, too",
    "suffix": "what follows the gap that the model fills; of models with tokens for filling in the middle",
    "return_token_strs": "each token's text as well",
    "tokens": "token ids",
}
CONTROL = {
    "GET /control/v1/status": "`hearth status`",
    "GET /control/v1/models": "`hearth ps`, `hearth models`",
    "GET /control/v1/queue": "`hearth queue`",
    "GET /control/v1/version": "`hearth version`",
    "GET /control/v1/events": "`hearth events`, a JSON object a line; `?follow=1` goes on",
    "GET /control/v1/why/{name}": "`hearth why`",
    "GET /control/v1/plan/{name}": "`hearth plan`: what loading the model would do now, with the scores; nothing is done",
    "GET /control/v1/gpus": "`hearth gpus`: the machine's GPUs as the driver tells of them, and the faults seen since the start",
    "GET /control/v1/room": "`hearth evict --dry-run`: who would leave to free `?bytes=N`, on each device or `&device=NAME`",
    "GET /control/v1/history": "`hearth history`: the last placements with victims and scores; `?model=NAME`",
    "GET /control/v1/top": "`hearth top`: devices, models, tokens and the last swaps, as they are now",
    "POST /control/v1/models/{name}/{command}": "load, unload, pin, unpin, enable, disable: progress, a JSON object a line, the "
    "last one the result; `?wait=0` answers at once; `unload?to=warm` leaves its weights in host memory",
    "POST /control/v1/drain": "`hearth drain`; `?model=NAME`",
    "POST /control/v1/resume": "`hearth resume`; `?model=NAME`",
    "POST /control/v1/reload": "`hearth reload`: what was applied and what needs a restart",
}
_BODIES: tuple[tuple[str, type[Struct]], ...] = (
    ("Chat and completions", schema.Common),
    ("Chat only", schema.ChatBody),
    ("Completions only", schema.CompletionBody),
    ("Embeddings", EmbeddingsBody),
    ("`/tokenize`, beside the fields of a chat", TokenizeBody),
    ("`/detokenize`", DetokenizeBody),
)


def body_fields(body: type[Struct]) -> dict[str, str]:
    """Field -> type with its range, of what a body type adds to Common; those that are not served are left out."""
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
    names: dict[Any, str] = {inspect.StrType: "text", inspect.BoolType: "boolean", inspect.RawType: "JSON", inspect.AnyType: "JSON"}
    return names.get(type(kind), type(kind).__name__)


def _number(value: float | None) -> str:
    if value is None or math.isinf(value):
        return "any"
    return f"{value:g}" if abs(value) < 1e6 else str(int(value))


def addresses() -> dict[str, str]:
    """Endpoint -> its path."""
    return {
        **{endpoint: path for path, endpoint in paths._FIXED.items()},
        **{endpoint: path or "/" for path, endpoint in paths._NODE.items()},
        paths.MODEL: "/v1/models/{id}",
    }


def reference() -> str:
    lines = [
        "# HTTP",
        "",
        "Made by `python -m daemon.api.reference` from the code; do not edit by hand.",
        "",
        "All but `/ping`, `/version`, `/load` and the status page are there twice: as written here, and below `/m/MODEL`, for that",
        "model alone. Where keys are set each path needs `Authorization: Bearer KEY`, except the *open* ones; those marked *admin*",
        "need a tenant with `admin = true` as soon as there is one. The key may also stand in `x-api-key` or `api-key`.",
        "`X-Request-Id` is taken from the request or made, and always returned. `OPTIONS` is answered to pages of",
        "`allowed_origins` ([keys.md](keys.md#pages-of-other-sites)).",
        "",
        "| method | path | key | what it is |",
        "|---|---|---|---|",
    ]
    known = addresses()
    for endpoint, methods in paths.METHODS.items():
        access = "open" if endpoint in paths.OPEN else "admin" if endpoint in paths.WATCHING else "yes"
        lines.append(f"| {methods[0]} | `{known[endpoint]}` | {access} | {ENDPOINTS.get(endpoint, '')} |")
    for title, body in _BODIES:
        lines += ["", f"## {title}", "", "| field | type | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {text} | {FIELDS.get(name, '')} |" for name, text in body_fields(body).items()]
    lines += ["", "Of " + ", ".join(f"`{name}`" for name in GRAMMAR_FIELDS) + " one may be given.", ""]
    lines += [
        "Fields that other servers know and this one does not serve are refused by name, with any value but null and these:",
        "",
    ]
    lines += ["| field | where | asks for nothing |", "|---|---|---|"]
    for title, body in _BODIES:
        inherited = neutral_values(schema.Common) if body is not schema.Common else {}
        for name, values in neutral_values(body).items():
            if name not in inherited:
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
    """The part of docs/operations.md that is made from the table."""
    lines = ["| code | status | what it means | what to do |", "|---|---|---|---|"]
    lines += [f"| `{code}` | {status} | {meaning} | {do} |" for code, (status, meaning, do) in CODES.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(codes_table() if sys.argv[1:] == ["codes"] else reference())
