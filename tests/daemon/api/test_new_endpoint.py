"""An endpoint is one new file and one line: proven in a copy of the tree, with one of a new API,
that generates text in a shape of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("config", "scheduler", "loader", "engine", "daemon", "hearthd", "tests")
FILE = '''
"""POST /v2/say: takes {"text"} and answers {"said"}."""

from __future__ import annotations

from dataclasses import replace

import msgspec
from aiohttp import web

from daemon.api.bodies.common import Common, Head, head_of
from daemon.api.bodies.decode import decode
from daemon.api.bodies.prompts import prompts
from daemon.api.endpoint import Api, Body, Call, Endpoint, FieldTable
from daemon.api.endpoints.completions import COMPLETION_FORMAT
from daemon.api.generation.answer_format import Finished
from daemon.api.generation.generate import generate


class SayBody(Common, kw_only=True):
    text: str


_decoder = msgspec.json.Decoder(SayBody)


def parse(body: bytes) -> tuple[Head, bytes]:
    fields: SayBody = decode(_decoder, body, "")
    kind, packed, num = prompts(msgspec.json.encode(fields.text), "text")
    options = {"add_special_tokens": True, "suffix": ""}
    head = head_of(fields, max_tokens=fields.max_tokens, prompt_kind=kind, num_prompts=num, options=options, logprobs=-1)
    return head, packed


def _whole(finished: Finished) -> dict[str, object]:
    return {"said": "".join(finished.collectors[0].parts)}


_BODY = Body(parse, Head, (FieldTable("Say", SayBody, {"text": "what to say"}),))
_FORMAT = replace(COMPLETION_FORMAT, id_prefix="say-", prompt_field="text", whole=_whole)


async def _handle(call: Call) -> web.StreamResponse:
    return await generate(call, _BODY, _FORMAT)


V2 = Api(
    chats="/v2/say",
    models="/v1/models",
    root="/v2/",
    client_header="say-version",
    error_body=lambda error: {"wrong": error.body()["error"]["message"]},
)
SAY = Endpoint(name="say", paths=(V2.chats,), methods=("POST",), about="says it", handle=_handle, body=_BODY, api=V2)
'''
LINE = "from daemon.api.endpoints.say import SAY\n"
USE = """
import asyncio, json
from aiohttp import ClientSession
from daemon.api import body_parts
from daemon.api import reference
from tests.daemon.api.fakes import serve

async def main():
    async with serve() as node, ClientSession(node.url) as http:
        for path in ("/v2/say", "/m/tiny/v2/say"):
            async with http.post(path, json={"model": "tiny", "text": "abc", "max_tokens": 3}) as answer:
                assert answer.status == 200, await answer.text()
                print(json.dumps(await answer.json()))
        async with http.post("/v2/say", json={"model": "tiny", "text": "abc", "max_tokens": 3, "stream": True}) as answer:
            print((await answer.text()).strip().splitlines()[-1])
        body_parts.INLINE_BYTES = 1  # as a text worker reads it
        async with http.post("/v2/say", json={"model": "tiny", "text": 5}) as answer:
            print(answer.status, (await answer.json())["wrong"])
        async with http.get("/v2/say") as answer:
            print(answer.status, (await answer.json())["wrong"])
        async with http.get("/m/tiny/v2/no") as answer:
            print(answer.status, (await answer.json())["wrong"])
        async with http.get("/v1/no", headers={"say-version": "1"}) as answer:
            print(answer.status, (await answer.json())["wrong"])

asyncio.run(main())
print("| POST | `/v2/say` | yes | says it |" in reference.reference(), "| `text` | text | what to say |" in reference.reference())
"""


def test_an_endpoint_is_one_file_and_one_line(tmp_path: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    endpoints = tmp_path / "daemon/api/endpoints"
    (endpoints / "say.py").write_text(FILE)
    registry = endpoints / "registry.py"
    last = "from daemon.api.endpoints.tokenize import DETOKENIZE, TOKENIZE\n"
    assert registry.read_text().count(last) == 1
    registry.write_text(registry.read_text().replace(last, LINE + last))
    done = subprocess.run(
        [sys.executable, "-c", USE], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        '{"said": "cba"}',
        '{"said": "cba"}',
        "data: [DONE]",
        "400 text: Expected `string`, got `integer`",
        "405 use POST for this path, not GET",
        "404 no such path: /m/tiny/v2/no; chats go to /v2/say, and /v1/models lists what there is",
        "404 no such path: /v1/no; chats go to /v1/chat/completions, and /v1/models lists what there is",
        "True True",
    ]
