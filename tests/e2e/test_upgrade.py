"""An upgrade, and the way back, under 50 streams: nobody notices, and no weights are read again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.versions import all_versions
from tests.daemon.service_manager import NotifySocket
from tests.e2e.raw_stream import RawStream
from tests.e2e.test_host_tier import loads
from tests.e2e.test_streams_over_restart import RESTART, handed_over, started, told

NUM = 50
BODY: dict[str, Any] = {"model": "ash", "prompt": "once upon a time", "max_tokens": 250, "ignore_eos": True, "stream": True}


def test_fifty_streams_over_an_upgrade_and_back(tmp_path: Path, notify: NotifySocket) -> None:
    """The other version says another number of each format, and writes a field more."""
    own, other, _ = all_versions(tmp_path / "versions")
    options: dict[str, Any] = {"devices": ["cpu:0=128MiB"], "null_step_ms": 20.0, "flags": ["--host-tier-bytes", "64MiB"]}
    with started(tmp_path, notify, 12 << 20, **options) as node:
        bodies = [{**BODY, "seed": at % 5} for at in range(NUM)]
        alone = [RawStream(node, "/v1/completions", body) for body in bodies[:5]]
        expected = [told(stream.join().events) for stream in alone]
        node.wait_for(lambda: node.ps()[0]["state"] == "ready", "the model is there")
        running = [RawStream(node, "/v1/completions", body) for body in bodies]
        for version in (other, own):
            before = [len(stream.events) for stream in running]
            for stream, num in zip(running, before, strict=True):
                stream.wait_for_events(num + 5)
            node.tree = version.tree
            node.restart(RESTART)
            assert node.json("status")["version"] == version.name
            node.wait_for(lambda: loads(node), "the model is there again")
            assert [event["bytes_read"] for event in loads(node)] == [0]
        assert handed_over(node)[0] == NUM, "some had ended before the upgrade"
        for at, stream in enumerate(running):
            assert told(stream.join().events) == expected[at % 5], at
        assert "are lost" not in node.log_text()
        assert "Traceback" not in node.log_text()
