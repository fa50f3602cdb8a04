"""Llama 4's calls, in a list as Python writes them or as JSON: whole, in every cut, damaged, and by its own chat template."""

from __future__ import annotations

import ast
import importlib.util
import json
import warnings
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from daemon.text.checkpoint_text import CheckpointText
from daemon.text.job_parts import rendered
from daemon.text.reply_parser import Reply, ReplyParser, parse_whole
from daemon.text.tool_parsers.llama4 import END, START
from daemon.text.tool_parsers.pieces import ARGUMENTS, CALL
from daemon.text.tool_parsers.python_value import PythonValue
from daemon.text.tool_parsers.registry import LLAMA4_JSON, LLAMA4_PYTHONIC, NONE, detect_tools, tool_parser
from tests.daemon.text.test_qwen3_coder import reads_damaged, reads_in_every_cut
from tests.daemon.text.tokenizers_made import byte_level, checkpoint

TWO = '[edit(path="a b.py", line=3), search()]'
JSON = '{"name": "edit", "parameters": {"line": 1}}'
BACKSLASH = "\\"


def parser(one_call: bool = False) -> ReplyParser:
    return ReplyParser(tool_parser(LLAMA4_PYTHONIC, ["edit", "search"]), None, one_call)


# text, content, arguments of the calls
REPLIES: dict[str, tuple[str, str, list[dict[str, Any]]]] = {
    "two": (TWO, "", [{"path": "a b.py", "line": 3}, {}]),
    "markers": (f"\n{START}{TWO}{END}\n", "", [{"path": "a b.py", "line": 3}, {}]),
    "text and markers": (f"I edit.\n{START}{TWO}{END} Done", "I edit. Done", [{"path": "a b.py", "line": 3}, {}]),
    "two lists": (f"{START}[edit(line=1)]{END}{START}[edit(line=2)]", "", [{"line": 1}, {"line": 2}]),
    "an unknown tool between markers": (f"{START}[other.tool-1(a=1)]{END}", "", [{"a": 1}]),
    "spaced": ("\n[ edit( line = -1 ,\n path='x' , ) ,\tsearch( ) ]\n", "", [{"line": -1, "path": "x"}, {}]),
    "strings": (
        r"""[edit(a='it\'s "q"', b="", c="\n\t\\ \/ \d \x41\101\0 \u00e9\U0001F600\N{BULLET}", d='é')]""",
        "",
        [{"a": 'it\'s "q"', "b": "", "c": "\n\t\\ / \\d AA\0 é\U0001f600•", "d": "é"}],
    ),
    "strings over lines": (
        "[edit(a=\"\"\"x\n\"y\" ''\\\n\"\"\", b='''''', c='''it's''', d=\"one\ntwo\")]",
        "",
        [{"a": "x\n\"y\" ''", "b": "", "c": "it's", "d": "one\ntwo"}],
    ),
    "half a surrogate pair": (r'[edit(a="\ud83d\ude00", b="\ud83d")]', "", [{"a": "\U0001f600", "b": "\ud83d"}]),
    "numbers": (
        "[edit(a=[0, -7, +3, 1_000, 0x1F], b=[1.50, -2.5e-3, .5, 5., 1E3])]",
        "",
        [{"a": [0, -7, 3, 1000, 31], "b": [1.5, -2.5e-3, 0.5, 5.0, 1e3]}],
    ),
    "nested": (
        "[edit(a={'k': [1, {\"l\": None,},], \"m\": {}}, b=[[], [True, False,],], c=[true, false, null])]",
        "",
        [{"a": {"k": [1, {"l": None}], "m": {}}, "b": [[], [True, False]], "c": [True, False, None]}],
    ),
    "what ends a call, in a string": (f'[edit(path=")]{END}, search(")]', "", [{"path": f")]{END}, search("}]),
    "unclosed list": ("[edit(line=1)", "", [{"line": 1}]),
    "text behind": ("[edit(line=1)] is what I do [1]", " is what I do [1]", [{"line": 1}]),
    "JSON": (JSON, "", [{"line": 1}]),
    "JSON by the template": (f"{START}I edit.{END}{JSON}{JSON}", "I edit.", [{"line": 1}, {"line": 1}]),
    "JSON between markers": (f"{START}{JSON}; {JSON}\n{JSON}{END}", "", [{"line": 1}] * 3),
    "JSON in a list": (f'[{JSON}, {{"type": "function", "name": "search"}}]', "", [{"line": 1}, {}]),
    "an answer in JSON": ('{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    "an answer in a list": ('["edit", [search]]', '["edit", [search]]', []),
    "somebody's function": ("[print(a=1)]", "[print(a=1)]", []),
    "a call behind text": ("So: [edit(line=1)]", "So: [edit(line=1)]", []),
    "code": (f"{START}print('x'){END} [a(b=1) for it]", "print('x') [a(b=1) for it]", []),
    "half a marker": ("a <|python_", "a <|python_", []),
    "no argument's name": ('[edit("a")]', '[edit("a")]', []),
    "a name as a value": ("[edit(path=name)]", "[edit(path=name)]", []),
    "an expression": ("[edit(line=1+2)]", "[edit(line=1+2)]", []),
    "a call as a value": ("[edit(line=f())]", "[edit(line=f())]", []),
    "no value": ("[edit(path=)]", "[edit(path=)]", []),
    "a comma too many": ("[edit(,)]", "[edit(,)]", []),
    "other brackets": ("[edit(a=(1, 2))]", "[edit(a=(1, 2))]", []),
    "a key that is no string": ("[edit(a={1: 2})]", "[edit(a={1: 2})]", []),
    "a value behind the colon": ("[edit(a={'b':})]", "[edit(a={'b':})]", []),
    "no number": ("[edit(a=007)]", "[edit(a=007)]", []),
    "not finite": ("[edit(a=nan)]", "[edit(a=nan)]", []),
    "bad escapes": (r'[edit(a="\xg0")]', r'[edit(a="\xg0")]', []),
    "no character": (r'[edit(a="\U00110000")]', r'[edit(a="\U00110000")]', []),
    "no character's name": (r'[edit(a="\N{no such}")]', r'[edit(a="\N{no such}")]', []),
    "unfinished": ("[edit(path='a", "[edit(path='a", []),
    "a second call that is none": ("[edit(line=1), edit(line=x)] so", ", edit(line=x)] so", [{"line": 1}]),
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_a_reply_in_every_cut(name):
    reads_in_every_cut(parser, *REPLIES[name])


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(REPLIES)), st.booleans(), st.data())
def test_damaged_text_gives_the_same_in_any_cuts_and_loses_nothing(name, cut, data):
    inserted = ["", "'", '"', '"""', BACKSLASH, "[", ")", ",", "=", "\n", "é", "{", START, END]
    reads_damaged(parser, REPLIES[name][0], inserted, cut, data, hidden=(START, END))


def literals() -> st.SearchStrategy[object]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
    return st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4))


@settings(max_examples=200, deadline=None)
@given(literals(), st.sampled_from([repr, ascii, json.dumps]))
def test_what_python_and_json_write_is_read(value, write):
    text = write(value)
    reading, out = PythonValue(), []
    assert (reading.feed(text + ")", 0, out), reading.done) == (len(text), True)
    assert json.loads("".join(out)) == value


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([*"'\"[]{}:,1-. x\\", '"""', "\\x4", "\\77", "\\N{DIGIT ONE}", "None", "1e5", "0_1"]), max_size=8))
def test_what_is_read_is_what_python_reads(parts):
    text = "".join(parts)
    reading, out = PythonValue(), []
    end = reading.feed(text + ")", 0, out)
    if reading.done and end == len(text):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a backslash that escapes nothing is no error yet
            assert json.loads("".join(out)) == ast.literal_eval(text.strip())


def test_a_strings_text_streams():
    reading = parser()
    pieces = [piece for char in "[edit(path='hé', n=12)]" for piece in reading.add(char) if piece.kind in (CALL, ARGUMENTS)]
    assert [piece.text for piece in pieces] == ["edit", "{", '"path": ', '"', "h", "é", '"', ', "n": ', "12", "}"]


def test_a_call_cut_off_by_max_tokens_stays_a_call():
    assert parse_whole(parser(), "[edit(path='hel", cut=True) == Reply(calls=[("edit", '{"path": "hel')])
    two = [("edit", '{"a": 1}'), ("edit", '{"a": [')]
    assert parse_whole(parser(), f"{START}[edit(a=1), edit(a=[2", cut=True) == Reply(calls=two)


def test_one_call_only():
    assert parse_whole(parser(one_call=True), TWO, cut=False) == Reply(calls=[("edit", '{"path": "a b.py", "line": 3}')])


# ---- chat templates

# in the manner of the templates that ask for a list, among them Llama 3.2's
LISTS = """\
{%- if tools %}{{- '<|start_header_id|>system\\nRespond in the format [func_name1(params_name1=params_value1...)]' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}{%- endif %}
{%- for message in messages %}
{{- '<|start_header_id|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '[' + call.function.name + '(' }}
{%- for key, value in call.function.arguments.items() %}
{{- key + '=' + (value | tojson) }}{%- if not loop.last %}{{- ', ' }}{%- endif %}
{%- endfor %}
{{- ')]' }}
{%- endfor %}{%- endfor %}{# <|python_tag|> #}"""
TOOLS: list[Any] = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object"}}}]
CALLED: Any = {"id": "call_1", "type": "function", "function": {"name": "edit", "arguments": '{"path": "é", "line": 1}'}}
HISTORY: list[Any] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "I edit.", "tool_calls": [CALLED]},
    {"role": "tool", "content": "done", "tool_call_id": "call_1"},
]


def published_template() -> str:
    """The chat template of Llama 4's checkpoints, which transformers gives to those that it converts from Meta's own."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None
    source = Path(str(spec.origin)).parent / "models/llama4/processing_llama4.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "chat_template":
            return str(ast.literal_eval(node.value))
    raise AssertionError(f"{source} holds no chat_template")


def text_of(folder: Path, template: str) -> CheckpointText:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([START, END])
    return CheckpointText("m", str(checkpoint(folder, tokenizer, chat_template=template, bos_token="<|start|>")), None)


def test_the_published_template(tmp_path):
    template = published_template()
    text = text_of(tmp_path / "m", template)
    facts = text.facts()
    assert (facts.tool_parser, facts.reasoning_parser, list(facts.markers.values())) == (LLAMA4_JSON, NONE, [START, END])
    called = {**CALLED, "function": {"name": "edit", "arguments": {"path": "é", "line": 1}}}
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[[*HISTORY[:2], {**HISTORY[2], "tool_calls": [called]}, HISTORY[3]]],
        chat_template=template,
        tools=TOOLS,
        add_generation_prompt=True,
        bos_token="<|start|>",
    )
    written = rendered(text, msgspec.msgpack.encode(HISTORY), {"tools": json.dumps(TOOLS).encode()})
    assert written == expected
    turn = written.partition("assistant<|header_end|>\n\n")[2].partition("<|eot|>")[0]
    reading = ReplyParser(tool_parser(LLAMA4_JSON, ["edit"]), None)
    assert parse_whole(reading, turn, cut=False) == Reply("I edit.", calls=[("edit", '{"path": "é", "line": 1}')])


def test_a_template_that_asks_for_lists(tmp_path):
    text = text_of(tmp_path / "m", LISTS)
    assert text.facts().tool_parser == LLAMA4_PYTHONIC
    written = rendered(text, msgspec.msgpack.encode(HISTORY), {"tools": json.dumps(TOOLS).encode()})
    assert '\nI edit.[edit(path="é", line=1)]<' in written
    for template, model_type in (("{{ tools }}", "llama4"), ("{{ tools }} [func1(params_name=params_value)]", "")):
        assert detect_tools(template, model_type) == LLAMA4_PYTHONIC
