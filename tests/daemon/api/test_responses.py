"""OpenAI's responses through its official client, with replies written by hand; conversations, what is kept, what is refused."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import aiohttp
import msgspec
import openai
import pytest

from daemon.access.admission import Access
from daemon.access.keys import Keys
from daemon.access.tenant import Key, Tenant
from daemon.api import body_parts
from daemon.api.bodies import responses_api
from daemon.api.response_store import ENTRY_BYTES, MAX_TURNS, ResponseStore, StoredResponse
from daemon.errors import BadRequest, NotNow
from daemon.process.kept_records import memory_of
from engine.protocol import FINISH_LENGTH, FINISH_STOP
from tests.daemon.api.fakes import Node, Settings, entry, serve, text_script

WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: list[Any] = [WEATHER, {"type": "function", "name": "stop", "parameters": {"type": "object"}}]
GOOD: dict[str, Any] = {"model": "tiny", "input": "hi"}
KOELN = '{"city":"Köln \U0001f600"}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {KOELN}}}\n</tool_call>'
BROKEN = '<tool_call>{"name": "stop", "arguments": {oops}}</tool_call>'
# reply -> its items as (type, text, status)
REPLIES: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "text": ("Hello.", [("message", "Hello.", "completed")]),
    "nothing": ("", []),
    "thinking": ("<think>why\n</think>\n\nBecause.", [("reasoning", "why", "completed"), ("message", "Because.", "completed")]),
    "call": (CALL, [("function_call", KOELN, "completed")]),
    "all": (
        f"<think>hm</think>Wait.\n{CALL}{CALL}",
        [
            ("reasoning", "hm", "completed"),
            ("message", "Wait.", "completed"),
            ("function_call", KOELN, "completed"),
            ("function_call", KOELN, "completed"),
        ],
    ),
    "malformed": ("<tool_call>{oops}</tool_call>", [("message", "<tool_call>{oops}</tool_call>", "completed")]),
}
PARSERS = {"tool_parser": "hermes", "reasoning_parser": "think"}


def client(node: Node, key: str = "unused") -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{node.url}/v1", api_key=key, max_retries=0)


def items(response: Any) -> list[tuple[str, str, str]]:
    found = []
    for item in response.output:
        text = item.arguments if item.type == "function_call" else "".join(part.text for part in item.content)
        found.append((item.type, text, item.status))
    return found


async def ask(opened: openai.AsyncOpenAI, stream: bool, **options: Any) -> Any:
    """Returns the response; of a stream, that of its last event."""
    if not stream:
        return await opened.responses.create(**GOOD | options)
    last = None
    async for event in await opened.responses.create(**GOOD | options, stream=True):
        last = event
    return last.response  # type: ignore[union-attr]


@pytest.mark.parametrize("name", REPLIES)
async def test_the_official_client_reads_replies_streamed_and_not(name: str) -> None:
    reply, wanted = REPLIES[name]
    async with serve(lambda _: text_script(reply.encode()), models=[entry(**PARSERS)]) as node, client(node) as opened:
        whole = await opened.responses.create(**GOOD, tools=TOOLS)
        assert (items(whole), whole.status, whole.object) == (wanted, "completed", "response")
        assert whole.id.startswith("resp_")
        async with opened.responses.stream(**GOOD, tools=TOOLS) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert (items(streamed), streamed.status, streamed.output_text) == (wanted, "completed", whole.output_text)
    assert streamed.usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (2, len(reply.encode()) + 1)
    thinking = wanted[0][1] if wanted and wanted[0][0] == "reasoning" else ""
    assert whole.usage.output_tokens_details.reasoning_tokens == (len("<think>" + thinking) if thinking else 0)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    ids = [item.id for item in streamed.output]
    assert len(ids) == len(set(ids))


async def test_every_item_is_announced_told_and_ended() -> None:
    reply = REPLIES["all"][0]
    async with serve(lambda _: text_script(reply.encode()), models=[entry(**PARSERS)]) as node, client(node) as opened:
        told = [event async for event in await opened.responses.create(**GOOD, tools=TOOLS, stream=True)]
    for at in range(4):
        own = [event for event in told if getattr(event, "output_index", None) == at]
        assert (own[0].type, own[-1].type) == ("response.output_item.added", "response.output_item.done")
        (done,) = [event for event in own if event.type.endswith((".text.done", "_text.done", "arguments.done"))]
        text = "".join(event.delta for event in own if event.type.endswith(".delta"))
        assert text == (done.arguments if hasattr(done, "arguments") else done.text)
        assert own[0].item.status == "in_progress"
        assert own[-1].item == told[-1].response.output[at]
        parts = [event.type for event in own if ".content_part." in event.type]
        assert parts == ([] if at > 1 else ["response.content_part.added", "response.content_part.done"])


async def test_functions_may_be_in_namespaces() -> None:
    """Codex sends those of its helpers and of MCP servers so, and does not know a call by the joined name."""
    spaces: list[Any] = [
        WEATHER,
        {"type": "namespace", "name": "far", "description": "Elsewhere.", "tools": [WEATHER]},
        {"type": "namespace", "name": "mcp__near__", "tools": [{"type": "function", "name": "stop"}]},
    ]
    calls = "".join(CALL.replace("get_weather", name) for name in ("get_weather", "far__get_weather", "mcp__near__stop"))
    wanted = [("get_weather", None), ("get_weather", "far"), ("stop", "mcp__near__")]
    hello: Any = {"role": "user", "content": "hi"}
    async with serve(lambda _: text_script(calls.encode()), models=[entry(**PARSERS)]) as node, client(node) as opened:
        for stream in (False, True):
            told = await ask(opened, stream, input=[hello], tools=spaces)
            assert [(item.name, getattr(item, "namespace", None)) for item in told.output] == wanted
            assert [tool.type for tool in told.tools] == ["function", "namespace", "namespace"]
        results = [{"type": "function_call_output", "call_id": item.call_id, "output": "ok"} for item in told.output]
        sent: list[Any] = [item.model_dump(exclude_unset=True) for item in told.output]
        await ask(opened, False, input=results, tools=spaces, previous_response_id=told.id)
        await ask(opened, False, input=[hello, *sent, *results], tools=spaces)
        following, whole = node.requests.submitted[-2:]
        assert bytes(following.prompt) == bytes(whole.prompt)
        assert node.background is not None
        said = msgspec.msgpack.decode(node.background._stored.get("", told.id).messages)[-1]
        assert [each["function"]["name"] for each in said["tool_calls"]] == ["get_weather", "far__get_weather", "mcp__near__stop"]


def test_a_namespaces_functions_become_a_chats() -> None:
    space = {"type": "namespace", "name": "far", "description": "Elsewhere.", "tools": [WEATHER, {"type": "function", "name": "f"}]}
    call = {"type": "function_call", "call_id": "a1", "namespace": "far", "name": "f", "arguments": "{}"}
    head, messages = read(tools=[space], tool_choice={"type": "function", "name": "far__f"}, input=[call])
    assert messages[0]["tool_calls"][0]["function"]["name"] == "far__f"
    assert (head.tools.names, head.tools.name) == (["far__get_weather", "far__f"], "far__f")
    shown = [tool["function"] for tool in json.loads(head.options["tools"])]
    assert [each["description"] for each in shown] == ["Elsewhere.\n\nWeather", "Elsewhere."]


async def test_a_call_that_breaks_is_text() -> None:
    async with serve(lambda _: text_script(BROKEN.encode()), models=[entry(**PARSERS)]) as node, client(node) as opened:
        whole, streamed = [await ask(opened, stream, tools=TOOLS) for stream in (False, True)]
    assert items(whole) == [("message", BROKEN, "completed")]
    # a stream has announced the call before
    assert items(streamed) == [("function_call", "{", "incomplete"), ("message", BROKEN, "completed")]


@pytest.mark.parametrize("reply", [REPLIES["all"][0], BROKEN])
async def test_pieces_that_come_together_are_told_alike(reply: str) -> None:
    def at_once(_: object) -> Any:
        return [(list(reply.encode()), 0), ([], FINISH_STOP)]

    told = []
    for script in (at_once, lambda _: text_script(reply.encode())):
        async with serve(script, models=[entry(**PARSERS)]) as node, client(node) as opened:
            told.append(items(await ask(opened, True, tools=TOOLS)))
    assert told[0] == told[1]


async def test_an_answer_that_is_cut_short_is_incomplete() -> None:
    cut = CALL[: CALL.index("Köln")].encode()
    models = [entry(**PARSERS)]
    async with serve(lambda _: [(list(cut), FINISH_LENGTH)], models=models) as node, client(node) as opened:
        for stream in (False, True):
            told = await ask(opened, stream, tools=TOOLS, max_output_tokens=len(cut))
            assert (told.status, told.incomplete_details.reason, told.max_output_tokens) == (
                "incomplete",
                "max_output_tokens",
                len(cut),
            )
            assert items(told) == [("function_call", '{"city":"', "incomplete")]
            told = await ask(opened, stream, previous_response_id=told.id)
            assert told.status == "incomplete"
    full = [entry(max_model_len=10)]
    async with serve(lambda g: [([97] * g.params.max_tokens, FINISH_LENGTH)], models=full) as node, client(node) as opened:
        told = await ask(opened, False, max_output_tokens=500)
        assert (told.status, told.output_text) == ("incomplete", "a" * 8)


async def test_the_response_repeats_what_was_asked() -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "max_output_tokens": 100,
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "temperature": 0.5,
        "top_p": 0.25,
        "tools": [WEATHER],
        "tool_choice": {"type": "function", "name": "get_weather"},
        "reasoning": {"effort": "low"},
        "user": "me",
    }
    async with serve(lambda _: text_script(CALL.encode()), models=[entry(**PARSERS)]) as node, client(node) as opened:
        told = (await ask(opened, False, **asked)).model_dump()
        plain = (await ask(opened, False)).model_dump()
    shown = {name: told[name] for name in asked}
    shown["tools"] = [{name: tool[name] for name in WEATHER} for tool in shown["tools"]]
    shown["reasoning"] = {"effort": shown["reasoning"]["effort"]}
    assert shown == asked
    assert (plain["temperature"], plain["top_p"], plain["tools"], plain["tool_choice"]) == (1.0, 1.0, [], "auto")
    assert (plain["text"]["format"], plain["metadata"], plain["error"]) == ({"type": "text"}, {}, None)


async def test_a_conversation_goes_on_without_its_instructions() -> None:
    async with serve(lambda _: text_script(b"<think>hm</think>B"), models=[entry(**PARSERS)]) as node, client(node) as opened:
        first = await ask(opened, False, input="a", instructions="I")
        second = await ask(opened, True, input="c", instructions="J", previous_response_id=first.id)
        third = await ask(opened, False, input=[], previous_response_id=second.id)
        assert third.previous_response_id == second.id
        assert [bytes(each.prompt) for each in node.requests.submitted] == [b"Ia", b"JaBc", b"aBcB"]
        # the first one can be followed twice
        await ask(opened, False, input="x", previous_response_id=first.id)
        assert bytes(node.requests.submitted[-1].prompt) == b"aBx"


async def test_items_of_kept_responses_are_referred_to() -> None:
    """Vercel's AI SDK sends the model's own items back so, unless `store` is false."""
    hello: Any = {"role": "user", "content": "hi"}
    async with serve(lambda _: text_script(REPLIES["all"][0].encode()), models=[entry(**PARSERS)]) as node, client(node) as opened:
        first = await ask(opened, False, input=[hello], tools=TOOLS)
        calls = [item for item in first.output if item.type == "function_call"]
        results: list[Any] = [{"type": "function_call_output", "call_id": call.call_id, "output": "rain"} for call in calls]
        references: list[Any] = [{"type": "item_reference", "id": item.id} for item in first.output]
        whole: list[Any] = [item.model_dump(exclude_unset=True) for item in first.output]
        for stream in (False, True):
            told = await ask(opened, stream, input=[hello, *references, *results], tools=TOOLS)
        again = await ask(opened, False, input=[hello, *whole, *results], tools=TOOLS)
        _, referring, _, sending = node.requests.submitted
        assert bytes(referring.prompt) == bytes(sending.prompt)
        kept = [await listed(opened, each.id, order="asc") for each in (told, again)]
        assert [item["type"] for item in kept[0]] == [item["type"] for item in kept[1]]
        counted = await opened.responses.input_tokens.count(model="tiny", input=[hello, *references, *results])
        assert counted.input_tokens == len(referring.prompt)
        await opened.responses.delete(first.id)
        for gone in (first.output[1].id, "msg_x", "msg_0_0"):
            with pytest.raises(openai.NotFoundError, match="send the item itself") as error:
                await ask(opened, False, input=[hello, {"type": "item_reference", "id": gone}])
            assert (error.value.code, error.value.param) == ("response_not_found", "input[1].id")
        with pytest.raises(openai.BadRequestError, match=r"input\[0\].id is missing"):
            await ask(opened, False, input=[{"type": "item_reference"}])
        quoting = await ask(opened, False, input='say "item_reference"')
        assert quoting.status == "completed"


async def test_items_that_are_referred_to_may_not_outgrow_a_body() -> None:
    async with serve(lambda _: text_script(b"B" * 900), Settings(max_body_bytes=2000)) as node, client(node) as opened:
        first = await ask(opened, False)
        reference: Any = {"type": "item_reference", "id": first.output[0].id}
        await ask(opened, False, input=[reference])
        with pytest.raises(openai.APIStatusError, match="max_body_bytes") as error:
            await ask(opened, False, input=[reference] * 2)
        assert error.value.status_code == 413


async def test_a_kept_response_is_shown_and_deleted() -> None:
    async with serve(lambda _: text_script(b"B")) as node, client(node) as opened:
        for stream in (False, True):
            told = await ask(opened, stream)
            assert await opened.responses.retrieve(told.id) == told
            with pytest.raises(openai.BadRequestError, match="stream"):
                await opened.responses.retrieve(told.id, stream=True)
            follower = await ask(opened, False, previous_response_id=told.id)
            await opened.responses.delete(told.id)
            for gone in (opened.responses.retrieve(told.id), opened.responses.delete(told.id)):
                with pytest.raises(openai.NotFoundError, match="is not kept"):
                    await gone
            for gone_id in (told.id, follower.id):
                with pytest.raises(openai.BadRequestError, match="previous_response_id"):
                    await ask(opened, False, previous_response_id=gone_id)
        told = await ask(opened, False, store=False)
        assert told.model_dump()["store"] is False
        with pytest.raises(openai.NotFoundError):
            await opened.responses.retrieve(told.id)


async def listed(opened: openai.AsyncOpenAI, public_id: str, **query: Any) -> list[dict[str, Any]]:
    """Returns all input items of a response, gathered from pages."""
    pages = opened.responses.input_items.list(public_id, **query)
    return [item.model_dump(exclude_unset=True) async for item in pages]


async def test_the_items_of_an_input_are_listed() -> None:
    given: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "a", "odd": 1}, {"type": "text", "text": "b"}], "id": "mine"},
        {"type": "reasoning", "id": "mine", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": "c", "status": "incomplete", "id": None},
        {"type": "function_call", "call_id": "c1", "name": "stop", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "d"}], "id": 5},
    ]
    async with serve(lambda _: text_script(b"B")) as node, client(node) as opened:
        told = await ask(opened, False, input=given, instructions="I")
        found = await listed(opened, told.id, order="asc")
        ids = [item.pop("id") for item in found]
        parts = [{"type": "input_text", "text": "a", "odd": 1}, {"type": "input_text", "text": "b"}]
        assert ids[1] == "mine"
        assert [each.partition("_")[0] for each in ids] == ["msg", "mine", "rs", "msg", "fc", "fco"]
        assert len(set(ids)) == len(ids)
        assert found == [
            {
                "type": "message",
                "role": "developer",
                "status": "completed",
                "content": [{"type": "input_text", "text": "Be brief."}],
            },
            {"type": "message", "role": "user", "status": "completed", "content": parts},
            {"type": "reasoning", "summary": given[2]["summary"]},
            {
                "type": "message",
                "role": "assistant",
                "status": "incomplete",
                "content": [{"type": "output_text", "text": "c", "annotations": [], "logprobs": []}],
            },
            given[4] | {"status": "completed"},
            {name: value for name, value in given[5].items() if name != "id"} | {"status": "completed"},
        ]
        for limit in (1, 4, 6):
            assert [item["id"] for item in await listed(opened, told.id, limit=limit)] == ids[::-1]
        page = await opened.responses.input_items.list(told.id, limit=2, after=ids[4])
        assert ([item.id for item in page.data], page.has_more) == ([ids[3], ids[2]], True)
        assert page.model_dump() | {"object": "list", "first_id": ids[3], "last_id": ids[2]} == page.model_dump()
        for wrong in ({"limit": 0}, {"limit": 101}, {"order": "up"}, {"after": "nothing"}):
            with pytest.raises(openai.BadRequestError) as error:
                await opened.responses.input_items.list(told.id, **wrong)  # type: ignore[arg-type]
            assert error.value.param == next(iter(wrong))
        with pytest.raises(openai.NotFoundError, match="is not kept"):
            await opened.responses.input_items.list("resp_no")


async def test_input_items_have_the_conversation_before_them() -> None:
    async with serve(lambda _: text_script(b"<think>hm</think>B"), models=[entry(**PARSERS)]) as node, client(node) as opened:
        first = await ask(opened, False, input="a")
        second = await ask(opened, True, input="c", previous_response_id=first.id)
        found = await listed(opened, second.id, order="asc")
        assert [(item["type"], item["content"][0]["text"]) for item in found] == [
            ("message", "a"),
            ("reasoning", "hm"),
            ("message", "B"),
            ("message", "c"),
        ]
        assert [item["id"] for item in found[1:3]] == [item.id for item in first.output]
        await opened.responses.delete(first.id)
        assert [item["content"][0]["text"] for item in await listed(opened, second.id)] == ["c"]


async def test_what_nothing_reads_of_an_input_is_listed_as_text() -> None:
    body = b'{"model": "tiny", "input": [{"role": "user", "content": "a", "k\xff": "v\xfe"}]}'
    async with serve(lambda _: text_script(b"B")) as node, aiohttp.ClientSession(node.url) as http:
        async with http.post("/v1/responses", data=body, headers={"Content-Type": "application/json"}) as answer:
            public_id = (await answer.json())["id"]
        async with http.get(f"/v1/responses/{public_id}/input_items") as answer:
            assert (await answer.json())["data"][0]["k\ufffd"] == "v\ufffd"


async def test_a_tenants_responses_are_its_own() -> None:
    tenants = {name: Tenant(name) for name in "ab"}
    access = Access(Keys(tenants, {hashlib.sha256(f"{name}-key".encode()).digest(): Key(tenants[name]) for name in tenants}))
    async with (
        serve(lambda _: text_script(b"B"), access=access) as node,
        client(node, "a-key") as mine,
        client(node, "b-key") as other,
    ):
        told = await ask(mine, False)
        with pytest.raises(openai.NotFoundError):
            await other.responses.retrieve(told.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.delete(told.id)
        with pytest.raises(openai.NotFoundError):
            await other.responses.input_items.list(told.id)
        with pytest.raises(openai.BadRequestError, match="is not kept"):
            await ask(other, False, previous_response_id=told.id)
        assert (await ask(mine, False, previous_response_id=told.id)).status == "completed"


async def test_no_answer_is_kept_of_a_failed_request() -> None:
    script = [([104], 0), NotNow("unloaded", "it was unloaded")]
    async with serve(lambda _: script) as node, client(node) as opened:  # type: ignore[arg-type]
        told = await ask(opened, True)
        assert (told.status, told.error.code, told.error.message) == ("failed", "server_error", "it was unloaded")
        assert items(told) == [("message", "h", "incomplete")]
        with pytest.raises(openai.NotFoundError):
            await opened.responses.retrieve(told.id)
        with pytest.raises(openai.InternalServerError, match="it was unloaded"):
            await ask(opened, False)


async def test_tokens_of_a_prompt_are_counted() -> None:
    async with serve(lambda _: text_script(b"B")) as node, client(node) as opened:
        first = await ask(opened, False, input="hello")
        counted = await opened.responses.input_tokens.count(model="tiny", input="hello", instructions="abc")
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", 8)
        counted = await opened.responses.input_tokens.count(model="tiny", input="you", previous_response_id=first.id)
        assert counted.input_tokens == len("helloByou")
        with pytest.raises(openai.BadRequestError) as error:
            await opened.responses.input_tokens.count(model="tiny", input="you", previous_response_id="resp_no")
        assert error.value.code == "previous_response_not_found"
        assert len(node.requests.submitted) == 1


async def test_a_conversation_may_not_outgrow_a_body() -> None:
    async with serve(lambda _: text_script(b"B"), Settings(max_body_bytes=2000)) as node, client(node) as opened:
        first = await ask(opened, False, input="x" * 1500)
        with pytest.raises(openai.APIStatusError, match="previous_response_id: the conversation has") as error:
            await ask(opened, False, input="x" * 1500, previous_response_id=first.id)
        assert error.value.status_code == 413


def kept(number: int, previous: str = "", tenant: str = "", num_bytes: int = 0) -> StoredResponse:
    return StoredResponse(f"r{number}", tenant, previous, msgspec.msgpack.encode([{"at": number}]), b"x" * num_bytes, False)


def test_a_conversation_has_an_end() -> None:
    store = ResponseStore(1 << 30)
    for at in range(MAX_TURNS + 1):
        store.add(kept(at, f"r{at - 1}" if at else ""))
    last = store.conversation("", f"r{MAX_TURNS - 1}")
    assert [each.public_id for each in last] == [f"r{at}" for at in range(MAX_TURNS)]
    with pytest.raises(BadRequest, match="has more than 1024 responses"):
        store.conversation("", f"r{MAX_TURNS}")


def test_the_oldest_of_the_largest_tenant_make_room_and_never_before_what_follows_them() -> None:
    store = ResponseStore(10 * (ENTRY_BYTES + memory_of(900)))
    store.add(kept(100, tenant="b", num_bytes=900))
    for at in range(9):
        store.add(kept(at, f"r{at - 1}" if at in (1, 2) else "", tenant="a", num_bytes=900))
    store.conversation("a", "r0")  # used just now
    for at in range(9, 12):
        store.add(kept(at, tenant="a", num_bytes=900))
    assert store.get("b", "r100")
    for at in range(12):
        there = at not in (2, 1, 3)  # r2 and r1 follow r0, which was used; they were not
        if there:
            assert store.get("a", f"r{at}")
        else:
            with pytest.raises(BadRequest, match="is not kept"):
                store.get("a", f"r{at}")
    store.add(kept(50, tenant="a", num_bytes=1 << 20))  # larger than the store: nothing makes room for it
    assert store.get("b", "r100")
    store.delete("b", "r100")
    for at in range(12):
        if at not in (1, 2, 3):
            store.delete("a", f"r{at}")
    assert store.num_bytes == 0


async def test_long_bodies_are_read_by_a_text_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parts, "INLINE_BYTES", 1)
    async with serve(lambda _: text_script(b"B")) as node, client(node) as opened:
        first = await ask(opened, False, instructions="I", metadata={"a": "b"})
        second = await ask(opened, False, previous_response_id=first.id)
        assert (first.metadata, second.previous_response_id, node.text.num_parsed) == ({"a": "b"}, first.id, 2)
        assert bytes(node.requests.submitted[-1].prompt) == b"hiBhi"


async def test_errors_name_the_fields_of_this_body() -> None:
    async with serve() as node, aiohttp.ClientSession(node.url) as http:
        for body, param in (
            ({"tools": [WEATHER, WEATHER]}, "tools[1].name"),
            ({"input": "x" * 5000}, "input"),
            ({"max_tokens": 5}, "max_tokens"),
            ({"min_tokens": 9, "max_output_tokens": 5}, "min_tokens"),
            ({"tools": [WEATHER | {"parameters": []}]}, "tools[0].parameters"),
        ):
            async with http.post("/v1/responses", json=GOOD | body) as answer:
                told = (await answer.json())["error"]
                assert (answer.status, told["param"], told["message"].startswith(param)) == (400, param, True)


async def test_one_models_own_path_and_the_wire() -> None:
    async with serve(lambda _: text_script("é\n".encode())) as node, aiohttp.ClientSession(node.url) as http:
        async with http.post("/m/tiny/v1/responses", json={"input": "a", "stream": True}) as answer:
            assert answer.status == 200
            text = await answer.text()
        told = []
        for event in text.removesuffix("\n\n").split("\n\n"):
            name, data = event.split("\n")
            told.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {told[-1]['type']}"
        deltas = [event["delta"] for event in told if event["type"] == "response.output_text.delta"]
        assert "".join(deltas) == "é\n"
        shown = told[-1]["response"]
        async with http.get(f"/m/tiny/v1/responses/{shown['id']}") as answer:
            assert await answer.json() == shown
        async with http.get("/v1/responses") as answer:
            assert answer.status == 405


# ---- how a body is read


def read(**fields: Any) -> tuple[Any, list[dict[str, Any]]]:
    head, messages = responses_api.parse(json.dumps(GOOD | fields).encode())
    return head, msgspec.msgpack.decode(messages)


def test_items_become_a_chat() -> None:
    call = {"type": "function_call", "call_id": "a1", "name": "get_weather", "arguments": '{"city":"Köln"}', "id": "fc_1"}
    _, messages = read(
        instructions="Be brief.",
        input=[
            {"role": "developer", "content": "D"},
            {"role": "user", "content": [{"type": "input_text", "text": "hi"}, {"type": "input_text", "text": "there"}]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {
                "type": "message",
                "id": "msg_1",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "Wait.", "annotations": []}],
            },
            call,
            call | {"call_id": "a2"},
            {"type": "function_call_output", "call_id": "a1", "output": "rain"},
            {"type": "function_call_output", "call_id": "a2", "output": [{"type": "input_text", "text": "sun"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "so"}], "encrypted_content": "x"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "Or yes."},
            {"role": "user", "content": "And?"},
            {"type": "reasoning", "summary": []},
        ],
    )
    called = {"type": "function", "function": {"name": "get_weather", "arguments": '{"city":"Köln"}'}}
    assert messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "developer", "content": "D"},
        {"role": "user", "content": "hi\nthere"},
        {
            "role": "assistant",
            "content": "Wait.",
            "reasoning_content": "hm",
            "tool_calls": [{"id": "a1", **called}, {"id": "a2", **called}],
        },
        {"role": "tool", "content": "rain", "tool_call_id": "a1"},
        {"role": "tool", "content": "sun", "tool_call_id": "a2"},
        {"role": "assistant", "content": "No.", "reasoning_content": "so"},
        {"role": "assistant", "content": "Or yes."},
        {"role": "user", "content": "And?"},
    ]


def test_the_fields_become_a_chats() -> None:
    head, _ = read(
        temperature=0.5,
        max_output_tokens=64,
        stream=True,
        stream_options={"include_obfuscation": True},
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        reasoning={"effort": "max", "summary": "auto"},
        text={"verbosity": "low", "format": {"type": "text"}},
        include=["reasoning.encrypted_content"],
        truncation="disabled",
        background=False,
        service_tier="auto",
    )
    assert (head.max_tokens, head.temperature, head.stream, head.include_usage) == (64, 0.5, True, False)
    assert (head.tools.choice, head.tools.many, head.tools.names) == ("required", False, ["get_weather", "stop"])
    assert msgspec.msgpack.decode(head.options["kwargs"]) == {"reasoning_effort": "xhigh", "verbosity": "low"}
    own = {"top_k": 5, "seed": 7, "min_tokens": 2, "ignore_eos": True, "cache_salt": "x", "priority": 3, "stop": ["a", "b"]}
    own |= {"stop_token_ids": [4]}
    outputs = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}
    head, _ = read(**own, **outputs, logit_bias={"9": 2.0}, n=1, chat_template_kwargs={"k": 1})
    assert {name: getattr(head, name) for name in own} == own
    assert {name: getattr(head.outputs, name) for name in outputs} == outputs
    assert head.outputs.logit_bias
    assert msgspec.msgpack.decode(head.options["kwargs"]) == {"k": 1}
    assert read(tools=TOOLS, tool_choice={"type": "function", "name": "stop"})[0].tools.name == "stop"
    assert read(tools=TOOLS, tool_choice="none")[0].tools is None
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "stop"}]}
    tools = read(tools=TOOLS, tool_choice=allowed)[0].tools
    assert (tools.choice, tools.names) == ("required", ["stop"])
    schema = {"type": "json_schema", "name": "x", "schema": {"type": "object"}, "strict": True}
    assert read(text={"format": schema})[0].grammar == 'json_schema:{"type": "object"}'
    assert read(text={"format": {"type": "json_object"}})[0].grammar == 'json_schema:{"type":"object"}'


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": "a\0"}, "input"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": "a\0"}]}, "input[0].content"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_text"}]}]}, "input[0].content[0].text"),
        ({"input": [{"type": "function_call", "call_id": "x", "arguments": "{}"}]}, "input[0].name"),
        ({"input": [{"type": "function_call", "call_id": "x", "name": "y"}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call", "name": "y", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "x"}]}, "input[0].output"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tools": [{"type": "namespace", "tools": []}]}, "tools[0].name"),
        (
            {"tools": [WEATHER, {"type": "namespace", "name": "x", "tools": [{"type": "custom", "name": "y"}]}]},
            "tools[1].tools[0].type",
        ),
        ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        ({"instructions": "a\0"}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "no"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        (
            {"tools": TOOLS, "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "no"}]}},
            "tool_choice.tools[0].name",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
        ({"temperature": 2.5}, "temperature"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"metadata": {"a": 5}}, 'metadata["a"]'),
        ({"include": ["message.output_text.logprobs"]}, "include"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"truncation": "auto"}, "truncation"),
        ({"background": True, "store": False}, "background"),
        ({"background": 1}, "background"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "x"}}, "prompt"),
        ({"seed": 0.5}, "seed"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"max_tokens": 5}, "max_tokens"),
        ({"max_completion_tokens": 5}, "max_completion_tokens"),
        ({"messages": []}, "messages"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"verbosity": "low"}, "verbosity"),
        ({"n": 2}, "n"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"guided_json": {"type": "object"}}, "guided_json"),
        ({"logprobs": True}, "logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"bad_words": ["x"]}, "bad_words"),
    ],
)
def test_bad_fields_are_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequest) as error:
        read(**fields)
    assert error.value.param == param
