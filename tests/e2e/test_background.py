"""Responses in the background through real engines: they are taken up by id after a kill -9 of the daemon, and after a restart."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

from tests.daemon.service_manager import NotifySocket
from tests.e2e.node import without_drafts
from tests.e2e.raw_stream import Event, RawStream
from tests.e2e.test_streams_over_restart import RESTART, started

PROMPTS = [f"once upon a time there were {at} ships" for at in range(10)]


def asked(prompt: str, **options: Any) -> dict[str, Any]:
    """Returns a request whose reply has many tokens, so that it is not over before the daemon is killed."""
    body = {"model": "ash", "input": prompt, "max_output_tokens": 400, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, **options}


def text_of(events: list[Event]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def test_each_is_taken_up_by_its_id(tmp_path: Path, notify: NotifySocket) -> None:
    """In float32 with the texts of a daemon that lives, and no event is missing or comes twice."""
    flags = ["--dtype", "float32", "--threads", "1", "--load-deadline-s", "80", "--max-wait-s", "80"]
    options: dict[str, Any] = {"devices": ["cpu:0=96MiB"], "runner": "torch", "config": without_drafts("ash"), "flags": flags}
    with started(tmp_path, notify, 12 << 20, **options) as node:
        plain = [RawStream(node, "/v1/responses", asked(prompt)) for prompt in PROMPTS]
        expected = [text_of(stream.join().events) for stream in plain]
        print(sorted(len(stream.events) for stream in plain))
        assert len(set(expected)) == len(PROMPTS)
        running = [RawStream(node, "/v1/responses", asked(prompt, background=True)) for prompt in PROMPTS]
        seen: list[list[Event]] = [[] for _ in PROMPTS]
        ids = []
        for how in (signal.SIGKILL, RESTART):
            for stream in running:
                stream.wait_for_events(8)
            node.restart(how)
            for stream, events in zip(running, seen, strict=True):
                events += stream.join(may_break=True).events
            ids = [events[0]["response"]["id"] for events in seen]
            running = [
                RawStream(node, f"/v1/responses/{name}?stream=true&starting_after={len(events) - 1}")
                for name, events in zip(ids, seen, strict=True)
            ]
        for stream, events, text in zip(running, seen, expected, strict=True):
            rest = stream.join().events
            events += [event for event in rest if not events or event["sequence_number"] >= len(events)]
            assert [event["sequence_number"] for event in events] == list(range(len(events)))
            assert text_of(events) == text
            assert node.get(f"/v1/responses/{events[0]['response']['id']}") == (200, events[-1]["response"])
        went_on = [int(number) for number in re.findall("([0-9]+) responses in the background of before", node.log_text())]
        assert went_on[:1] == [len(PROMPTS)], "some had ended before the daemon was killed"
        assert "Traceback" not in node.log_text()
