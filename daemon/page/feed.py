"""Sends snapshots of the node to all open status pages. They are made only while there is a viewer, and once for all viewers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec

from daemon.errors import NotNow
from daemon.page import document
from daemon.record.event_ring import EventRing

log = logging.getLogger("hearthd.page")
PERIOD_S = 0.5
SHARE = 0.02  # of the event loop's time at most: snapshots of a node with thousands of models are less frequent
ALIVE_S = 5.0  # an unchanged snapshot is sent again after this, to show that the connection still works
NUM_EVENTS = 400  # the most that a new viewer is sent
SAMPLE_S = 1.0
NUM_SAMPLES = 300
NUM_VIEWERS = 64
BEHIND = 16  # unread frames a viewer may have; one that reads slower is cut off and has to start again

_json = msgspec.json.encode


def frame(event: str, value: Any) -> bytes:
    """Returns the bytes of one server-sent event. event: its type. value: its data, which is encoded as JSON without line
    breaks."""
    return b"event: %b\ndata: %b\n\n" % (event.encode(), _json(value))


class Viewer:
    """One open status page, with the frames that wait to be written to it; the frame None ends the feed. cut_off: closes the page's
    connection; called if too many frames wait because the page does not read them."""

    def __init__(self, cut_off: Callable[[], None]) -> None:
        self.frames: asyncio.Queue[bytes | None] = asyncio.Queue(BEHIND)
        self._cut_off = cut_off

    def offer(self, data: bytes | None) -> None:
        try:
            self.frames.put_nowait(data)
        except asyncio.QueueFull:
            self._cut_off()


class PageFeed:
    """Sends frames (server-sent events) to the viewers, which are the open status pages. A viewer gets one frame `hello` {page,
    now, events, samples}, then frames `snapshot`, and `bye` when the daemon stops. A snapshot has the time, the events since the
    last one, and the fields of daemon/operate/page_snapshot.py."""

    def __init__(self, snapshot: Callable[[], dict[str, Any]], ring: EventRing) -> None:
        self._snapshot, self._ring = snapshot, ring
        self._viewers: set[Viewer] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._unfollow: Callable[[], None] | None = None
        self._events: deque[dict[str, Any]] = deque(maxlen=NUM_EVENTS)  # already sent to all viewers
        self._news: list[dict[str, Any]] = []
        self._samples: deque[tuple[float, int, int, int]] = deque(maxlen=NUM_SAMPLES)  # time, requests ended, tokens, open
        self._told: dict[str, Any] = {}
        self._told_s = 0.0
        self._frame = self._hello = b""
        self._closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def running(self) -> bool:
        """Returns whether the feed is making snapshots now. It does so only while there is a viewer."""
        return self._timer is not None or self._unfollow is not None

    def join(self, cut_off: Callable[[], None]) -> Viewer:
        """Adds a viewer and returns it, with its first frames already queued. cut_off: closes the viewer's connection; called if
        the viewer does not read. Raises NotNow if the daemon is stopping or there are too many viewers."""
        if self._closed:
            raise NotNow("server_restarting", "The server is stopping.", retry_after_s=2.0)
        if len(self._viewers) >= NUM_VIEWERS:
            raise NotNow("too_many_viewers", f"{NUM_VIEWERS} status pages are open already.", retry_after_s=5.0)
        if not self._viewers:
            self._start()
        self._hello = self._hello or frame(
            "hello",
            {"page": document.ID, "now": round(time.time(), 3), "events": list(self._events), "samples": list(self._samples)},
        )
        viewer = Viewer(cut_off)
        viewer.offer(self._hello + self._frame)
        self._viewers.add(viewer)
        return viewer

    def leave(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            self._rest()

    def close(self) -> None:
        """Sends all viewers `bye` and ends their feeds, because the daemon stops. Further viewers are refused."""
        self._closed = True
        for viewer in list(self._viewers):
            viewer.offer(frame("bye", {}))
            viewer.offer(None)
        self._rest()

    def _start(self) -> None:
        self._events.clear()
        self._events.extend(self._ring.history()[-NUM_EVENTS:])
        self._unfollow = self._ring.follow(self._on_event)
        try:
            self._tick()
        except Exception:
            self._rest()
            raise

    def _rest(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unfollow is not None:
            self._unfollow()
            self._unfollow = None
        self._news.clear()
        self._told, self._hello, self._frame = {}, b"", b""

    def _on_event(self, event: dict[str, Any]) -> None:
        # progress is in the snapshot's rows; of more news than can be shown, the oldest is dropped
        if event["event"] != "load_progress":
            self._news.append(event)
            if len(self._news) > NUM_EVENTS:
                del self._news[0]

    def _on_timer(self) -> None:
        try:
            self._tick()
        except Exception:
            log.exception("the status page's snapshot failed")
            for viewer in list(self._viewers):
                viewer.offer(None)
            self._rest()

    def _tick(self) -> None:
        started_s = time.perf_counter()
        state, now = self._snapshot(), time.time()
        if state != self._told or self._news or started_s - self._told_s >= ALIVE_S:
            self._told, self._told_s = state, started_s
            self._frame = frame("snapshot", {"time": round(now, 3), "events": [], **state})
            # viewers that join later get the news in the hello frame
            data = frame("snapshot", {"time": round(now, 3), "events": self._news, **state}) if self._news else self._frame
            self._events.extend(self._news)
            self._news.clear()
            self._sample(now, state["counters"])
            self._hello = b""
            for viewer in list(self._viewers):
                viewer.offer(data)
        delay_s = max(PERIOD_S, (time.perf_counter() - started_s) / SHARE)
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_timer)

    def _sample(self, now: float, counters: dict[str, int]) -> None:
        if not self._samples or now - self._samples[-1][0] >= SAMPLE_S:
            self._samples.append((round(now, 3), counters["requests"], counters["tokens"], counters["open"]))
