"""Which dialect a model speaks, and its parser. Found by what the chat template writes, overridden by `tool_parser`."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from daemon.text.tool_parsers import generic, hermes, llama3, mistral, named_call
from daemon.text.tool_parsers.pieces import ToolParser

HERMES, LLAMA3, MISTRAL, NONE = "hermes", "llama3", "mistral", "none"
GENERIC = "generic"  # no model's own: forced calls of those with NONE
THINK = "think"
# shown in the text also where the tokenizer calls them special: the parsers look for them
MARKERS = frozenset(
    [hermes.OPEN, hermes.CLOSE, llama3.PYTHON_TAG, mistral.MARKER, named_call.ARGS, named_call.CALL_ID, "<think>", "</think>"]
)
# config.json's model_type -> its family's dialect, for templates that take tools and write no marker
_FAMILIES = {"llama": LLAMA3, "mistral": MISTRAL, "qwen2": HERMES, "qwen3": HERMES}
_ID_CHARACTERS = string.ascii_letters + string.digits


def detect_tools(template: str, model_type: str) -> str:
    """none: the template shows the model no tools, or in a dialect that is not known here."""
    if "tools" not in template or "<function=" in template:
        return NONE
    if mistral.MARKER in template:
        return MISTRAL
    if hermes.OPEN in template:
        return HERMES
    if llama3.PYTHON_TAG in template:
        return LLAMA3
    return _FAMILIES.get(model_type, NONE)


def detect_reasoning(template: str) -> str:
    return THINK if "</think>" in template or "<think>" in template else NONE


def tool_parser(dialect: str, names: Sequence[str]) -> ToolParser:
    """`names`: the tools the request offers."""
    if dialect == HERMES:
        return hermes.HermesParser()
    if dialect == LLAMA3:
        return llama3.Llama3Parser(names)
    if dialect == MISTRAL:
        return mistral.MistralParser()
    if dialect == GENERIC:
        return generic.GenericParser(names)
    raise ValueError(f"no parser for the dialect {dialect!r}")


def new_call_id(dialect: str) -> str:
    """Mistral's templates insist on nine letters and digits."""
    if dialect == MISTRAL:
        return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(9))
    return "call_" + secrets.token_hex(12)
