"""Finds a model's dialect for tool calls and its parser. The chat template shows the dialect; the setting `tool_parser` overrides
it.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

from daemon.text.tool_parsers import (
    command,
    deepseek,
    gemma4,
    gemma_value,
    generic,
    glm,
    granite,
    harmony,
    hermes,
    kimi_k2,
    llama3,
    llama4,
    mistral,
    named_call,
    qwen3_coder,
)
from daemon.text.tool_parsers.pieces import ToolParser

HARMONY, HERMES, LLAMA3, MISTRAL, NONE = "harmony", "hermes", "llama3", "mistral", "none"
QWEN3_CODER, SEED_OSS = "qwen3_coder", "seed_oss"  # one parser reads both; only their tags differ
COMMAND, GEMMA4, GRANITE = "command", "gemma4", "granite"
DEEPSEEK_V3, DEEPSEEK_V31 = "deepseek_v3", "deepseek_v31"  # one parser reads both
GLM45, GLM47 = "glm45", "glm47"  # one parser reads both
KIMI_K2 = "kimi_k2"
LLAMA4_JSON, LLAMA4_PYTHONIC = "llama4_json", "llama4_pythonic"  # one parser reads both
GENERIC = "generic"  # not a model's own dialect: used for forced calls of models whose dialect is NONE
# texts that are shown to the parsers of calls even if they are special tokens
MARKERS = frozenset(
    [
        *(hermes.OPEN, hermes.CLOSE, llama3.PYTHON_TAG, mistral.MARKER, named_call.ARGS, named_call.CALL_ID, granite.MARKER),
        *(command.OPEN, command.CLOSE),
        *(gemma4.OPEN, gemma4.CLOSE, gemma_value.QUOTE),
        *(qwen3_coder.SEED_OPEN, qwen3_coder.SEED_CLOSE),
        *(deepseek.OPEN, deepseek.CLOSE, deepseek.BEGIN, deepseek.SEPARATOR, deepseek.END),
        *(glm.KEY, glm.END_KEY, glm.VALUE, glm.END_VALUE),
        *(llama4.START, llama4.END),
        *(kimi_k2.OPEN, kimi_k2.CLOSE, kimi_k2.BEGIN, kimi_k2.ARGUMENTS, kimi_k2.END),
    ]
)
# dialects whose arguments are not a JSON object; they cannot express every schema
WITH_TEXT_VALUES = frozenset([GEMMA4, GLM45, GLM47, LLAMA4_PYTHONIC, QWEN3_CODER, SEED_OSS])
# dialects without a marker: a reply that begins like a call may also be an answer in JSON
WITHOUT_MARKER = frozenset([LLAMA3, LLAMA4_JSON, LLAMA4_PYTHONIC])
# dialect -> a marker of calls that also ends the reasoning, because the model sometimes leaves out </think> before it
ENDS_REASONING = {KIMI_K2: kimi_k2.OPEN}
# model_type in config.json -> the dialect of its family, for templates that take tools but contain no marker
_FAMILIES = {
    "llama": LLAMA3,
    "llama4": LLAMA4_PYTHONIC,
    "llama4_text": LLAMA4_PYTHONIC,
    "mistral": MISTRAL,
    "qwen2": HERMES,
    "qwen3": HERMES,
}
_ID_CHARACTERS = string.ascii_letters + string.digits


def detect_tools(template: str, model_type: str) -> str:
    """Returns the name of the dialect in which a model calls tools. Returns NONE if its chat template shows the model no tools
    (unless the dialect is DeepSeek's, for which hearthd adds the tools), or if the dialect has no parser here. template: the chat
    template's Jinja text. model_type: that of config.json, which decides if the template does not."""
    if deepseek.OPEN in template:  # it may leave out the tools; daemon/text/deepseek_tools.py then adds them
        return DEEPSEEK_V3 if deepseek.is_fenced(template) else DEEPSEEK_V31
    if "tools" not in template:
        return NONE
    if qwen3_coder.FUNCTION in template:  # this tag without the others belongs to a dialect that has no parser here
        if qwen3_coder.PARAMETER not in template:
            return NONE
        return SEED_OSS if qwen3_coder.SEED_OPEN in template else QWEN3_CODER if hermes.OPEN in template else NONE
    if harmony.speaks_harmony(template):
        return HARMONY
    if command.OPEN in template:
        return COMMAND
    if gemma4.OPEN in template:
        return GEMMA4
    if kimi_k2.OPEN in template:
        return KIMI_K2
    if glm.KEY in template:
        if glm.OTHER_TAG in template:
            return NONE
        return GLM47 if glm.END_KEY + glm.VALUE in template else GLM45
    if mistral.MARKER in template:
        return MISTRAL
    if hermes.OPEN in template:
        return NONE if any(tag in template for tag in hermes.OTHER_TAGS) else HERMES
    if granite.MARKER in template:
        return GRANITE
    if llama4.asks_for_lists(template):
        return LLAMA4_PYTHONIC
    if llama4.is_llama4(template):
        return LLAMA4_JSON
    if llama3.PYTHON_TAG in template:
        return LLAMA3
    return _FAMILIES.get(model_type, NONE)


def tool_parser(dialect: str, names: Sequence[str], schemas: Sequence[bytes] = ()) -> ToolParser:
    """Returns a parser for one reply. dialect: a name that detect_tools returns, or GENERIC. names: the tools that the request
    offers. schemas: the schema of each tool's parameters, as JSON. Raises ValueError for a dialect without a parser, such as
    NONE."""
    if dialect == HARMONY:
        return harmony.HarmonyParser(names)
    if dialect == HERMES:
        return hermes.HermesParser()
    if dialect in (DEEPSEEK_V3, DEEPSEEK_V31):
        return deepseek.DeepSeekParser()
    if dialect == QWEN3_CODER:
        return qwen3_coder.Qwen3CoderParser(names, schemas)
    if dialect == SEED_OSS:
        return qwen3_coder.Qwen3CoderParser(names, schemas, (qwen3_coder.SEED_OPEN, qwen3_coder.SEED_CLOSE))
    if dialect == COMMAND:
        return command.CommandParser()
    if dialect == GEMMA4:
        return gemma4.Gemma4Parser()
    if dialect == GRANITE:
        return granite.GraniteParser()
    if dialect in (GLM45, GLM47):
        return glm.GlmParser(names, schemas)
    if dialect == KIMI_K2:
        return kimi_k2.KimiK2Parser()
    if dialect == LLAMA3:
        return llama3.Llama3Parser(names)
    if dialect in (LLAMA4_JSON, LLAMA4_PYTHONIC):
        return llama4.Llama4Parser(names)
    if dialect == MISTRAL:
        return mistral.MistralParser()
    if dialect == GENERIC:
        return generic.GenericParser(names)
    raise ValueError(f"no parser for the dialect {dialect!r}")


def id_of_call(dialect: str, drawn: bytes) -> str:
    """Returns an id for a call in any dialect but Kimi K2's, whose ids come from CallNumbers. drawn: at least 12 random bytes, of
    which the id is made. Mistral's templates require ids of nine letters and digits."""
    if dialect == MISTRAL:
        return "".join(_ID_CHARACTERS[byte % len(_ID_CHARACTERS)] for byte in drawn[:9])
    return "call_" + drawn[:12].hex()
