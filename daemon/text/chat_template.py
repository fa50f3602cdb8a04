"""Renders chat templates: Jinja code from a checkpoint, which cannot be trusted. It runs in a sandbox, with limits on time, memory
and size.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, TypeVar

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from daemon.errors import BadRequest
from daemon.text.call_form import CallForm, find_call_form
from daemon.text.deepseek_tools import with_tools
from daemon.text.harmony_history import harmony_kwargs, harmony_messages, harmony_tools
from daemon.text.jobs import TEMPLATE_CPU_S
from daemon.text.kimi_history import kimi_messages
from daemon.text.later_instructions import INSTRUCTIONS, render_instructions
from daemon.text.left_out import granite_messages, mistral_messages
from daemon.text.reasoning import MARKERS, MISTRAL
from daemon.text.tool_parsers import deepseek, granite, kimi_k2
from daemon.text.tool_parsers.harmony import speaks_harmony

T = TypeVar("T")

RENDER_LIMIT_S = 2.0  # of CPU time, so that a busy machine causes no refusals
MAX_CHARACTERS = 64 << 20


class _Generation(Extension):
    """The `{% generation %}` block, which marks the assistant's words for training. Here it renders its content unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _OutOfTime(BaseException):
    """Raised when a template has used up its CPU time. Not an Exception, so that no filter of a template can swallow it."""


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Returns a value as JSON, for the templates' filter `tojson`. It replaces Jinja's own filter, which escapes HTML characters,
    because models were not trained on escaped text. The parameters have the same names and meanings as those of json.dumps."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class ChatTemplate:
    """A compiled chat template. source: its Jinja text. special_tokens: variables of the template, such as bos_token. The
    constructor and `render` raise BadRequest if the template fails or exceeds a limit, with the template's own message if it has
    one."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        self._special_tokens = special_tokens
        self._knows_developer = "developer" in source
        self._speaks_harmony = speaks_harmony(source)
        self._speaks_kimi = kimi_k2.OPEN in source
        self._leaves_out_calls = granite.MARKER in source and "tool_calls" not in source
        self._takes_thinking = MARKERS[MISTRAL].tag in source and "reasoning_content" not in source
        self._shows_no_tools = deepseek.OPEN in source and "tools" not in source
        self._is_fenced = deepseek.is_fenced(source)
        self._call_form: CallForm | None = None  # found when the first chat with calls comes
        with _limited():
            self._template = _guard(lambda: environment.from_string(source))

    def render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        tools: list[dict[str, Any]] | None = None,
        documents: list[dict[str, Any]] | None = None,
    ) -> str:
        plain = [self._plain(message) for message in messages]
        if self._speaks_harmony:
            plain, tools, kwargs = harmony_messages(plain), harmony_tools(tools), harmony_kwargs(kwargs)
        elif self._speaks_kimi:
            plain = kimi_messages(plain)
        elif self._leaves_out_calls:
            plain = granite_messages(plain)
        elif self._takes_thinking:
            plain = mistral_messages(plain)
        if self._shows_no_tools and tools:
            plain = with_tools(plain, tools, self._is_fenced)
        variables = {"documents": documents} | kwargs
        if any(message["role"] in INSTRUCTIONS for message in plain[1:]):
            return render_instructions(lambda chat: self._write(chat, tools, variables, add_generation_prompt), plain)
        return self._write(plain, tools, variables, add_generation_prompt)

    def _write(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: dict[str, Any],
        add_generation_prompt: bool,
    ) -> str:
        """Returns the template's text for messages in the form that it expects. kwargs: its other variables."""
        variables = {
            "tools": tools,
            **self._special_tokens,
            **kwargs,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }

        def run() -> str:
            parts, size = [], 0
            for part in self._template.generate(variables):
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise TemplateError(f"the template wrote more than {MAX_CHARACTERS} characters")
                parts.append(part)
            return "".join(parts)

        with _limited():
            return _guard(run)

    def _plain(self, message: dict[str, Any]) -> dict[str, Any]:
        plain = dict(message)
        if plain["role"] == "developer" and not self._knows_developer:
            plain["role"] = "system"
        if plain.get("content") is None:
            plain["content"] = ""
        if calls := plain.get("tool_calls"):
            form = self._form_of_calls()
            plain["tool_calls"] = calls if form.as_text else [_parsed_arguments(call) for call in calls]
            if form.no_content and not plain["content"]:
                plain["content"] = None
        return plain

    def _form_of_calls(self) -> CallForm:
        if self._call_form is None:
            is_known = self._speaks_harmony or self._leaves_out_calls
            self._call_form = CallForm() if is_known else find_call_form(lambda chat, tools: self._write(chat, tools, {}, False))
        return self._call_form


def _parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Returns the call with its arguments as an object, which templates expect; the API carries them as a JSON string. A call whose
    arguments cannot be parsed is returned unchanged."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _guard(run: Callable[[], T]) -> T:
    try:
        return run()
    except TemplateError as error:
        raise _refused(str(error) or type(error).__name__) from None
    except _OutOfTime:
        raise _refused(f"took more than {RENDER_LIMIT_S:g} s of CPU time") from None
    except RecursionError:
        raise _refused("recursed too deeply") from None
    except MemoryError:
        raise _refused("used too much memory") from None
    except Exception as error:  # any failure of an untrusted template is the fault of the request or the checkpoint
        raise _refused(f"{type(error).__name__}: {error}") from None


def _refused(message: str) -> BadRequest:
    return BadRequest("invalid_request", f"chat template: {message[:2000]}", param="messages")


@contextmanager
def _limited() -> Iterator[None]:
    def out_of_time(number: int, frame: object) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGVTALRM, out_of_time)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    # ends the process: for code that no exception can interrupt, such as 9**9**9
    signal.setitimer(signal.ITIMER_PROF, TEMPLATE_CPU_S)
    signal.setitimer(signal.ITIMER_VIRTUAL, RENDER_LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGVTALRM, before)
