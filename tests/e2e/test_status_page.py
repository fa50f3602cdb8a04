"""The status page as a browser shows it, against a real daemon with two devices."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from daemon.access import keys
from tests.e2e import browser
from tests.e2e.browser import Browser, Page
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

MIB = 1 << 20
EVIL = "<script>document.title='owned'</script>"  # two folders: the name is their path
EVIL_IMAGE = "<img src=x onerror=document.title='owned'>"
DEVICES = ("cpu=64MiB", "cpu:1=64MiB")
# as if the node had sent another snapshot, in which one model has something more
ONE_MORE = """((changes, seconds) => {
  const models = last.models.map((each) => each.name === "org/one" ? { ...each, ...changes } : each), told = last;
  onSnapshot({ ...last, models, time: last.time + seconds, events: [] });
  last = told;
  return [...document.querySelectorAll('#models tr')].find((row) => row.textContent.startsWith("org/one"));
})"""
needs_browser = pytest.mark.skipif(browser.find() is None, reason="no Chromium here (Debian: apt-get install chromium)")


def row(name: str) -> str:
    """The row of a model, as JavaScript."""
    is_it = f"row.querySelector('.name').textContent.startsWith({json.dumps(name)})"
    return f"[...document.querySelectorAll('#models tr')].find((row) => {is_it})"


def state(name: str) -> str:
    return f"{row(name)}?.querySelector('.state').textContent"


@pytest_asyncio.fixture
async def chromium(tmp_path: Path) -> AsyncIterator[Browser]:
    async with Browser(tmp_path / "profile") as running:
        yield running


async def hearth(node: Node, *words: str) -> None:
    result = await asyncio.to_thread(node.cli, *words)
    assert result.returncode == 0, result.stderr


def first_snapshot(node: Node) -> dict[str, Any]:
    with urllib.request.urlopen(node.url + "/status/events", timeout=30) as stream:
        for line in stream:
            if line.startswith(b"data: ") and b'"devices"' in line:
                found: dict[str, Any] = json.loads(line[6:])
                return found
    raise AssertionError("no snapshot")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    made = Node(tmp_path_factory.mktemp("page"), devices=DEVICES)
    for name, num_bytes in (("org/one", 8 * MIB), (EVIL, 8 * MIB), (EVIL_IMAGE, 96 * MIB)):
        make_model(made.models / name, weights_bytes=num_bytes)
    with made:
        yield made


@needs_browser
async def test_it_follows_the_node_without_a_reload(node: Node, chromium: Browser) -> None:
    page = await chromium.open(node.url)
    await page.wait_for(f"{state('org/one')} === 'cold'")
    await page.evaluate("window.same = true")
    await hearth(node, "load", "org/one")
    await page.wait_for(f"{state('org/one')} === 'ready'")
    await page.wait_for(f"{row('org/one')}.textContent.includes('cpu:')")
    await page.wait_for("document.querySelector('#devices .legend').textContent.includes('org/one')")
    await page.wait_for("document.querySelector('#timeline .bar.ready') !== null")
    await page.wait_for("document.querySelector('#events').textContent.includes('loading → ready')")
    await page.wait_for("/(load|cli)-\\d/.test(document.querySelector('#events code').textContent)")
    await hearth(node, "unload", "org/one")
    await page.wait_for(f"{state('org/one')} === 'cold'")

    await hearth(node, "load", EVIL)
    await page.wait_for(f"{state(EVIL)} === 'ready'")
    assert await page.evaluate(f"{state(EVIL_IMAGE)}") == "refused"
    assert await page.evaluate("document.querySelectorAll('main script, main img').length") == 0
    assert await page.evaluate("document.title") == "hearthd"
    assert await page.evaluate("window.same") is True

    model = {"num_adapters": 3, "adapters": {"me/red": MIB, "blue": MIB // 2}, "drafted_tokens": 100, "accepted_tokens": 50}
    later = model | {"drafted_tokens": 200, "accepted_tokens": 121}
    shown = [
        await page.evaluate(f"{ONE_MORE}({json.dumps(changes)}, {seconds}).textContent")
        for changes, seconds in ((model, 1), (later, 2), (later | {"adapters": {}}, 30), ({}, 31))
    ]
    assert "2 of 3 adapters in memory, 1.5 MiB: blue, me/red" in shown[0]
    assert "drafted" not in shown[0]
    assert "71 % of drafted tokens accepted" in shown[1]
    assert "3 adapters, none in memory" in shown[2]
    assert "takes no new requests" in await page.evaluate(f"{ONE_MORE}({{drained: true}}, 32).textContent")
    assert "takes no new requests" not in shown[3]
    assert not any(word in shown[at] for at, word in ((2, "drafted"), (3, "drafted"), (3, "adapter")))

    with node.openai() as client:
        create = client.completions.create
        await asyncio.to_thread(create, model="org/one", prompt="x", max_tokens=200, extra_body={"ignore_eos": True})
    await page.wait_for("samples.at(-1)[2] >= 200 && samples.at(-1)[1] >= 1")
    await page.wait_for("document.querySelector('#tokens-line polyline') !== null")

    os.kill(node.engine_pids()[0], signal.SIGKILL)
    await page.wait_for("document.querySelector('#events').textContent.includes('SIGKILL')")
    await page.wait_for("document.querySelector('#devices').textContent.includes('1 restart')")
    assert {url.removeprefix(node.url) for url in page.requests if not url.startswith("data:")} == {"/", "/status/events"}
    assert page.problems == []
    for width in (360, 768, 1280):
        await page.look(width)
        assert await page.evaluate("document.documentElement.scrollWidth") <= width


@needs_browser
async def test_a_split_model_is_on_both_devices_and_one_row(tmp_path: Path, chromium: Browser) -> None:
    """Before it is loaded, while it answers, and when one of its devices has failed."""
    node = Node(tmp_path / "node", devices=DEVICES, null_step_ms=5, config='[models."org/pair"]\nparallel = { tensor = 2 }\n')
    make_model(node.models / "org" / "pair", weights_bytes=8 * MIB)
    with node:
        page = await chromium.open(node.url)
        await page.wait_for(f"{state('org/pair')} === 'cold'")
        device = f"{row('org/pair')}.querySelector('[data-label=Device]').textContent"
        assert await page.evaluate(device) == "2 devices"
        stream = Stream(node, "org/pair", "hello", 1500)
        await page.wait_for(f"{state('org/pair')} === 'ready' && {row('org/pair')}.textContent.includes('KiB')")
        assert await page.evaluate(device) == "cpu:0+cpu:1"
        assert await page.evaluate("document.querySelectorAll('#models tr').length") == 1
        legends = "[...document.querySelectorAll('#devices .legend')].map((each) => each.firstChild.textContent)"
        await page.wait_for(f"{legends}.every((text) => /^org.pairweights .*KV in use .*KV reserved /.test(text))")
        first, second = await page.evaluate(legends)
        assert first == second
        lanes = "[...document.querySelectorAll('#timeline .card')].map((each) => each.querySelectorAll('.lane').length)"
        await page.wait_for(f"{lanes}.join() === '1,1'")
        arrows = "[...document.querySelectorAll('#events li')].filter((each) => each.textContent.includes('loading → ready'))"
        (text,) = await page.evaluate(f"{arrows}.map((each) => each.querySelector('span').textContent)")
        assert text.startswith("loading → ready on cpu:0+cpu:1: ")

        os.kill(await page.evaluate("last.devices[1].pid"), signal.SIGKILL)
        await page.wait_for(f"{arrows}.length === 2 && {state('org/pair')} === 'ready'")
        begun = "events.find((event) => event.event === 'state' && event.new === 'loading').time"
        spans = "[...spansOf(last, 60).values()].map((lane) => [...lane.get('org/pair')])"
        for bars in await page.evaluate(spans):
            assert [bar["kind"] for bar in bars if bar["kind"] != "draining"] == ["loading", "ready", "loading", "ready"]
            assert min(bar["from"] for bar in bars) == await page.evaluate(begun), "no bar begins before the model was there"
        await asyncio.to_thread(stream.hang_up)
        assert stream.error == ""
        assert page.problems == []


def test_the_snapshot_adds_up(node: Node) -> None:
    node.wait_for(node.has_all_engines, "the engine that was killed")
    for name in ("org/one", EVIL):
        node.cli("unload", name)
    node.json("load", "org/one")
    told = node.wait_for(lambda: (found := first_snapshot(node))["states"].get("ready") and found, "ready")
    assert set(told) == {"time", "events", "node", "counters", "host_tier", "devices", "models", "states"}
    assert told["states"] == {"ready": 1, "cold": 1, "refused": 1}
    assert told["node"]["ready"]
    assert set(told["counters"]) == {"requests", "tokens", "open", "queued"}
    for device in told["devices"]:
        assert sum(part["bytes"] for part in device["parts"]) == device["budget_bytes"] == 64 * MIB
        assert {part["kind"] for part in device["parts"]} <= {"work", "weights", "kv", "cache", "reserved", "free"}
    rows = {each["name"]: each for each in told["models"]}
    weights = [part for device in told["devices"] for part in device["parts"] if part["kind"] == "weights"]
    assert weights == [{"kind": "weights", "model": "org/one", "bytes": rows["org/one"]["weights_bytes"]}]
    assert "too little" in rows[EVIL_IMAGE]["reason"]
    assert told["host_tier"]["bytes"] == told["host_tier"]["free_bytes"] == 0, "a node on the CPU has none unless it is told"


@needs_browser
async def test_it_says_that_the_daemon_is_gone_and_finds_it_again(tmp_path: Path, chromium: Browser) -> None:
    node = Node(tmp_path / "node", devices=("cpu=64MiB",))
    make_model(node.models / "one")
    with node:
        page = await chromium.open(node.url)
        await page.wait_for("document.querySelector('#link').textContent === 'live'")
        port = node.url.rpartition(":")[2]
        await asyncio.to_thread(node.stop)
        await page.wait_for("!document.querySelector('#notice').hidden && document.querySelector('#link').textContent === 'gone'")
        assert "What you see is from" in await page.evaluate("document.querySelector('#notice').textContent")
        node.flags += ["--listen", f"127.0.0.1:{port}"]
        await asyncio.to_thread(node.start)
        await page.wait_for("document.querySelector('#notice').hidden && document.querySelector('#link').textContent === 'live'")


@needs_browser
async def test_with_keys_it_asks_for_one(tmp_path: Path, chromium: Browser) -> None:
    listed = tmp_path / "keys.toml"
    listed.write_text(f'[tenants.boss]\nkeys = ["{keys.hash_key("the-key")}"]\n')
    node = Node(tmp_path / "node", devices=("cpu=64MiB",), flags=["--keys-file", str(listed)])
    make_model(node.models / "one")
    with node:
        page = await chromium.open(node.url)
        await page.wait_for("!document.querySelector('#login').hidden")
        assert await page.evaluate("document.querySelector('#main').hidden")
        await enter(page, "not-the-key")
        await page.wait_for("document.querySelector('#login-why').textContent.includes('not known')")
        await enter(page, "the-key")
        await page.wait_for(f"{state('one')} === 'cold' && document.querySelector('#login').hidden")
        await page.evaluate("window.same = true")
        await page.call("Page.reload")
        await page.wait_for(f"!window.same && {state('one')} === 'cold'")  # the tab keeps it
        assert not [url for url in page.requests if "key" in url]
        await page.evaluate("document.querySelector('#forget').click()")
        await page.wait_for("!document.querySelector('#login').hidden && sessionStorage.length === 0")


async def enter(page: Page, key: str) -> None:
    await page.evaluate(f"document.querySelector('#key').value = {json.dumps(key)}")
    await page.evaluate("document.querySelector('#login').requestSubmit()")
