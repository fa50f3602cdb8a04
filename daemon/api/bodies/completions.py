"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Raw

from daemon.api.bodies.common import Common, Count, Head, NumTop, head_of
from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.api.bodies.outputs import MAX_TOP_LOGPROBS
from daemon.api.bodies.prompts import prompts
from daemon.api.bodies.unsupported import neutral, refuse_unsupported

MAX_SUFFIX_CHARACTERS = 4 << 20  # for all prompts together: the body has the suffix once, but each prompt's tokens include it


class CompletionBody(Common, kw_only=True):
    prompt: Raw
    add_special_tokens: bool | None = None
    max_tokens: Count | None = None  # 0: only the prompt is wanted, with echo
    logprobs: NumTop | bool | None = None
    top_logprobs: Annotated[Raw, neutral("0")] = Raw()
    echo: bool | None = None
    suffix: str | None = None
    tools: Annotated[Raw, neutral("[]")] = Raw()
    tool_choice: Annotated[Raw, neutral('"none"')] = Raw()
    # a completion's prompt goes through no chat template
    reasoning_effort: Annotated[Raw, neutral('"none"')] = Raw()
    continue_final_message: Annotated[Raw, neutral("false")] = Raw()
    chat_template_kwargs: Annotated[Raw, neutral("{}")] = Raw()


MEANINGS = {
    "prompt": "what is completed, or tokenised",
    "add_special_tokens": "default true",
    "max_tokens": "default: what the context leaves",
    "logprobs": "log-probabilities of the tokens; of a completion with that many alternatives",
    "echo": "the prompt before the answer, with its log-probabilities if asked for",
    "suffix": "what follows the gap that the model fills; of models with tokens for filling in the middle",
}

_decoder = msgspec.json.Decoder(CompletionBody)


def parse(body: bytes) -> tuple[Head, bytes]:
    """Parses a body. Returns the fields that the daemon needs, and the prompts as msgpack for the text worker. Raises BadRequest
    (400) naming the field."""
    fields: CompletionBody = decode(_decoder, body, "")
    refuse_unsupported(fields)
    return head_of_completion(fields)


def head_of_completion(fields: CompletionBody) -> tuple[Head, bytes]:
    """Checks a decoded body. Returns its two parts: the fields that the daemon needs, and the prompts as msgpack for the text
    worker. Raises BadRequest naming the field."""
    kind, packed, num_prompts = prompts(bytes(fields.prompt))
    head = head_of(
        fields,
        max_tokens=fields.max_tokens if fields.max_tokens is not None else fields.max_completion_tokens,
        prompt_kind=kind,
        num_prompts=num_prompts,
        options={"add_special_tokens": fields.add_special_tokens is not False, "suffix": _suffix(fields, kind, num_prompts)},
        logprobs=_logprobs(fields),
        echo=bool(fields.echo),
    )
    return head, packed


def _logprobs(fields: CompletionBody) -> int:
    """Returns how many alternatives the log-probabilities of each token include, 0 for only the token itself; -1 if no
    log-probabilities are asked for. Raises BadRequest for `logprobs: true`, because completions need a number."""
    if fields.logprobs is True:
        raise invalid("logprobs", f"logprobs must be a number of alternatives from 0 to {MAX_TOP_LOGPROBS}")
    return -1 if fields.logprobs is None or fields.logprobs is False else fields.logprobs


def _suffix(fields: CompletionBody, kind: str, num_prompts: int) -> str:
    if not fields.suffix:
        return ""
    check_text(fields.suffix, "suffix")
    if kind != "text":
        raise invalid("suffix", "suffix: the prompt must be text; token ids hold the tokens for filling in the middle themselves")
    if fields.echo:
        raise invalid("suffix", "suffix and echo: only one of them is allowed")
    if fields.truncate_prompt_tokens:
        raise invalid("suffix", "suffix and truncate_prompt_tokens: only one of them is allowed")
    if (num := len(fields.suffix) * num_prompts) > MAX_SUFFIX_CHARACTERS:
        raise invalid("suffix", f"suffix: behind {num_prompts} prompts it has {num} characters, more than {MAX_SUFFIX_CHARACTERS}")
    return fields.suffix
