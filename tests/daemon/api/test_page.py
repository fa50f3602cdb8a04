"""The status page over a real server with a made-up node behind it: who gets it, what it allows, what the feed costs and tells."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web

from daemon.access import keys
from daemon.access.admission import Access
from daemon.api import router
from daemon.api.app import make_app, make_runner
from daemon.api.endpoints.page import PAGE, PAGE_EVENTS
from daemon.contracts import Guarded
from daemon.page import document, feed
from daemon.page.feed import PageFeed
from daemon.record.event_ring import EventRing
from tests.daemon.api.fakes import FakeHealth, FakeModels, FakeRequests, FakeText, Settings, entry


class FakeNode:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.num_asked, self.state, self.broken = 0, "cold", False
        self.ring = EventRing()
        self.feed = PageFeed(self.snapshot, self.ring)

    def snapshot(self) -> dict[str, Any]:
        self.num_asked += 1
        if self.broken:
            raise RuntimeError("on purpose")
        return {"counters": {"requests": 1, "tokens": 2, "open": 0}, "models": [{"name": "a\nb</script>", "state": self.state}]}


@asynccontextmanager
async def serve(
    node: FakeNode | None,
    access: Access | None = None,
    serves: Callable[[Guarded], bool] = lambda endpoint: True,
) -> AsyncIterator[str]:
    health, models = FakeHealth(), FakeModels(entry())
    app = make_app(FakeRequests(), models, FakeText(), Settings(), health, access, serves, node and node.feed)
    runner = make_runner(app, shutdown_timeout_s=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def events(http: ClientSession, number: int, **options: Any) -> AsyncIterator[tuple[str, dict[str, Any]]]:
    """The first `number` of the feed; asserts the grammar: one event line, one data line, one empty line."""
    async with http.get("/status/events", **options) as answer:
        assert answer.status == 200
        assert answer.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["Cache-Control"] == "no-store"
        for _ in range(number):
            lines = [await answer.content.readline() for _ in range(3)]
            assert re.fullmatch(rb"event: (hello|snapshot|bye)\n", lines[0])
            assert lines[1].startswith(b"data: {")
            assert lines[2] == b"\n"
            yield lines[0][7:-1].decode(), json.loads(lines[1][6:])


async def test_the_page_allows_nothing_but_itself() -> None:
    async with serve(FakeNode()) as url, ClientSession(url) as http:
        for path in ("/", "/status", "/status/"):
            async with http.get(path) as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
                text, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        async with http.get("/", headers={"If-None-Match": answer.headers["ETag"]}) as same:
            assert same.status == 304
        async with http.head("/") as head:
            assert (head.status, await head.read()) == (200, b"")
        async with http.post("/") as posted:
            assert posted.status == 405
    rules = dict(rule.partition(" ")[::2] for rule in policy.split("; "))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == rules["frame-ancestors"] == "'none'"
    assert (rules["connect-src"], rules["img-src"]) == ("'self'", "data:")
    assert "unsafe" not in policy
    for element in ("script", "style"):
        (content,) = re.findall(rf"<{element}>(.*?)</{element}>", text, re.DOTALL)
        assert rules[f"{element}-src"] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    links = re.findall(r"""(?:src|href|url\()\s*=?\s*["'(]?([^"' )>]+)""", text)
    assert [link for link in links if not link.startswith("data:")] == []
    assert re.findall(r"https?://(?!www\.w3\.org/2000/svg)", text) == []
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\sstyle=|\son[a-z]+=", text)


def test_text_can_be_read_in_light_and_dark() -> None:
    """WCAG AA for small text: 4.5 to 1, each ink on each ground it is written on, and colours of models on their card."""
    blocks = re.findall(r":root \{(.*?)\}", document.BODY.decode(), re.DOTALL)
    assert len(blocks) == 2
    models = [f"c{number}" for number in range(8)]
    pairs = [*[("ink", ground) for ground in ("card", "bg")], *[("dim", ground) for ground in ("card", "bg", "calm-bg")]]
    pairs += [(kind, f"{kind}-bg") for kind in ("good", "bad", "busy")] + [("bad", "card"), ("accent", "card")]
    pairs += [("on", colour) for colour in models] + [(colour, "card") for colour in models]
    for block in blocks:
        colours = dict(re.findall(r"--([\w-]+): #(\w+)", block))
        for ink, ground in pairs:
            darker, lighter = sorted(_luminance(colours[name]) for name in (ink, ground))
            assert (lighter + 0.05) / (darker + 0.05) >= 4.5, (ink, ground)


def _luminance(colour: str) -> float:
    parts = [
        int(colour[at : at + len(colour) // 3] * (6 // len(colour)), 16) / 255 for at in range(0, len(colour), len(colour) // 3)
    ]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


async def test_snapshots_come_while_somebody_looks_and_only_then() -> None:
    node = FakeNode()
    async with serve(node) as url, ClientSession(url) as http:
        async with http.get("/"):
            pass
        assert (node.num_asked, node.feed.running) == (0, False)
        node.ring.add("registered", model="m", text="before")
        told = events(http, 3)
        kind, hello = await anext(told)
        assert (kind, hello["page"], [event["text"] for event in hello["events"]]) == ("hello", document.ID, ["before"])
        kind, first = await anext(told)
        assert (kind, first["events"], first["models"][0]["name"]) == ("snapshot", [], "a\nb</script>")
        assert first["counters"]["tokens"] == 2
        node.ring.add("load_progress", keep=False, model="m", bytes_done=1)
        node.ring.add("state", model="m", old="cold", new="loading")
        node.state = "loading"
        _, second = await anext(told)
        assert second["models"][0]["state"] == "loading"
        assert [event["event"] for event in second["events"]] == ["state"]
        assert node.feed.running
        await told.aclose()
        await _until(lambda: node.feed.num_viewers == 0)
        assert not node.feed.running
        asked = node.num_asked
        await asyncio.sleep(1.2 * feed.PERIOD_S)
        assert node.num_asked == asked


async def test_one_snapshot_serves_all_viewers_at_most_twice_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ALIVE_S", 600.0)  # the next snapshot is that of the change
    node = FakeNode()
    async with serve(node) as url, ClientSession(url) as http:
        started_s = asyncio.get_running_loop().time()
        viewers = [events(http, 3) for _ in range(10)]
        for viewer in viewers:
            assert (await anext(viewer))[0] == "hello"
            assert (await anext(viewer))[0] == "snapshot"
        node.state = "ready"
        told = [await anext(viewer) for viewer in viewers]
        spent_s = asyncio.get_running_loop().time() - started_s
        assert {json.dumps(snapshot) for _, snapshot in told} == {json.dumps(told[0][1])}
        assert node.num_asked <= 1 + spent_s / feed.PERIOD_S
        for viewer in viewers:
            await viewer.aclose()
        await _until(lambda: not node.feed.running)


async def test_an_unchanged_node_is_told_of_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that says a twentieth of a second more each time it is read, as it is twice for each snapshot that is made. The
    time in a snapshot is its number."""
    node, reads = FakeNode(), count()
    clock = SimpleNamespace(perf_counter=lambda: 0.05 * next(reads), time=lambda: float(node.num_asked))
    monkeypatch.setattr(feed, "time", clock)
    monkeypatch.setattr(feed, "SHARE", 1e9)
    monkeypatch.setattr(feed, "PERIOD_S", 0.02)
    monkeypatch.setattr(feed, "ALIVE_S", 0.35)
    async with serve(node) as url, ClientSession(url) as http:
        assert [told["time"] async for kind, told in events(http, 4) if kind == "snapshot"] == [1.0, 5.0, 9.0]


async def test_a_viewer_that_does_not_read_is_cut_off() -> None:
    """And one that is cut off costs nothing more."""
    node, cut = FakeNode(), []
    viewer = node.feed.join(lambda: cut.append(True))
    for _ in range(feed.BEHIND):
        viewer.offer(b"x")
    assert cut
    node.feed.leave(viewer)
    assert not node.feed.running


async def test_a_snapshot_that_fails_ends_the_streams_not_the_node() -> None:
    node = FakeNode()
    async with serve(node) as url, ClientSession(url) as http:
        async with http.get("/status/events") as answer:
            node.broken = True
            await answer.read()  # to its end
        assert not node.feed.running
        async with http.get("/status/events") as answer:
            assert answer.status == 500
        node.broken = False
        assert [kind async for kind, _ in events(http, 2)] == ["hello", "snapshot"]


async def test_the_end_is_told_and_nobody_comes_after() -> None:
    node = FakeNode()
    async with serve(node) as url, ClientSession(url) as http:
        told = events(http, 3)
        await anext(told)
        await anext(told)
        node.feed.close()
        assert (await anext(told))[0] == "bye"
        async with http.get("/status/events") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "server_restarting")


async def test_no_more_viewers_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "NUM_VIEWERS", 1)
    async with serve(FakeNode()) as url, ClientSession(url) as http:
        told = events(http, 2)
        await anext(told)
        async with http.get("/status/events") as answer:
            assert (answer.status, (await answer.json())["error"]["code"]) == (503, "too_many_viewers")
        await told.aclose()


async def test_with_keys_the_page_comes_empty_and_the_feed_asks(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[tenants.boss]\nkeys = ["{keys.hash_key("key-of-boss")}"]\nadmin = true\n'
        f'[tenants.some]\nkeys = ["{keys.hash_key("key-of-some")}"]\n'
    )
    node = FakeNode()
    async with serve(node, Access(keys.load(str(path)))) as url, ClientSession(url) as http:
        for page in ("/", "/status"):
            async with http.get(page) as answer:
                assert (answer.status, await answer.read()) == (200, document.BODY)
        for headers, expected in (({}, 401), (_bearer("wrong"), 401), (_bearer("key-of-some"), 403)):
            async with http.get("/status/events", headers=headers) as answer:
                assert answer.status == expected
        async with http.get("/status/events?key=key-of-boss") as answer:
            assert answer.status == 401
        assert node.num_asked == 0
        assert [kind async for kind, _ in events(http, 1, headers=_bearer("key-of-boss"))] == ["hello"]


async def test_an_admin_listener_takes_the_page_with_it() -> None:
    node = FakeNode()
    async with serve(node, serves=lambda endpoint: not endpoint.for_operators) as url, ClientSession(url) as http:
        for path in ("/", "/status", "/status/events"):
            async with http.get(path) as answer:
                assert answer.status == 404
                assert "another listener of this node serves it" in await answer.text()
    async with serve(node, serves=lambda endpoint: endpoint.for_operators or endpoint.open) as url, ClientSession(url) as http:
        async with http.get("/") as answer:
            assert answer.status == 200
        assert [kind async for kind, _ in events(http, 1)] == ["hello"]


async def test_another_sites_page_gets_nothing() -> None:
    node = FakeNode()
    async with serve(node) as url, ClientSession(url) as http:
        for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
            for path in ("/", "/status/events"):
                async with http.get(path, headers=headers) as answer:
                    assert answer.status == 403
        assert node.num_asked == 0


def test_paths() -> None:
    for path, endpoint in (("/", PAGE), ("/status", PAGE), ("/status/events", PAGE_EVENTS)):
        assert router.target(path) == router.Target(endpoint, None, None)
    for path in ("/m/org/tiny/", "/m/org/tiny/status", "/m/tiny/status/events", "/status/other"):
        assert router.target(path) is None


def _bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def _until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("not within 10 s")
