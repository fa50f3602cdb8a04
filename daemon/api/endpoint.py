"""An endpoint of the HTTP API: its paths, who may use it, the body it reads, what it does.

daemon/api/endpoints/ holds one file for each, or for a few that belong together; daemon/api/endpoints/registry.py lists them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from aiohttp import web
from msgspec import Struct

from daemon.access import limit_headers
from daemon.access.quotas import Standing
from daemon.api.context import ApiContext
from daemon.api.progress import Progress
from daemon.errors import HearthError
from daemon.models.entry import ModelEntry

READ_METHODS = ("GET", "HEAD")


class NamesModel(Protocol):
    model: str | None


HeadT = TypeVar("HeadT", bound=NamesModel)


class FieldTable(NamedTuple):
    """A table of fields in the reference of the HTTP API (docs/reference/http.md). title: the table's heading. type: the body type
    whose fields are listed, without those that it inherits. meanings: the name of each field -> its meaning."""

    title: str
    type: type[Struct]
    meanings: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Body(Generic[HeadT]):
    """The way in which the body of an endpoint's requests is read.

    parse: takes the body's JSON; returns the small part, which the daemon needs, and the long part, which only the text worker
    decodes. Raises BadRequest naming the field. `parse` must be a module's top-level function, because text workers, which parse
    long bodies, import it by name. head: the small part's type. tables: the fields of the body in the reference. default_tag: a
    suffix that the endpoint's clients add to a model's name; if no model has that name, the name without the suffix is tried.
    more_types: values of Content-Type that its clients send besides those of JSON."""

    parse: Callable[[bytes], tuple[HeadT, bytes]]
    head: type[HeadT]
    tables: tuple[FieldTable, ...]
    default_tag: str = ""
    more_types: Sequence[str] = ()
    _decoder: msgspec.msgpack.Decoder[HeadT] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_decoder", msgspec.msgpack.Decoder(self.head))

    @property
    def reader(self) -> str:
        """The parsing function as MODULE:NAME, by which a text worker finds it (jobs.ParseBody)."""
        return f"{self.parse.__module__}:{self.parse.__qualname__}"

    def unpack(self, head: bytes) -> HeadT:
        """Returns the decoded head of a body that a text worker has parsed: the fields that the daemon needs. head: the head as
        msgpack, as the worker sent it."""
        return self._decoder.decode(head)


@dataclass(frozen=True, eq=False)
class Api:
    """An API to which endpoints belong, such as OpenAI's.

    chats, models: the paths of its chats and of its list of models, which errors about unknown paths name. root: the beginning of
    all its paths, by which an unknown path is recognized as this API's; "": its paths have no common beginning. client_header: a
    request header that all its clients send and no others; "": there is none.

    error_body: returns an error in the form that its clients expect. limit_headers: returns the headers that tell clients what is
    left of their tenant's limits; it is called with what is left and the Unix time."""

    chats: str
    models: str
    root: str = ""
    client_header: str = ""
    error_body: Callable[[HearthError], Mapping[str, Any]] = HearthError.body
    limit_headers: Callable[[Standing, float], Mapping[str, str]] = limit_headers.openai

    def sends(self, headers: Mapping[str, str]) -> bool:
        """Returns whether a request with these headers is known to come from a client of this API."""
        return self.client_header != "" and self.client_header in headers


OPENAI = Api(chats="/v1/chat/completions", models="/v1/models")


@dataclass(frozen=True, eq=False)
class Endpoint:
    """An endpoint of the HTTP API.

    name: its name in logs and metrics. paths: its paths, of which the reference names the first; {id} in a path stands for any
    text. slashes_in_id: whether that text may contain a `/`, as names of models do. about: its line in the reference. operation:
    what the model does, as OpenTelemetry names it in traces (gen_ai.operation.name); "": the endpoint uses no model. per_model:
    whether it is also served below /m/MODEL, for that model alone.

    api: the API to which it belongs. error_body: returns an error in the form of this endpoint; None: the form of `api`.

    passes_on: the path on another server to which requests for that server's models are forwarded; "": such requests are refused.

    open: whether it is served without a key even if keys are set; handle() then must not reveal the node's internals to strangers
    (Call.stranger). watching: whether it reports on all tenants, so that an admin's key is needed as soon as there is an admin.
    operating: whether it changes what the node serves, so that it needs an admin's key or, if no keys are set, a connection from
    this machine. for_operators: whether it is served only by the operators' own listener, if there is one."""

    name: str
    paths: tuple[str, ...]
    about: str
    handle: Callable[[Call], Awaitable[web.StreamResponse]]
    methods: tuple[str, ...] = READ_METHODS
    body: Body[Any] | None = None
    api: Api = OPENAI
    error_body: Callable[[HearthError], Mapping[str, Any]] | None = None
    operation: str = ""
    per_model: bool = True
    slashes_in_id: bool = False
    passes_on: str = ""
    open: bool = False
    watching: bool = False
    operating: bool = False
    for_operators: bool = False


@dataclass(slots=True)
class Call:
    """One request at an endpoint. scope: the model of /m/MODEL/…; None: the path names none. path_id: the text in place of {id} in
    the path. stranger: whether the request has no key although keys are set. tenant: the sender's name, "" without keys. key: the
    first digits of the key's hash, or ""."""

    request: web.Request
    context: ApiContext
    endpoint: Endpoint
    scope: str | None
    path_id: str | None
    progress: Progress
    stranger: bool = False
    tenant: str = ""
    key: str = ""
    data: bytes | None = None  # the body, once it was read
    resolved: ModelEntry | None = None  # the body's model, if it was looked up before the endpoint's handler runs

    @property
    def request_id(self) -> str:
        return self.progress.request_id
