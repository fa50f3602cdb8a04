"""The tools that a chat request offers: `tools`, `tool_choice`, `parallel_tool_calls`."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Raw, Struct

from daemon.api.bodies.decode import decode, invalid

NONE, AUTO, REQUIRED, NAMED = "none", "auto", "required", "named"


class Function(Struct):
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}\Z")]
    description: str | None = None
    parameters: Raw = Raw()
    strict: bool | None = None


class Tool(Struct):
    type: Literal["function"]
    function: Function


class FunctionName(Struct):
    name: str


class AllowedTool(Struct):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Struct):
    mode: Literal["auto", "required"]
    tools: list[AllowedTool]


class ObjectChoice(Struct):
    """The object form of tool_choice: the function that must be called, or those of the tools that may be called."""

    type: Literal["function", "allowed_tools"]
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ToolRequest(Struct, array_like=True):
    """The facts about a request's tools that the daemon needs. Each list has one item for each tool, in the order of the request's
    `tools`. A request without tools, or with tool_choice "none", has None instead of this object."""

    choice: str  # AUTO | REQUIRED | NAMED
    parallel: bool
    names: list[str]
    schemas: list[bytes]  # each tool's parameters as a JSON schema; b"{}" if it has none
    strict: list[bool]
    name: str = ""  # for NAMED: the function that must be called

    @property
    def many(self) -> bool:
        """Returns whether a reply may contain several calls."""
        return self.parallel and self.choice != NAMED


_tools = msgspec.json.Decoder(list[Tool])
_object_choice = msgspec.json.Decoder(ObjectChoice)
_raws = msgspec.json.Decoder(list[Raw])


def tool_request(tools: Raw, tool_choice: Raw, parallel: bool | None) -> tuple[ToolRequest | None, bytes]:
    """Parses the tool fields of a chat. Returns the facts about the tools, and the JSON of `tools` for the chat template; (None,
    b"") if there are no tools or none may be called. Raises BadRequest naming the field."""
    data = bytes(tools)
    offered: list[Tool] = [] if data in (b"", b"null") else decode(_tools, data, "tools")
    names: list[str] = []
    schemas: list[bytes] = []
    for at, tool in enumerate(offered):
        function = tool.function
        if function.name in names:
            raise invalid(f"tools[{at}].function.name", f"tools[{at}].function.name: {function.name!r} is there twice")
        names.append(function.name)
        schema = bytes(function.parameters)
        if schema in (b"", b"null"):
            schema = b"{}"
        elif not schema.startswith(b"{"):
            where = f"tools[{at}].function.parameters"
            raise invalid(where, f"{where}: expected an object, a JSON schema")
        schemas.append(schema)
    choice, name, allowed = _choice(bytes(tool_choice), names)
    if allowed is not None:
        places = [at for at, each in enumerate(names) if each in allowed]
        raws = _raws.decode(data)
        data = msgspec.json.encode([raws[at] for at in places])
        offered, names = [offered[at] for at in places], [names[at] for at in places]
        schemas = [schemas[at] for at in places]
    if choice == NONE or not names:
        return None, b""
    strict = [bool(tool.function.strict) for tool in offered]
    return ToolRequest(choice, parallel is not False, names, schemas, strict, name), data


def _choice(data: bytes, names: list[str]) -> tuple[str, str, set[str] | None]:
    """Returns the choice, the function that must be called ("" for none in particular), and the functions that may be called (None:
    all). names: those of all functions. Raises BadRequest naming the field."""
    if data in (b"", b"null"):
        return AUTO, "", None
    if data.startswith(b"{"):
        chosen: ObjectChoice = decode(_object_choice, data, "tool_choice")
        if chosen.type == "allowed_tools":
            return _allowed(chosen.allowed_tools, names)
        if chosen.function is None:
            raise invalid("tool_choice.function", "tool_choice.function is missing")
        _check_name(chosen.function.name, names, "tool_choice.function.name")
        return NAMED, chosen.function.name, None
    choice = data.strip(b'"').decode(errors="replace")
    if choice not in (NONE, AUTO, REQUIRED):
        raise invalid("tool_choice", "tool_choice must be none, auto, required or an object that names a function or allowed_tools")
    if choice == REQUIRED and not names:
        raise invalid("tool_choice", "tool_choice: required needs tools")
    return choice, "", None


def _allowed(given: AllowedTools | None, names: list[str]) -> tuple[str, str, set[str]]:
    """Returns what _choice returns for allowed_tools."""
    if given is None:
        raise invalid("tool_choice.allowed_tools", "tool_choice.allowed_tools is missing")
    for at, tool in enumerate(given.tools):
        _check_name(tool.function.name, names, f"tool_choice.allowed_tools.tools[{at}].function.name")
    if given.mode == REQUIRED and not given.tools:
        raise invalid("tool_choice", "tool_choice: required needs tools")
    return given.mode, "", {tool.function.name for tool in given.tools}


def _check_name(name: str, names: list[str], where: str) -> None:
    if name not in names:
        raise invalid(where, f"{where}: {name[:128]!r} is none of the tools")
