"""The functions that do single jobs of a text worker, without the worker's loop."""

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
from daemon.text.jobs import Detokenize, EncodePairs
from daemon.text.plain_calls import Message, Tools, render_plainly

LONG_TEXT = 64 << 10  # characters; longer jobs are encoded in a thread, concurrently with short ones (encoding releases the GIL)


def rendered(text: CheckpointText, messages: bytes, options: dict[str, Any]) -> str:
    """Returns a chat as the text that the checkpoint's template makes of it. messages: the chat, a list of objects packed as
    msgpack. options: those of EncodeChat, unpacked. Raises BadRequest if the template fails or the messages are nested too
    deeply."""
    try:
        plain = msgspec.msgpack.decode(messages)
        kwargs = msgspec.msgpack.decode(options["kwargs"]) if "kwargs" in options else {}
        # json.loads keeps values as the client wrote them, big integers included, and a template may show them
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
    """Returns the rendered chat, cut at the end of the last message's text, so that the reply continues that text. render: renders
    messages. Raises BadRequest if the template does not write the text exactly once."""
    mark = secrets.token_hex(16)  # marks the place where the template writes the end of that text
    messages[-1]["content"] += mark
    parts = render(messages).split(mark)
    if len(parts) != 2:
        why = "the chat template does not write the last message's text once, as it is"
        raise BadRequest("invalid_request", f"continue_final_message: {why}", param="continue_final_message")
    return parts[0]


def check_length(text: CheckpointText, texts: Sequence[str], field: str, max_tokens: int) -> None:
    """Raises BadRequest, naming `field`, for a long text that is certain to have more than max_tokens tokens, because encoding it
    could take seconds. Texts of up to LONG_TEXT characters are not checked: encoding them takes less time than computing the least
    number of their tokens."""
    for at, each in enumerate(texts):
        if len(each) <= LONG_TEXT:
            continue
        fewest, why = text.token_lower_bound(each)
        if fewest > max_tokens:
            where = field if len(texts) == 1 else f"{field}[{at}]"
            # in the words by which agents know that they have to shorten it, as in daemon/api/generation/sampling.py
            message = f"{where}: the prompt is too long: at least {fewest} tokens > {max_tokens} maximum (max_model_len): {why}"
            raise BadRequest("context_length_exceeded", message, param=where)


def paired(text: CheckpointText, firsts: list[str], seconds: list[str], job: EncodePairs) -> list[bytes]:
    """Does an EncodePairs job and returns the parts of its answer, all as int32: first an array with the index at which each pair's
    second segment begins, then one array with the token ids of each pair. firsts, seconds: the job's texts. Raises BadRequest for
    texts that are too long."""
    if job.max_tokens:
        check_length(text, firsts, job.fields[0], job.max_tokens)
        if not job.keep_second:
            check_length(text, seconds, job.fields[1], job.max_tokens)
    begins = array("i")
    pairs: list[bytes] = []
    for begin, ids in text.encode_pairs(firsts, seconds, job):
        begins.append(begin)
        pairs.append(array("i", ids).tobytes())
    return [begins.tobytes(), *pairs]


def tokenized(tokenizer: Tokenizer, ids: list[int], strings: bool) -> list[bytes]:
    """Returns the parts of the answer to a Tokenize job, each as JSON: the number of tokens, their ids, and the strings that the
    vocabulary has for them. strings: whether the last part is wanted; otherwise it is null."""
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
