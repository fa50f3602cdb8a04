"""Parses the prompts of requests, which are texts or token ids, and packs them for the text worker."""

from __future__ import annotations

from array import array
from typing import Annotated

import msgspec
from msgspec import Meta

from daemon.api.bodies.decode import check_text, decode, invalid
from daemon.models.entry import ModelEntry

MAX_PROMPTS = 1024  # the most prompts of a completion request
MAX_INPUTS = 2048  # the most inputs of an embeddings request, as in OpenAI's specification

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
KeepLast = Annotated[int, Meta(ge=-1, le=2**31 - 1)]  # truncate_prompt_tokens; -1: as many tokens as fit

_ids = msgspec.json.Decoder(list[TokenId])
_ids_batch = msgspec.json.Decoder(list[list[TokenId]])
_texts = msgspec.json.Decoder(list[str])
_pack = msgspec.msgpack.encode


def prompts(raw: bytes, field: str = "prompt", most: int = MAX_PROMPTS) -> tuple[str, bytes, int]:
    """Parses the prompts or inputs of a request. Returns their kind, the prompts packed as msgpack, and how many there are. The
    kind is "text" for a list of strings, "ids" for a list of int32 arrays. raw: the JSON of the body's field. field: its name, for
    errors. most: the largest number that is allowed. Raises BadRequest."""
    data = raw.lstrip(b" \t\r\n")
    if data[:1] == b'"':
        texts: list[str] = [decode(msgspec.json.Decoder(str), data, field)]
        check_text(texts[0], field)
        return "text", _pack(texts), 1
    inside = data[1:].lstrip(b" \t\r\n")[:1] if data[:1] == b"[" else b""
    if inside == b'"':
        texts = decode(_texts, data, field)
        for at, text in enumerate(texts):
            check_text(text, f"{field}[{at}]")
        return "text", _pack(texts), _check_num(len(texts), field, most)
    if inside == b"[":
        batch: list[list[int]] = decode(_ids_batch, data, field)
        for at, ids in enumerate(batch):
            if not ids:
                raise invalid(f"{field}[{at}]", f"{field}[{at}] is empty")
        return "ids", _pack_ids(batch), _check_num(len(batch), field, most)
    if inside and (inside.isdigit() or inside == b"-"):
        return "ids", _pack_ids([decode(_ids, data, field)]), 1
    if inside == b"]":
        raise invalid(field, f"{field} is empty")
    raise invalid(field, f"{field} must be a string, a list of strings, a list of token ids or a list of lists of token ids")


def checked_keep_last(value: int | None) -> int:
    """Returns the value of truncate_prompt_tokens (-1: as many tokens as fit), or 0 if the field is not given. Raises BadRequest
    for a 0 in the request."""
    if value == 0:
        raise invalid("truncate_prompt_tokens", "truncate_prompt_tokens: expected an `int` >= 1, or -1")
    return value or 0


def num_kept(keep_last: int, room: int, model: ModelEntry) -> int:
    """Returns how many of a prompt's last tokens to keep, 0 for all. keep_last: the number that the request allows, -1 for as many
    as fit, 0 for all. room: the number of tokens that fit the model. Raises BadRequest if keep_last is more than max_model_len."""
    if keep_last > model.max_model_len:
        limit = f"{keep_last} is more than max_model_len {model.max_model_len} of {model.name}"
        raise invalid("truncate_prompt_tokens", f"truncate_prompt_tokens: {limit}")
    return max(1, room) if keep_last < 0 else keep_last


def _pack_ids(batch: list[list[int]]) -> bytes:
    """Returns the prompts as msgpack: a list with the bytes of one int32 array for each prompt. In this form the daemon can count
    and check the ids of a long prompt without making a Python list of them."""
    return _pack([array("i", ids).tobytes() for ids in batch])


def _check_num(num_prompts: int, field: str, most: int) -> int:
    if num_prompts > most:
        raise invalid(field, f"{field}: {num_prompts} are more than the {most} that one request may hold")
    return num_prompts
