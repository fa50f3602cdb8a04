"""The fields that the bodies of Ollama's /api/chat and /api/generate share, such as `options`, `format`, `think`.

Source: https://docs.ollama.com/api. The options and their meanings are from Ollama's documentation of a Modelfile.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Raw, Struct

from config.units import parse_duration_s
from daemon.api.bodies import chat
from daemon.api.bodies.common import Head, Penalty, checked_stops
from daemon.api.bodies.decode import invalid
from daemon.api.bodies.response_format import JSON_OBJECT, following
from daemon.api.bodies.unsupported import neutral, refuse_unsupported

MAX_TOKENS = 2**31 - 1  # longer than any context, so the answer may fill the rest of it
RANDOM_SEED = -1
LOAD, UNLOAD = "load", "unload"  # Head.prompt_kind of a body that only asks to load the model, or to evict it


class Options(Struct):
    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    repeat_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    num_ctx: Any = None
    num_keep: Any = None
    num_batch: Any = None
    num_gpu: Any = None
    num_thread: Any = None
    main_gpu: Any = None
    numa: Any = None
    low_vram: Any = None
    f16_kv: Any = None
    use_mmap: Any = None
    use_mlock: Any = None
    logits_all: Any = None
    vocab_only: Any = None
    embedding_only: Any = None
    mirostat_tau: Any = None
    mirostat_eta: Any = None
    mirostat: Annotated[Raw, neutral("0")] = Raw()
    tfs_z: Annotated[Raw, neutral("1")] = Raw()
    typical_p: Annotated[Raw, neutral("1")] = Raw()
    repeat_last_n: Annotated[Raw, neutral("-1")] = Raw()  # the penalty always covers the whole text
    penalize_newline: Annotated[Raw, neutral("true")] = Raw()


class OllamaBody(Struct, kw_only=True):
    """The request fields that /api/chat and /api/generate share. An empty text in `format` means no format."""

    model: str | None = None
    stream: bool | None = None
    options: Options | None = None
    format: Raw = Raw()
    think: bool | Literal["minimal", "low", "medium", "high", "max"] | None = None
    keep_alive: float | str | None = None
    logprobs: Annotated[Raw, neutral("false")] = Raw()
    top_logprobs: Annotated[Raw, neutral("0")] = Raw()


MEANINGS = {
    "model": "name or alias, with or without `:latest`; below `/m/MODEL` it may be left out",
    "stream": "default true: a JSON object a line",
    "options": "see below",
    "format": '`"json"`, or a JSON schema that the answer follows',
    "think": "given to the template: true and false as `enable_thinking`, minimal, low, medium, high and max as "
    "`reasoning_effort`, too",
    "keep_alive": "how long the model may stay in memory afterwards, until a request says otherwise: seconds, `10m`, `1h30m`; "
    "0: it leaves as soon as it is idle; below 0: it stays until others need the room",
}
OPTION_MEANINGS = {
    "num_predict": "the most tokens of the answer; 0, -1 and -2: what the context leaves",
    "temperature": "0 is greedy; default: the model's settings, then the checkpoint's, then 1",
    "top_p": "nucleus; 0: the likeliest token",
    "top_k": "-1 and 0: all",
    "min_p": "of the likeliest token's probability",
    "seed": "the same seed, prompt and settings give the same text; -1: any",
    "stop": "up to 16 strings; the text ends before them",
    "repeat_penalty": "divides the score of tokens that are there, in the prompt or the answer; 1: none",
    "presence_penalty": "taken off once for each token that is there",
    "frequency_penalty": "taken off for each time it is there",
    "num_ctx": "read and not used: the context is max_model_len",
    "num_keep": "read and not used: no context is shifted",
    "mirostat_tau": "read and not used",
    "mirostat_eta": "read and not used",
    **dict.fromkeys(
        ("num_batch", "num_gpu", "num_thread", "main_gpu", "numa", "low_vram", "f16_kv", "use_mmap", "use_mlock", "logits_all"),
        "read and not used",
    ),
    **dict.fromkeys(("vocab_only", "embedding_only"), "read and not used"),
}


def refuse_unserved(fields: OllamaBody) -> None:
    """Raises BadRequest (400) naming the first field or option that asks for something that is not served."""
    refuse_unsupported(fields)
    if fields.options is not None:
        refuse_unsupported(fields.options, "options.")


def shared_fields(fields: OllamaBody) -> dict[str, Any]:
    """Converts the fields that /api/chat and /api/generate share. Returns arguments for ChatBody or CompletionBody, by name. Raises
    BadRequest naming the field."""
    options = fields.options or Options()
    num = options.num_predict
    return {
        "model": fields.model,
        "stream": fields.stream is not False,
        "max_tokens": MAX_TOKENS if num is not None and num <= 0 else num,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k,
        "min_p": options.min_p,
        "seed": None if options.seed == RANDOM_SEED else options.seed,
        "stop": checked_stops([options.stop] if isinstance(options.stop, str) else options.stop or [], "options.stop"),
        "repetition_penalty": options.repeat_penalty,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "response_format": _response_format(bytes(fields.format)),
    }


def head_of_load(fields: OllamaBody) -> tuple[Head, bytes]:
    """Returns the Head and an empty list of messages as msgpack, for a body without a prompt. Ollama's clients send such a body to
    load a model, or to unload it if keep_alive is 0; the Head's prompt_kind is LOAD or UNLOAD. Raises BadRequest naming the
    field."""
    head, messages = with_keep_alive(chat.head_of_chat(chat.ChatBody(messages=[], **shared_fields(fields))), fields.keep_alive)
    head.prompt_kind = UNLOAD if head.keep_alive_s == 0 else LOAD
    return head, messages


def with_keep_alive(parts: tuple[Head, bytes], keep_alive: float | str | None) -> tuple[Head, bytes]:
    """Sets `keep_alive_s` in the head of a parsed body, and returns `parts`. parts: the head, and the packed messages or prompt.
    keep_alive: the field of the body. Raises BadRequest naming the field."""
    parts[0].keep_alive_s = keep_alive_s(keep_alive)
    return parts


def keep_alive_s(value: float | str | None) -> float | None:
    """Returns the field keep_alive in seconds; inf for a negative value, which means for ever; None if it was left out. value:
    seconds, or a text such as "10m". Raises BadRequest naming the field."""
    try:
        return None if value is None else parse_duration_s(value)
    except ValueError as error:
        raise invalid("keep_alive", f"keep_alive {error}") from None


def template_fields(think: bool | str | None) -> dict[str, Any]:
    """Converts Ollama's field `think` to the fields of ChatBody that control the model's reasoning, and returns them by name; {}
    for None. think: whether to reason, or the effort, such as "high"."""
    if think is None:
        return {}
    if isinstance(think, bool):
        return {"chat_template_kwargs": {"enable_thinking": think}}
    return {"reasoning_effort": think, "chat_template_kwargs": {"enable_thinking": True}}


def _response_format(data: bytes) -> Raw:
    if data in (b"", b"null", b'""'):
        return Raw()
    if data == b'"json"':
        return JSON_OBJECT
    if not data.startswith(b"{"):
        raise invalid("format", 'format must be "json" or a JSON schema')
    return following(Raw(data))
