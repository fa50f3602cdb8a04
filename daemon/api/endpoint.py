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
    """A table of docs/reference/http.md: the fields that a body type adds, each with its meaning."""

    title: str
    type: type[Struct]
    meanings: Mapping[str, str]


@dataclass(frozen=True, eq=False)
class Body(Generic[HeadT]):
    """How a request's body is read.

    parse: takes the JSON; returns the small part, which the daemon needs, and the long part, which only the text worker looks into.
    Raises BadRequest naming the field. A module's own function: long bodies are read by a text worker, which imports it by name.
    head: the small part's type. default_tag: an ending that the endpoint's clients add to a model's name; the name is tried without
    it where no model has it. more_types: values of Content-Type that its clients send besides those of JSON."""

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
        """The address of the parsing function, MODULE:NAME, for jobs.ParseBody."""
        return f"{self.parse.__module__}:{self.parse.__qualname__}"

    def unpack(self, head: bytes) -> HeadT:
        """Returns the small part that a text worker has read and packed."""
        return self._decoder.decode(head)


@dataclass(frozen=True, eq=False)
class Endpoint:
    """One thing that the API offers.

    name: in logs and metrics. paths: the first is the one that the reference names; {id} in one stands for any text. about: a
    line of the reference.
    operation: what the model does, as OpenTelemetry names it (gen_ai.operation.name), in traces; "": no work of a model's.
    per_model: also served below /m/MODEL, for that model alone.

    error_body: returns an error as the endpoint's clients expect it. limit_headers: returns the headers that tell them what is
    left of their tenant's limits, from that and the Unix time.

    passes_on: the path below another server's address that requests go to whose model that server answers; "": they are refused.

    open: served without a key where keys are set; handle() then has to keep the node's inside from strangers (Call.stranger).
    watching: reports on all tenants, so an admin's key is needed as soon as there is one.
    operating: changes what the node serves, so an admin's key is needed, or a connection of this machine where no keys are set.
    for_operators: leaves the main listener if operators have a listener of their own."""

    name: str
    paths: tuple[str, ...]
    about: str
    handle: Callable[[Call], Awaitable[web.StreamResponse]]
    methods: tuple[str, ...] = READ_METHODS
    body: Body[Any] | None = None
    error_body: Callable[[HearthError], Mapping[str, Any]] = HearthError.body
    limit_headers: Callable[[Standing, float], Mapping[str, str]] = limit_headers.openai
    operation: str = ""
    per_model: bool = True
    passes_on: str = ""
    open: bool = False
    watching: bool = False
    operating: bool = False
    for_operators: bool = False


@dataclass(slots=True)
class Call:
    """One request at an endpoint. scope: the model of /m/MODEL/…; None: the path names none. path_id: what stands for the {id} of
    the endpoint's path. stranger: keys are set and the request has none. tenant: its sender's name, "" without keys. key: how its
    key's sum begins, or ""."""

    request: web.Request
    context: ApiContext
    endpoint: Endpoint
    scope: str | None
    path_id: str | None
    progress: Progress
    stranger: bool = False
    tenant: str = ""
    key: str = ""
    data: bytes | None = None  # the body, once it is read
    resolved: ModelEntry | None = None  # the body's model, if it was looked up before the endpoint's own look

    @property
    def request_id(self) -> str:
        return self.progress.request_id
