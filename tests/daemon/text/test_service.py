"""The text helper as a real process: answers, errors, deaths, and that it never holds the event loop."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from dataclasses import replace

import msgspec
import psutil
import pytest
from tokenizers import Tokenizer, processors

from daemon.errors import BadRequest, HearthError
from daemon.process.long_tasks import LongTasks
from daemon.text.detokenizer import decode
from daemon.text.service import TextService
from tests.daemon.api.fakes import entry
from tests.daemon.text.tokenizers_made import CHATML, byte_fallback, byte_level, checkpoint, model

FIELDS = ("query", "documents")
MESSAGES = [{"role": "user", "content": "The fox, é😀"}]


@pytest.fixture
async def service():
    service = TextService(LongTasks())
    yield service
    await service.close()


def packed(messages: object) -> bytes:
    return msgspec.msgpack.encode(messages)


async def test_encodes_as_the_tokenizer_does(service, tmp_path):
    tokenizer = byte_level()
    tiny = model(checkpoint(tmp_path / "tiny", tokenizer))
    texts = ["The fox", "", "é😀" * 50, "x" * 200_000]
    expected = [tokenizer.encode(text).ids for text in texts]
    assert [ids.tolist() for ids in await service.encode(tiny, packed(texts))] == expected
    assert [ids.tolist() for ids in await service.encode(tiny, texts[2])] == [expected[2]]
    table = await service.table(tiny)
    assert decode(table, expected[2]) == texts[2]


async def test_a_tokenizer_is_opened_ahead_of_the_first_request(service, tmp_path):
    """A second time only where no worker has it any more. One that cannot be read fails the requests, and nothing before."""
    tiny, broken = model(checkpoint(tmp_path / "tiny", byte_level())), entry("broken")
    for each in (tiny, broken):
        service.open_ahead(each)
    await asyncio.gather(*service._ahead)
    assert {opened.result().model for opened in service._workers.values()} == {tiny.name, "broken"}
    assert all(table.done() for table in service._tables.values())
    assert (service.unreadable(tiny), "tokenizer.json cannot be read" in service.unreadable(broken)) == ("", True)
    service.open_ahead(tiny)
    assert not service._ahead
    (worker,) = [each.result() for each in service._workers.values() if each.result().model == tiny.name]
    service._helper.release(worker)
    while worker.alive:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    service.open_ahead(tiny)
    await asyncio.gather(*service._ahead)
    assert await service.table(tiny)
    with pytest.raises(HearthError):
        await service.table(broken)


def with_template(template: object) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.post_processor = template
    return tokenizer


ENDS = [("<|start|>", 0), ("<|end|>", 1)]
TEMPLATES = {
    "BERT": processors.BertProcessing(ENDS[1], ENDS[0]),
    "RoBERTa": processors.RobertaProcessing(ENDS[1], ENDS[0]),
    "one of its own": processors.TemplateProcessing(
        single="<|start|> $A", pair="<|start|> $A <|end|> $B:1 <|end|>:1", special_tokens=ENDS
    ),
    "none": None,
}


@pytest.mark.parametrize("name", TEMPLATES)
async def test_pairs_are_encoded_as_the_tokenizer_does(service, tmp_path, name):
    tokenizer = with_template(TEMPLATES[name])
    tiny = model(checkpoint(tmp_path / "tiny", tokenizer))
    documents = ["The fox", "", "é😀" * 50, "lazy dog " * 9000]
    for firsts in (["why?"], ["why?", "when", "", "brown " * 200]):
        pairs = list(zip(firsts if len(firsts) > 1 else firsts * 4, documents, strict=True))
        expected = [tokenizer.encode(*pair) for pair in pairs]
        begins = [each.type_ids.index(1) if 1 in each.type_ids else 0 for each in expected]
        if name == "none":
            begins = [len(tokenizer.encode(first).ids) for first, _ in pairs]
        told, ids = await service.encode_pairs(replace(tiny, max_model_len=100_000), packed((firsts, documents)), FIELDS)
        assert [each.tolist() for each in ids] == [each.ids for each in expected]
        assert told.tolist() == begins


async def test_pairs_are_cut_at_the_second_text_s_end(service, tmp_path):
    tokenizer = with_template(TEMPLATES["BERT"])
    tiny = model(checkpoint(tmp_path / "tiny", tokenizer))
    texts = packed((["why?"], ["The quick brown fox jumps", "a"]))
    whole = [tokenizer.encode("why?", text).ids for text in ("The quick brown fox jumps", "a")]
    assert [len(each) for each in whole] > [12, 8]
    first, second = (await service.encode_pairs(tiny, texts, FIELDS, 10))[1]
    assert (first.tolist(), second.tolist()) == ([*whole[0][:9], 1], whole[1])
    first, second = (await service.encode_pairs(tiny, texts, FIELDS, 0, 1))[1]
    begin = len(tokenizer.encode("why?").ids)
    assert (first.tolist(), second.tolist()) == ([*whole[0][: begin + 1], 1], whole[1])
    first, _ = (await service.encode_pairs(tiny, texts, FIELDS, begin + 3, 5))[1]
    assert first.tolist() == [*whole[0][: begin + 2], 1], "the shorter one counts"


async def test_a_pair_without_room_for_its_second_text_is_refused(service, tmp_path):
    tokenizer = with_template(TEMPLATES["BERT"])
    tiny = model(checkpoint(tmp_path / "tiny", tokenizer), max_model_len=1000)
    num = len(tokenizer.encode("why?", add_special_tokens=False).ids)
    for firsts, named, keep, told in (
        (["why?"], "query", num + 3, f"{num} tokens, which with 3 special ones leave no room in the {num + 3} of truncate_prompt"),
        (["", "why?"], "query[1]", num + 3, "no room"),
        (["why? " * 2000], "query", 0, "no room in the 1000 of max_model_len"),
        (["why? " * 20_000], "query", 0, "at least"),
    ):
        with pytest.raises(BadRequest, match=told) as error:
            await service.encode_pairs(tiny, packed((firsts, ["a", "b"])), FIELDS, keep)
        assert (error.value.param, error.value.code) == (named, "context_length_exceeded")
    with pytest.raises(BadRequest, match="at least") as error:
        await service.encode_pairs(tiny, packed((["a"], ["b", "x" * 100_000])), FIELDS)
    assert error.value.param == "documents[1]"
    cut = (await service.encode_pairs(tiny, packed((["a"], ["b", "x" * 100_000])), FIELDS, 0, 4))[1]
    assert len(cut[1]) <= 8


async def test_a_models_folder_may_be_named_from_here(service, tmp_path, monkeypatch):
    checkpoint(tmp_path / "here", byte_level())
    (tmp_path / "own.jinja").write_text("{{ messages[0].content }}!")
    monkeypatch.chdir(tmp_path)
    tiny = entry("here", path="here", aliases=(), chat_template="own.jinja")
    ids = await service.encode_chat(tiny, packed([{"role": "user", "content": "hi"}]), {})
    assert decode(await service.table(tiny), ids) == "hi!"


async def test_truncation_and_padding_of_the_file_are_ignored(service, tmp_path):
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=16)
    tiny = model(checkpoint(tmp_path / "tiny", tokenizer))
    (ids,) = await service.encode(tiny, "The quick brown fox jumps over")
    assert decode(await service.table(tiny), ids) == "The quick brown fox jumps over"


async def test_a_chat_is_rendered_and_encoded(service, tmp_path):
    tokenizer = byte_level()
    tiny = model(checkpoint(tmp_path / "tiny", tokenizer, chat_template=CHATML))
    ids = await service.encode_chat(tiny, packed(MESSAGES), {})
    expected = "<|start|>user\nThe fox, é😀<|end|>\n<|start|>assistant\n"
    assert ids.tolist() == tokenizer.encode(expected, add_special_tokens=False).ids
    ids = await service.encode_chat(tiny, packed(MESSAGES), {"add_generation_prompt": False})
    assert ids.tolist() == tokenizer.encode(expected.removesuffix("<|start|>assistant\n"), add_special_tokens=False).ids


async def test_texts_that_cannot_fit_are_refused_before_they_are_encoded(service, tmp_path):
    tokenizer = byte_level()
    tiny = model(checkpoint(tmp_path / "tiny", tokenizer, chat_template=CHATML), max_model_len=1000)
    long = "x" * 100_000
    with pytest.raises(BadRequest) as error:
        await service.encode(tiny, packed(["short", long]), field="input")
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "input[1]")
    assert "tokens > 1000 maximum (max_model_len)" in error.value.message
    assert f"{len(long)} of its {len(long)} bytes" in error.value.message
    with pytest.raises(BadRequest) as error:
        await service.encode_chat(tiny, packed([{"role": "user", "content": long}]), {})
    assert (error.value.code, error.value.param) == ("context_length_exceeded", "messages")
    count, _, _ = await service.tokenize(tiny, "text", packed([long]), {"add_special_tokens": True, "token_strings": False})
    assert int(count) == len(tokenizer.encode(long).ids), "counting is for texts of any length"


async def test_a_text_of_15_mb_is_refused_without_encoding_it(service, tmp_path):
    """The refusal takes the text worker less processor time than the tokens of a fifteenth of the text do."""

    def computed_s() -> float:
        helper = psutil.Process(service._helper.pid)
        times = [process.cpu_times() for process in (helper, *helper.children(recursive=True))]
        return sum(one.user + one.system for one in times)

    tiny = model(checkpoint(tmp_path / "tiny", byte_level(), chat_template=CHATML), max_model_len=1000)
    await service.encode(tiny, packed(["short"]))
    begin_s = computed_s()
    with pytest.raises(BadRequest, match=r"tokens > 1000 maximum \(max_model_len\)"):
        await service.encode(tiny, packed(["x" * 15_000_000]))
    refused_s = computed_s()
    await service.tokenize(tiny, "text", packed(["x" * 1_000_000]), {"add_special_tokens": True, "token_strings": False})
    assert refused_s - begin_s < computed_s() - refused_s


@pytest.mark.parametrize("place", ["config", "named", "jinja", "json", "text", "file"])
async def test_a_template_is_found_wherever_checkpoints_keep_it(service, tmp_path, place):
    template = "{{ bos_token }}|{{ messages[0].content }}"
    config = {"chat_template": template} if place == "config" else {}
    if place == "named":
        config = {"chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": template}]}
    if place in ("text", "file"):
        config = {"chat_template": "overridden"}
    folder = checkpoint(tmp_path / "m", byte_level(), bos_token={"content": "<b>"}, **config)
    override = None
    if place == "jinja":
        (folder / "chat_template.jinja").write_text(template)
    elif place == "json":
        (folder / "chat_template.json").write_text(msgspec.json.encode({"chat_template": template}).decode())
    elif place == "text":
        override = template
    elif place == "file":
        override = str(tmp_path / "own.jinja")
        (tmp_path / "own.jinja").write_text(template)
    tiny = model(folder, chat_template=override)
    ids = await service.encode_chat(tiny, packed([{"role": "user", "content": "hi"}]), {})
    assert decode(await service.table(tiny), ids) == "<b>|hi"


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "chat template"),
        ("{{ messages[7].content.x.y }}", "chat template"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "CPU time"),
        ("{% for a in range(99999) %}{{ 'x' * 100000 }}{% endfor %}", "characters"),
        ("{{ 'x' * 99999999999 }}", "memory"),
        ("{{ 1 + 'a' }}", "TypeError"),
    ],
)
async def test_what_a_template_does_wrong_is_told(service, tmp_path, template, says):
    tiny = model(checkpoint(tmp_path / "m", byte_level(), chat_template=template))
    with pytest.raises(BadRequest, match=says) as error:
        await service.encode_chat(tiny, packed(MESSAGES), {})
    assert (error.value.status, error.value.param) == (400, "messages")


async def test_a_runaway_template_costs_only_its_own_request(service, tmp_path):
    evil = model(checkpoint(tmp_path / "evil", byte_level(), chat_template="{{ 9 ** 99999999 }}"))
    good = model(checkpoint(tmp_path / "good", byte_level(), chat_template=CHATML))
    slow = asyncio.create_task(service.encode_chat(evil, packed(MESSAGES), {}))
    await asyncio.sleep(0.2)
    assert len(await service.encode_chat(good, packed(MESSAGES), {})) > 3
    assert not slow.done()
    with pytest.raises(BadRequest, match="CPU time"):
        await slow


async def test_no_template_points_to_completions(service, tmp_path):
    tiny = model(checkpoint(tmp_path / "m", byte_level()))
    with pytest.raises(BadRequest, match="/v1/completions") as error:
        await service.encode_chat(tiny, packed(MESSAGES), {})
    assert error.value.code == "no_chat_template"


async def test_a_chat_without_any_tokenizer_says_so(service, tmp_path):
    folder = checkpoint(tmp_path / "m", byte_level())
    (folder / "tokenizer.json").unlink()
    with pytest.raises(BadRequest, match=r"has no tokenizer\.json in .*m: copy it there") as error:
        await service.encode_chat(model(folder), packed(MESSAGES), {})
    assert error.value.code == "unsupported_tokenizer"


@pytest.mark.parametrize("content", [None, "", "{", '{"model": {"type": "BPE", "vocab": 3}}'])
async def test_a_missing_or_broken_tokenizer_names_its_file(service, tmp_path, content):
    folder = tmp_path / "m"
    folder.mkdir()
    if content is not None:
        (folder / "tokenizer.json").write_text(content)
    for call in (service.encode(model(folder), "x"), service.table(model(folder))):
        with pytest.raises(BadRequest, match=r"m/tokenizer\.json") as error:
            await call
        assert error.value.code == "unsupported_tokenizer"


async def test_a_developer_speaks_as_system_where_the_template_knows_no_developer(service, tmp_path):
    tiny = model(checkpoint(tmp_path / "m", byte_level(), chat_template="{{ messages[0].role }}"))
    ids = await service.encode_chat(tiny, packed([{"role": "developer", "content": "x"}]), {})
    assert decode(await service.table(tiny), ids) == "system"
    knows = "{% if messages[0].role == 'developer' %}D{% endif %}"
    ids = await service.encode_chat(model(tmp_path / "m", chat_template=knows), packed([{"role": "developer", "content": "x"}]), {})
    assert decode(await service.table(tiny), ids) == "D"


async def test_templates_written_for_transformers_render(service, tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | trim }}{% endgeneration %}"
        "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ enable_thinking }}{{ {'a': '<é>'} | tojson }}"
    )
    tiny = model(checkpoint(tmp_path / "m", byte_level(), chat_template=template))
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    ids = await service.encode_chat(tiny, packed(messages), {"kwargs": packed({"enable_thinking": False})})
    assert decode(await service.table(tiny), ids) == 'hi{"x": 1}4False{"a": "<é>"}'


async def test_what_goes_wrong_ahead_of_requests_is_logged(service, tmp_path, monkeypatch, caplog):
    """Nobody waits for it, so nobody else would hear of a bug there."""

    async def build(model):
        raise RecursionError("too deep")

    monkeypatch.setattr(service, "_build", build)
    service.open_ahead(model(checkpoint(tmp_path / "m", byte_level())))
    (task,) = service._ahead
    await asyncio.wait([task])
    await asyncio.sleep(0)
    assert "opening the tokenizer of m ahead failed" in caplog.text
    assert "RecursionError: too deep" in caplog.text


async def test_a_model_with_another_text_id_has_its_files_read_anew(service, tmp_path):
    before, after = "old {{ messages[0].content }}", "new <think></think> {{ messages[0].content }}"
    folder = checkpoint(tmp_path / "m", byte_level(), chat_template=before)
    tiny = model(folder, text_id="1")
    message = packed([{"role": "user", "content": "hi"}])
    table = await service.table(tiny)
    assert decode(table, await service.encode_chat(tiny, message, {})) == "old hi"
    facts = await service.facts(tiny)
    checkpoint(folder, byte_level(300), chat_template=after)
    assert await service.table(tiny) is table, "a request that began before the change goes on with the same files"
    changed = replace(tiny, text_id="2")
    assert decode(await service.table(changed), await service.encode_chat(changed, message, {})) == "new <think></think> hi"
    assert (await service.facts(changed)).reasoning_parser != facts.reasoning_parser
    assert [worker.model for worker in service._helper.workers.values()] == ["m"], "no worker keeps the earlier files"


async def test_only_a_few_tokenizers_stay(tmp_path):
    service = TextService(LongTasks(), max_workers=2)
    try:
        for at in range(5):
            await service.encode(model(checkpoint(tmp_path / f"m{at}", byte_level())), "x")
        workers = psutil.Process(service._helper.pid)
        async with asyncio.timeout(10):
            while len(workers.children()) > 2:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
    finally:
        await service.close()


async def test_the_helper_ignores_the_daemons_signals_and_ends_with_it(tmp_path):
    service = TextService(LongTasks())
    await service.encode(model(checkpoint(tmp_path / "m", byte_level())), "x")
    helper = psutil.Process(service._helper.pid)
    family = [helper, *helper.children()]
    assert os.getpgid(helper.pid) != os.getpgid(0)
    for process in family:
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
    await asyncio.sleep(0.1)
    assert all(process.is_running() for process in family)
    await service.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 10)
    assert not alive


def helper_and_children(service):
    if not service._helper.pid:
        return []
    helper = psutil.Process(service._helper.pid)
    return [helper, *helper.children()]


async def test_closing_waits_for_no_job(tmp_path):
    service = TextService(LongTasks())
    spin = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    evil = model(checkpoint(tmp_path / "evil", byte_level(), chat_template=spin))
    asking = asyncio.create_task(service.encode_chat(evil, packed(MESSAGES), {}))
    async with asyncio.timeout(30):
        while len(family := helper_and_children(service)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    await service.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, family, 30)  # the job takes hours
    assert not alive
    with pytest.raises(HearthError):
        await asyncio.wait_for(asking, 30)
    with pytest.raises(HearthError):
        await service.encode(evil, "x")


async def test_large_bodies_are_parsed_in_the_helper(service):
    body = msgspec.json.encode({"model": "m", "prompt": list(range(1000)) * 100, "stop": ["x"]})
    head, prompt = await service.parse_body("daemon.api.bodies.completions:parse", body)
    assert msgspec.msgpack.decode(head)[0] == "m"
    assert [len(each) for each in msgspec.msgpack.decode(prompt)] == [400_000]
    with pytest.raises(BadRequest) as error:
        await service.parse_body("daemon.api.bodies.completions:parse", b'{"prompt": [1, -2]}')
    assert error.value.param == "prompt[1]"


def big_tokenizer() -> Tokenizer:
    """128k entries, as Llama 3 has: two-character merges of a large alphabet."""
    tokenizer = byte_fallback()
    data = msgspec.json.decode(tokenizer.to_str())
    vocab = data["model"]["vocab"]
    letters = [chr(0x4E00 + at) for at in range(400)]
    for letter in letters:
        vocab[letter] = len(vocab)
    merges = []
    for first in letters:
        for second in letters[:320]:
            vocab[first + second] = len(vocab)
            merges.append([first, second])
    taken = {each["content"]: each for each in data["added_tokens"]}
    for each in taken.values():
        if each["id"] > 275:
            each["id"] = len(vocab) + each["id"]
    data["model"]["merges"] += merges
    return Tokenizer.from_str(msgspec.json.encode(data).decode())


async def test_the_loop_is_never_held_while_a_large_vocabulary_and_a_long_prompt_arrive(service, tmp_path):
    """The bar is 5 ms; what is asserted allows for this machine's other work: the process's own CPU time between two turns."""
    big = model(checkpoint(tmp_path / "big", big_tokenizer(), chat_template=CHATML), vocab_size=130_000)
    small = model(checkpoint(tmp_path / "small", byte_level()))
    await service.encode(small, "x")
    long = "The fox 丁七 jumps over it. " * 36_000
    longest_s, waits = 0.0, []
    done = False

    async def watch() -> None:
        nonlocal longest_s
        before = time.thread_time()
        while not done:
            await asyncio.sleep(0.0005)
            now = time.thread_time()
            longest_s = max(longest_s, now - before)
            before = now

    async def others() -> None:
        while not done:
            start = time.perf_counter()
            await service.encode(small, "The fox")
            waits.append(time.perf_counter() - start)
            await asyncio.sleep(0.01)

    watching, asking = asyncio.create_task(watch()), asyncio.create_task(others())
    table, ids = await asyncio.gather(service.table(big), service.encode_chat(big, packed([{"role": "user", "content": long}]), {}))
    done = True
    await asyncio.gather(watching, asking)
    assert len(ids) > 100_000
    assert table.num_tokens > 128_000
    assert longest_s < 0.02
    assert max(waits) < 5
    print(f"longest turn {longest_s * 1e3:.1f} ms; other model's longest wait {max(waits) * 1e3:.0f} ms", file=sys.stderr)
