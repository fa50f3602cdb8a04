"""Grammars are checked in a text worker of their own: refused with the reason, and no grammar holds the helper up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

import psutil
import pytest
import pytest_asyncio

from daemon.errors import BadRequest
from daemon.process.long_tasks import LongTasks
from daemon.text.jobs import LIMIT_BYTES
from daemon.text.service import TextService

# its intersection has more states than two seconds of CPU can list
HOSTILE = "json_schema:" + json.dumps({"allOf": [{"type": "string", "pattern": f"(a|b)*c(a|b){{{30 + i}}}d"} for i in range(20)]})


@pytest_asyncio.fixture
async def text() -> AsyncIterator[TextService]:
    service = TextService(LongTasks())
    yield service
    await service.close()


@pytest.mark.parametrize(
    "grammar",
    [
        'json_schema:{"type":"object"}',
        "json_schema:{}",
        'json_schema:{"$ref":"#/$defs/a","$defs":{"a":{"type":"array","items":{"$ref":"#/$defs/a"},"maxItems":2}}}',
        "regex:[a-z]+@[a-z]+[.]com",
        "regex:",
        'lark:start: "a" | "b" start',
        'lark:start: <|end|> "a"',
    ],
)
async def test_grammars_that_can_be_followed(text: TextService, grammar: str) -> None:
    await text.check_grammar("field", grammar)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('json_schema:{"type":"nope"}', 'type: "nope" is no type'),
        ('json_schema:{"type":"object","not":{"type":"string"}}', "not"),
        ('json_schema:{"type":"object","not":{},"x-guidance":{"lenient":true}}', "not"),
        ('json_schema:{"type":"string","pattern":"(?=a)b"}', "look-around"),
        (
            'json_schema:{"type":"integer","minimum":5,"maximum":3}',
            "no value follows the schema: minimum (5) is greater than maximum (3)",
        ),
        ('json_schema:{"oneOf":[{"type":"integer"},{"type":"number"}]}', "oneOf"),
        ('json_schema:{"$ref":"http://127.0.0.1/schema"}', "http://127.0.0.1/schema"),
        ('json_schema:{"a":', "EOF"),
        ("regex:(a", "unclosed group"),
        ("lark:start: nobody", "unknown name"),
        ("other:x", "other"),
    ],
)
async def test_refusals_name_field_and_reason(text: TextService, grammar: str, reason: str) -> None:
    with pytest.raises(BadRequest) as error:
        await text.check_grammar("the_field", grammar)
    assert error.value.param == "the_field"
    assert error.value.message.startswith("the_field: ")
    assert reason in error.value.message
    assert error.value.status == 400


async def test_a_hostile_schema_is_refused_and_others_go_on(text: TextService) -> None:
    hostile = asyncio.create_task(text.check_grammar("response_format", HOSTILE))
    await asyncio.sleep(0.3)
    await text.check_grammar("regex", "regex:a+")
    with pytest.raises(BadRequest) as error:
        await hostile
    assert error.value.param == "response_format"
    await text.check_grammar("regex", "regex:a+")


async def test_hostile_grammars_one_after_the_other_have_no_others_refused(text: TextService) -> None:
    for _ in range(3):
        with pytest.raises(BadRequest, match="took more than 2 s of CPU time in its grammar"):
            await text.check_grammar("response_format", HOSTILE)
    await text.check_grammar("regex", "regex:a+")


async def test_its_worker_has_no_more_memory_than_any_other(text: TextService) -> None:
    await text.check_grammar("regex", "regex:a+")
    (worker,) = text._helper.workers.values()
    assert psutil.Process(worker.pid).rlimit(psutil.RLIMIT_AS)[0] == LIMIT_BYTES
