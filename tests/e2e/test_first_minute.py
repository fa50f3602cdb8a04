"""A daemon some of whose kernels were never compiled: it serves at once, tells how long it will be slower, and then is not, by
itself."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node
from tests.kernel_cache import CACHE_DIR, warm

# One unit takes two seconds of compiling. All that a model needs would take a minute, most of it alike.
MISSING = ("linear._few_rows_linear",)
COMPILED_S = 600.0 * float(os.environ.get("HEARTHD_TESTS_SLOWER", "1"))  # half a minute on two quiet cores


def cache_with_gaps(folder: Path) -> Path:
    """Returns a copy of the tests' kernels without the missing ones."""
    warm()
    shutil.copytree(CACHE_DIR, folder)
    removed = [path for path in folder.rglob("*") if path.name.startswith(MISSING)]
    assert len(removed) >= 2 * len(MISSING)
    for path in removed:
        path.unlink()
    return folder


def compiling(pid: int) -> list[int]:
    found = []
    for one in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has just ended
            found += [one.pid] if "engine.warm" in one.cmdline() else []
    return found


def telling(node: Node) -> dict[str, Any] | None:
    """Returns the status of the device once it tells of compilers; it does not where they have begun a moment ago."""
    (device,) = node.json("status")["devices"]
    return device if device["kernels"] is not None else None


@pytest.mark.timeout(2 * COMPILED_S)
def test_models_are_served_while_kernels_are_compiled_by_other_processes(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "a")
    flags = ["--cache-dir", str(cache_with_gaps(tmp_path / "cache"))]
    with Node(tmp_path, runner="torch", flags=flags) as node:
        assert node.process is not None
        before = Stream(node, "a", "hello", 12).join()
        assert (before.error, before.finish_reason) == ("", "length")
        device = node.wait_for(lambda: telling(node), "the compilers to be told of")
        told = device["kernels"]
        assert (told["kind"], device["problem"]) == ("float32", "")
        assert 0 <= told["done"] < told["total"]
        assert compiling(node.process.pid)
        sentence = "cpu:0: kernels for float32 are being compiled ("
        for command in (("status",), ("ps",), ("why", "a")):
            assert sentence in node.cli(*command).stdout
        assert "until then models are served by torch's operations" in node.log_text()

        until_s = time.monotonic() + COMPILED_S
        while node.json("status")["devices"][0]["kernels"] is not None:
            assert time.monotonic() < until_s, node.log_text()
            running = Stream(node, "a", "hello", 12).join()
            assert (running.error, running.text) == ("", before.text)
            time.sleep(1.0)  # the cores are wanted elsewhere
        after = Stream(node, "a", "hello", 12).join()
        assert (after.error, after.text) == ("", before.text)
        assert compiling(node.process.pid) == []
        assert "kernels for float32 are compiled and in use" in node.log_text()
        events = [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]
        states = [event["state"] for event in events if event["event"] == "kernels"]
        assert states == ["compiling", "in use"]
        assert sentence not in node.cli("status").stdout
        engine = node.engine_pids()
    with Node(tmp_path, runner="torch", flags=flags) as node:
        assert node.engine_pids() != engine
        assert Stream(node, "a", "hello", 12).join().text == before.text
        assert node.json("status")["devices"][0]["kernels"] is None
        assert node.log_text().count("are being compiled by") == 1  # by the first daemon; the log is one
