"""What a text worker does for single jobs, apart from its loop."""

from __future__ import annotations

import json
import secrets
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from daemon.errors import BadRequest
from daemon.text.checkpoint_text import CheckpointText
from daemon.text.jobs import Detokenize, Encode, EncodeChat
from daemon.text.plain_calls import Message, Tools, render_plainly

LONG_TEXT = 64 << 10  # characters; longer ones are encoded beside the short ones, in a thread (encoding releases the GIL)


def rendered(text: CheckpointText, messages: bytes, options: dict[str, Any]) -> str:
    """A chat as the template writes it. Raises BadRequest."""
    try:
        plain = msgspec.msgpack.decode(messages)
        kwargs = msgspec.msgpack.decode(options["kwargs"]) if "kwargs" in options else {}
        # the standard reader keeps what a template may show as the client wrote it, big numbers included
        shown, documents = (json.loads(options[key]) if options.get(key) else None for key in ("tools", "documents"))

        def render(messages: list[Message], tools: Tools) -> str:
            return text.render(messages, bool(options.get("add_generation_prompt", True)), kwargs, tools, documents)

        def whole(messages: list[Message]) -> str:
            if options.get("plain_calls"):
                return render_plainly(render, messages, shown, options.get("forced"))
            return render(messages, shown)

        return _to_end_of_text(whole, plain) if options.get("continue_final_message") else whole(plain)
    except RecursionError:
        raise BadRequest("invalid_request", "messages: nested too deeply", param="messages") from None


def _to_end_of_text(render: Callable[[list[Message]], str], messages: list[Message]) -> str:
    """Returns the chat up to the end of the last message's text, which the reply continues. Raises BadRequest."""
    mark = secrets.token_hex(16)  # shows where the template writes that end
    messages[-1]["content"] += mark
    parts = render(messages).split(mark)
    if len(parts) != 2:
        why = "the chat template does not write the last message's text once, as it is"
        raise BadRequest("invalid_request", f"continue_final_message: {why}", param="continue_final_message")
    return parts[0]


def check_length(text: CheckpointText, texts: Sequence[str], job: Encode | EncodeChat) -> None:
    """Raises BadRequest for a long text that cannot have as few tokens as the model takes: encoding it could take seconds. A short
    one is encoded sooner than the bound on its tokens is built."""
    field = job.field if isinstance(job, Encode) else "messages"
    for at, each in enumerate(texts):
        if len(each) <= LONG_TEXT:
            continue
        fewest, why = text.token_lower_bound(each)
        if fewest > job.max_tokens:
            where = field if len(texts) == 1 else f"{field}[{at}]"
            message = f"{where}: at least {fewest} tokens, more than the {job.max_tokens} of max_model_len: {why}"
            raise BadRequest("context_length_exceeded", message, param=where)


def tokenized(tokenizer: Tokenizer, ids: list[int], strings: bool) -> list[bytes]:
    """The parts of a Tokenize job."""
    written = [tokenizer.id_to_token(token_id) for token_id in ids] if strings else None
    return [b"%d" % len(ids), msgspec.json.encode(ids), msgspec.json.encode(written)]


def detokenized(tokenizer: Tokenizer, job: Detokenize) -> bytes:
    ids = array("i")
    ids.frombytes(job.ids)
    for at, token_id in enumerate(ids):
        if token_id >= job.vocab_size:
            raise BadRequest(
                "invalid_request",
                f"tokens[{at}]: {token_id} is outside the vocabulary of {job.vocab_size} tokens",
                param=f"tokens[{at}]",
            )
    return msgspec.json.encode(tokenizer.decode(ids.tolist(), skip_special_tokens=False))
