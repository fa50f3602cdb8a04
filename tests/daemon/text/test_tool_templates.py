"""Templates that show tools, in the manner of each family: what they are given, and what they say of the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.load import REASONING_PARSERS, TOOL_PARSERS
from daemon.process.long_tasks import LongTasks
from daemon.text.detokenizer import decode
from daemon.text.jobs import TextFacts
from daemon.text.reasoning import MARKERS, THINK
from daemon.text.service import TextService
from daemon.text.token_table import MarkedTable
from daemon.text.tool_parsers.registry import GLM45, HARMONY, HERMES, LLAMA3, MISTRAL, NONE, tool_parser
from tests.daemon.api.fakes import entry
from tests.daemon.text.tokenizers_made import byte_level, checkpoint

HERMES_TEMPLATE = """\
{%- if tools %}
{{- '<|start|>system\\nCall as <tool_call>{"name": ..., "arguments": ...}</tool_call>. Tools:' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|end|>\\n' }}
{%- endif %}
{%- for document in documents or [] %}{{- 'Document: ' + document.text + '\\n' }}{%- endfor %}
{%- for message in messages %}
{{- '<|start|>' + message.role + '\\n' }}
{%- if message.reasoning_content is string %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- if enable_thinking is not false %}{{- '<think>\\n' }}{%- endif %}
{%- endif %}"""
LLAMA3_TEMPLATE = """\
{%- for message in messages %}
{{- '<|start|>' + ('ipython' if message.role == 'tool' else message.role) + '<|end|>' }}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{- raise_exception('one call at a time') }}{%- endif %}
{%- set call = message.tool_calls[0].function %}
{{- '<|python_tag|>{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}' }}
{%- elif loop.last and tools is not none %}{{- 'Functions:\\n' }}
{%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n' }}{%- endfor %}{{- message.content }}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|late|>' }}
{%- endfor %}"""
MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '[INST] ' + message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{- '[TOOL_CALLS] [' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{- raise_exception('ids have nine characters') }}{%- endif %}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}{{- ']' + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}' }}
{%- else %}{{- ' ' + message.content + eos_token }}{%- endif %}
{%- endfor %}"""
GLM45_TEMPLATE = """\
{%- if tools %}{{- '<|start|>system\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- 'Call as <tool_call>{name}\\n<arg_key>{key}</arg_key>\\n<arg_value>{value}</arg_value>\\n</tool_call>' }}
{%- endif %}
{%- for message in messages %}
{{- '<|start|>' + ('observation' if message.role == 'tool' else message.role) + '\\n' }}
{%- if message.reasoning_content is string %}{{- '<think>' + message.reasoning_content + '</think>\\n' }}{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + (value if value is string else value | tojson) + '</arg_value>\\n' }}
{%- endfor %}
{{- '</tool_call>' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- if enable_thinking is false %}{{- '\\n<think></think>' }}{%- endif %}
{%- endif %}"""
TEMPLATES = {GLM45: GLM45_TEMPLATE, HERMES: HERMES_TEMPLATE, LLAMA3: LLAMA3_TEMPLATE, MISTRAL: MISTRAL_TEMPLATE}

# the order of keys is the client's; numbers come as they are written
PARAMETERS = {"z": 1, "a": [1.0, 12345678901234567890123]}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "description": "<é> 'x'", "parameters": PARAMETERS, "strict": True}}
]
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"q": "é < 1", "n": [1, 2.0]}'}}
MESSAGES: list[Any] = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm"},
    {"role": "tool", "content": "42", "tool_call_id": "abcdefghi"},
]
SPECIALS = {"bos_token": "<|start|>", "eos_token": "<|end|>"}


@pytest.fixture
async def service():
    service = TextService(LongTasks())
    yield service
    await service.close()


def model(folder: Path, template: str | None = None, special: list[str] | None = None, **config: Any) -> Any:
    tokenizer = byte_level()
    tokenizer.add_special_tokens(special or [])
    options = {"chat_template": template} if template else {}
    checkpoint(folder, tokenizer, **options, **SPECIALS)
    (folder / "config.json").write_text(json.dumps(config))
    return entry(folder.name, path=str(folder), aliases=(), vocab_size=tokenizer.get_vocab_size())


@pytest.mark.parametrize("dialect", TEMPLATES)
async def test_templates_are_given_what_transformers_gives_them(service, tmp_path, dialect):
    one = model(tmp_path / "m", TEMPLATES[dialect])
    options = {
        "add_generation_prompt": True,
        "tools": json.dumps(TOOLS).encode(),
        "documents": b'[{"text": "d"}]',
        "kwargs": msgspec.msgpack.encode({"enable_thinking": False}),
    }
    ids = await service.encode_chat(one, msgspec.msgpack.encode(MESSAGES), options)
    special = byte_level().get_added_tokens_decoder()
    table = MarkedTable(await service.table(one), {at: token.content for at, token in special.items() if token.special})
    # transformers' callers parse the arguments and leave out what is null
    parsed = {**CALL, "function": {"name": "f", "arguments": json.loads(CALL["function"]["arguments"])}}  # type: ignore[index]
    messages = [MESSAGES[0], {**MESSAGES[1], "content": "", "tool_calls": [parsed]}, MESSAGES[2]]
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[messages],
        chat_template=TEMPLATES[dialect],
        tools=TOOLS,
        documents=[{"text": "d"}],
        add_generation_prompt=True,
        enable_thinking=False,
        **SPECIALS,
    )
    assert decode(table, ids) == expected
    assert ("<arg_value>é < 1</arg_value>" if dialect == GLM45 else '"q": "é < 1"') in expected
    assert "12345678901234567890123" in expected
    without = await service.encode_chat(one, msgspec.msgpack.encode(MESSAGES[:1]), {"tools": b""})
    assert "description" not in decode(table, without)


async def test_facts(service, tmp_path):
    expected = {
        "hermes": (model(tmp_path / "hermes", HERMES_TEMPLATE), TextFacts(HERMES, THINK)),
        "glm45": (model(tmp_path / "glm45", GLM45_TEMPLATE), TextFacts(GLM45, THINK)),
        "llama3": (model(tmp_path / "llama3", LLAMA3_TEMPLATE), TextFacts(LLAMA3, NONE)),
        "mistral": (model(tmp_path / "mistral", MISTRAL_TEMPLATE), TextFacts(MISTRAL, NONE)),
        "family": (model(tmp_path / "family", "{{ tools }}", model_type="qwen3"), TextFacts(HERMES, NONE)),
        "plain": (model(tmp_path / "plain", "{{ messages }}", model_type="qwen3"), TextFacts(NONE, NONE)),
        "none": (model(tmp_path / "none"), TextFacts(NONE, NONE)),
    }
    for name, (one, facts) in expected.items():
        assert await service.facts(one) == facts, name
    markers = ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "[/INST]"]
    one = model(tmp_path / "special", MISTRAL_TEMPLATE, markers)
    tokenizer = byte_level()
    tokenizer.add_special_tokens(markers)
    assert (await service.facts(one)).markers == {tokenizer.token_to_id(text): text for text in markers[:3]}
    gone = entry(path=str(tmp_path / "gone"))
    assert await service.facts(gone) == TextFacts()


async def test_markers_show_in_the_text(service, tmp_path):
    one = model(tmp_path / "m", MISTRAL_TEMPLATE, ["[TOOL_CALLS]", "[/INST]"])
    (ids,) = await service.encode(one, "a[TOOL_CALLS]b[/INST]c", add_special_tokens=False)
    table = await service.table(one)
    assert decode(table, ids) == "abc"
    assert decode(MarkedTable(table, (await service.facts(one)).markers), ids) == "a[TOOL_CALLS]bc"
    assert table.num_tokens == MarkedTable(table, {}).num_tokens


def test_every_setting_has_its_parser():
    for dialect in TOOL_PARSERS:
        if dialect != NONE:
            assert tool_parser(dialect, []).end(cut=False) == []
    assert set(REASONING_PARSERS) == {HARMONY, NONE, *MARKERS}
