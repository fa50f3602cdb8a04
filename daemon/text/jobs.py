"""Messages between the daemon and a text worker; framed as engine/protocol.py frames its own.

A worker serves one model and answers each job with one `Done` or `Failed`, in any order.
"""

from __future__ import annotations

from engine.protocol import Message


class Open(Message, frozen=True):
    """Always the first. `path` "": a worker for request bodies, without a model."""

    name: str
    path: str
    chat_template: str | None  # instead of the checkpoint's own: a file path or the template's text


class Encode(Message, frozen=True):
    """-> one int32 array a text. `texts`: list of strings as msgpack."""

    job_id: int
    texts: bytes
    add_special_tokens: bool


class EncodeChat(Message, frozen=True):
    """-> one int32 array. `messages`: list of objects, `options`: add_generation_prompt and kwargs
    (msgpack again), as msgpack."""

    job_id: int
    messages: bytes
    options: bytes


class BuildTable(Message, frozen=True):
    """-> a PackedTable as msgpack."""

    job_id: int


class ParseBody(Message, frozen=True):
    """-> the two parts of daemon.api.schema.parse."""

    job_id: int
    endpoint: str
    body: bytes


class Done(Message, frozen=True):
    job_id: int
    parts: list[bytes]


class Failed(Message, frozen=True):
    """A HearthError on its way to the client. family: BadRequest or ServerFault."""

    job_id: int
    family: str
    code: str
    message: str
    param: str | None
    status: int


Job = Encode | EncodeChat | BuildTable | ParseBody
ToWorker = Open | Encode | EncodeChat | BuildTable | ParseBody
FromWorker = Done | Failed


def is_template_text(chat_template: str) -> bool:
    """A configured chat template is a file's path unless it can only be Jinja."""
    return "{" in chat_template or "\n" in chat_template
