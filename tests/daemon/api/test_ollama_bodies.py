"""How the bodies of Ollama's API are read, and which fields are refused."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import pytest

from daemon.api.bodies import ollama_chat, ollama_embed, ollama_generate, ollama_show
from daemon.errors import BadRequest
from tests.daemon.api.test_ollama import GOOD, HELLO, TOOLS


def read_chat(**fields: Any) -> tuple[Any, list[dict[str, Any]]]:
    head, messages = ollama_chat.parse(json.dumps(GOOD | fields).encode())
    return head, msgspec.msgpack.decode(messages)


def read_prompt(**fields: Any) -> tuple[Any, Any]:
    head, prompt = ollama_generate.parse(json.dumps({"model": "tiny", "prompt": "hi"} | fields).encode())
    return head, msgspec.msgpack.decode(prompt)


def test_a_conversation_with_tools_becomes_a_chat() -> None:
    def called(*names: str) -> dict[str, Any]:
        calls = [{"function": {"name": name, "arguments": {"city": "Köln"}}} for name in names]
        return {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": calls}

    _, messages = read_chat(
        messages=[
            {"role": "system", "content": "Be brief."},
            *HELLO,
            called("a", "b", "b"),
            {"role": "tool", "content": "1", "tool_name": "b"},
            {"role": "tool", "content": "2", "tool_name": "a"},
            {"role": "tool", "content": "3"},
            {"role": "tool", "content": "4"},
            called("c"),
            {"role": "tool", "content": "5", "tool_call_id": "mine"},
            *HELLO,
        ]
    )
    assert messages[:2] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    ids = ["call00001", "call00002", "call00003"]
    assert messages[2] == {
        "role": "assistant",
        "content": "",
        "reasoning_content": "hm",
        "tool_calls": [
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": '{"city":"Köln"}'}}
            for call_id, name in zip(ids, "abb", strict=True)
        ],
    }
    results = [(each["content"], each.get("tool_call_id"), each.get("name")) for each in messages if each["role"] == "tool"]
    assert results == [("1", ids[1], "b"), ("2", ids[0], "a"), ("3", ids[2], None), ("4", None, None), ("5", "mine", None)]


def test_settings_of_the_template() -> None:
    for think, wanted in (
        (None, {}),
        (True, {"enable_thinking": True}),
        (False, {"enable_thinking": False}),
        ("low", {"enable_thinking": True, "reasoning_effort": "low"}),
        ("max", {"enable_thinking": True, "reasoning_effort": "xhigh"}),
    ):
        for head, _ in (read_chat(think=think), read_prompt(think=think)):
            assert msgspec.msgpack.decode(head.options["kwargs"]) == wanted
    head, messages = read_chat(messages=[*HELLO, {"role": "assistant", "content": "So"}])
    assert (head.options["continue_final_message"], messages[-1]["content"]) == ("answer", "So")
    head, _ = read_chat(messages=[*HELLO, {"role": "assistant", "content": ""}])
    assert (head.options["continue_final_message"], head.options["add_generation_prompt"]) == ("", True)
    assert read_chat(tools=TOOLS)[0].tools.names == ["get_weather", "stop"]


def test_prompts_without_a_template() -> None:
    head, prompt = read_prompt(raw=True)
    assert (head.prompt_kind, prompt, head.options["suffix"]) == ("text", ["hi"], "")
    head, prompt = read_prompt(suffix="end", prompt="")
    assert (head.prompt_kind, prompt, head.options["suffix"]) == ("text", [""], "end")
    head, messages = read_prompt(raw=False, suffix="", system="", template="", context=[], images=[], stream=False)
    assert (head.prompt_kind, head.stream) == ("messages", False)
    assert messages == [{"role": "user", "content": "hi"}]


SHARED = [
    ({"model": 5}, "model"),
    ({"stream": "yes"}, "stream"),
    ({"think": "hard"}, "think"),
    ({"format": "yaml"}, "format"),
    ({"format": 5}, "format"),
    ({"logprobs": True}, "logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"options": []}, "options"),
    ({"options": {"num_predict": -3}}, "options.num_predict"),
    ({"options": {"temperature": -1}}, "options.temperature"),
    ({"options": {"top_p": "much"}}, "options.top_p"),
    ({"options": {"repeat_penalty": 0}}, "options.repeat_penalty"),
    ({"options": {"presence_penalty": 3}}, "options.presence_penalty"),
    ({"options": {"stop": [""]}}, "options.stop"),
    ({"options": {"typical_p": 0.7}}, "options.typical_p"),
    ({"options": {"mirostat": 2}}, "options.mirostat"),
    ({"options": {"tfs_z": 0.5}}, "options.tfs_z"),
    ({"options": {"repeat_last_n": 64}}, "options.repeat_last_n"),
    ({"options": {"penalize_newline": False}}, "options.penalize_newline"),
]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *SHARED,
        ({"messages": None}, "messages"),
        ({"keep_alive": "soon"}, "keep_alive"),
        ({"messages": [], "keep_alive": ""}, "keep_alive"),
        ({"keep_alive": [5]}, "keep_alive"),
        ({"messages": [{"role": "judge", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": "a\0"}]}, "messages[0].content"),
        ({"messages": [{"role": "assistant", "content": "a", "thinking": "\0"}]}, "messages[0].thinking"),
        ({"messages": [{"role": "user", "content": "a", "images": ["aGk="]}]}, "messages[0].images"),
        ({"messages": [{"role": "tool", "content": "a", "tool_name": "\0"}]}, "messages[0].tool_name"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{}"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a"}}]}]}, "messages"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
    ],
)
def test_bad_fields_of_a_chat_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_chat(**fields)
    named = re.sub(r"\[\.\.\.\]", "[0]", str(error.value.param))
    assert named == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        *SHARED,
        ({"prompt": None, "keep_alive": "10 parsecs"}, "keep_alive"),
        ({"prompt": "\0"}, "prompt"),
        ({"system": "\0"}, "system"),
        ({"suffix": "\0"}, "suffix"),
        ({"raw": True, "system": "x"}, "system"),
        ({"suffix": "x", "system": "x"}, "system"),
        ({"raw": True, "think": True}, "think"),
        ({"template": "{{ .Prompt }}"}, "template"),
        ({"context": [1, 2]}, "context"),
        ({"images": ["aGk="]}, "images"),
        ({"width": 512}, "width"),
    ],
)
def test_bad_fields_of_a_prompt_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        read_prompt(**fields)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("parse", "fields", "param"),
    [
        (ollama_embed.parse, {"input": 5}, "input"),
        (ollama_embed.parse, {"input": [1, 2]}, "input"),
        (ollama_embed.parse, {"input": [[]]}, "input[0]"),
        (ollama_embed.parse, {}, "input"),
        (ollama_embed.parse, {"input": "a", "dimensions": 0}, "dimensions"),
        (ollama_embed.parse, {"input": "a", "truncate": "end"}, "truncate"),
        (ollama_embed.parse, {"input": "a", "keep_alive": True}, "keep_alive"),
        (ollama_show.parse, {"model": 5}, "model"),
    ],
)
def test_bad_fields_of_other_bodies_are_named(parse: Any, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        parse(json.dumps(fields).encode())
    assert error.value.param == param
