"""What a text worker does for single jobs, apart from its loop."""

from __future__ import annotations

import json
from array import array
from typing import Any

import msgspec
from tokenizers import Tokenizer

from daemon.errors import BadRequest
from daemon.text.checkpoint_text import CheckpointText
from daemon.text.jobs import Detokenize
from daemon.text.plain_calls import Message, Tools, render_plainly


def rendered(text: CheckpointText, messages: bytes, options: dict[str, Any]) -> str:
    """A chat as the template writes it. Raises BadRequest."""
    try:
        plain = msgspec.msgpack.decode(messages)
        kwargs = msgspec.msgpack.decode(options["kwargs"]) if "kwargs" in options else {}
        # the standard reader keeps what a template may show as the client wrote it, big numbers included
        shown, documents = (json.loads(options[key]) if options.get(key) else None for key in ("tools", "documents"))

        def render(messages: list[Message], tools: Tools) -> str:
            return text.render(messages, bool(options.get("add_generation_prompt", True)), kwargs, tools, documents)

        if options.get("plain_calls"):
            return render_plainly(render, plain, shown, options.get("forced"))
        return render(plain, shown)
    except RecursionError:
        raise BadRequest("invalid_request", "messages: nested too deeply", param="messages") from None


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
