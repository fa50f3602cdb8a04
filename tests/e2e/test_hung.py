"""Engines that hang: SIGSTOP stands for a kernel that never ends. Nothing is lost, and what only takes long is left alone."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

STALL_S = 10.0  # the smallest that is allowed
CONFIG = f"engine_stall_s = {STALL_S}\n"


def events(node: Node) -> list[dict[str, Any]]:
    return [json.loads(line) for line in node.cli("events", "--json").stdout.splitlines()]


def device(node: Node, name: str = "cpu:0") -> dict[str, Any]:
    found: dict[str, Any] = next(one for one in node.json("status")["devices"] if one["name"] == name)
    return found


def is_stopped(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_STOPPED


def test_fifty_streams_of_a_hung_engine_and_an_idle_one_go_on(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "a")
    config = CONFIG + '[models.a]\ndevices = ["cpu:0"]\n'
    with Node(tmp_path, devices=["cpu:0=64MiB", "cpu:1=64MiB"], null_step_ms=40, config=config) as node:
        expected = [stream.join().text for stream in [Stream(node, "a", f"{i}", 250, seed=i + 1) for i in range(5)]]
        assert all(expected)
        busy, idle = device(node, "cpu:0")["pid"], device(node, "cpu:1")["pid"]
        streams = [Stream(node, "a", f"{i % 5}", 250, seed=i % 5 + 1) for i in range(50)]
        for stream in streams:
            stream.wait_for_chunks(5)
        for pid in (busy, idle):
            os.kill(pid, signal.SIGSTOP)
        for at, stream in enumerate(streams):
            stream.join()
            assert (stream.error, stream.finish_reason) == ("", "length")
            assert stream.text == expected[at % 5]
        node.wait_for(lambda: device(node, "cpu:1")["pid"] not in (0, idle), "a new engine in place of the idle one")
        assert device(node)["pid"] not in (0, busy)
        node.wait_for(lambda: device(node)["problem"] == device(node, "cpu:1")["problem"] == "", "a node without problems")
        metrics = node.get("/metrics")[1]
        for name in ("cpu:0", "cpu:1"):
            assert f'hearth_engine_stalls_total{{device="{name}"}} 1.0' in metrics
            assert f'hearth_engine_restarts_total{{device="{name}"}} 1.0' in metrics
        hangs = {event["device"]: event["reason"] for event in events(node) if event["event"] == "engine_hangs"}
        assert hangs["cpu:1"].endswith(", idle")
        downs = {event["device"]: event for event in events(node) if event["event"] == "engine" and event["state"] == "down"}
        assert downs["cpu:0"]["reason"] == f"gave {hangs['cpu:0']}"
        assert downs["cpu:1"]["running"] == 0
        assert node.log_text().count("engine hangs: no sign of life for") == 2
        assert node.get("/healthz")[0] == 200


def test_an_engine_that_is_silent_is_shown_until_it_goes_on(tmp_path: Path) -> None:
    with Node(tmp_path) as node:
        (engine,) = node.engine_pids()
        os.kill(engine, signal.SIGSTOP)
        told = node.wait_for(lambda: device(node)["problem"], "a word of it")
        assert re.fullmatch(r"no sign of life for \d\d s, (idle|between two steps)", told)  # it stood still where it was
        assert node.get("/healthz")[0] == 200
        os.kill(engine, signal.SIGCONT)
        node.wait_for(lambda: not device(node)["problem"], "a node without problems")
        assert (device(node)["pid"], device(node)["restarts"]) == (engine, 0)


def test_a_probe_shows_a_hung_engine_long_before_it_is_killed(tmp_path: Path) -> None:
    with Node(tmp_path, devices=["cpu:0=64MiB", "cpu:1=64MiB"], runner="torch", config="engine_stall_s = 0\n") as node:
        both, (first, second) = {"cpu:0", "cpu:1"}, (device(node, "cpu:0")["pid"], device(node, "cpu:1")["pid"])
        code, told = node.get("/readyz?probe=30")
        assert (code, told["status"], told["reason"], told["probe_ms"].keys()) == (200, "ready", "", both)
        assert all(0 < milliseconds < 30e3 for milliseconds in told["probe_ms"].values())
        try:
            os.kill(first, signal.SIGSTOP)
            node.wait_for(lambda: node.get("/readyz?probe=0.5")[1]["probe_ms"]["cpu:0"] is None, "the answer of before being old")
            code, told = node.get("/readyz?probe=2")
            assert (code, told["probe_ms"]["cpu:0"]) == (200, None), "the other one serves"
            os.kill(second, signal.SIGSTOP)
            node.wait_for(lambda: node.get("/readyz?probe=0.5")[0] == 503, "no engine that answers")
            assert node.get("/readyz?probe=0.5")[1]["reason"] == "no engine answered a probe within 0.5 s: cpu:0, cpu:1"
            assert node.get("/readyz")[0] == 200
        finally:
            for pid in (first, second):
                os.kill(pid, signal.SIGCONT)
        node.wait_for(lambda: None not in node.get("/readyz?probe=10")[1]["probe_ms"].values(), "answers of both")
        os.kill(first, signal.SIGKILL)
        node.wait_for(lambda: device(node)["pid"] not in (0, first), "a new engine")
        node.wait_for(lambda: node.get("/readyz?probe=10")[1]["probe_ms"].keys() == both, "an answer of the new engine, too")


def test_a_step_that_takes_longer_than_the_limit_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    """The first of its size: how long it takes is not known yet."""
    make_model(tmp_path / "models" / "a")
    step_s = 2 * STALL_S  # the first look at an engine comes within 5 s, and judges it from there on
    with Node(tmp_path, null_step_ms=1e3 * step_s, config=CONFIG) as node:
        begun = time.monotonic()
        stream = Stream(node, "a", "slow", 1).join()
        assert (stream.error, stream.finish_reason) == ("", "length")
        assert time.monotonic() - begun >= step_s
        assert device(node)["restarts"] == 0
        assert "hangs" not in node.log_text()


def test_engines_that_stood_still_together_with_the_daemon_live_on(tmp_path: Path) -> None:
    """As in a suspended machine or a frozen control group: the daemon runs again first."""
    make_model(tmp_path / "models" / "a")
    with Node(tmp_path, null_step_ms=20, config=CONFIG) as node:
        expected = Stream(node, "a", "x", 300).join().text
        stream = Stream(node, "a", "x", 300)
        stream.wait_for_chunks(10)
        assert node.process is not None
        daemon, engine = node.process.pid, node.engine_pids()[0]
        try:
            for pid in (daemon, engine):
                os.kill(pid, signal.SIGSTOP)
                node.wait_for(lambda pid=pid: is_stopped(pid), "a stopped process")
            time.sleep(1.2 * STALL_S)
        finally:
            os.kill(daemon, signal.SIGCONT)
        try:
            for _ in range(2):  # timers that are due come before what is read from sockets
                assert node.get("/healthz")[0] == 200
        finally:
            os.kill(engine, signal.SIGCONT)
        assert (stream.join().error, stream.text) == ("", expected)
        assert node.engine_pids() == [engine]
        assert "hangs" not in node.log_text()


def test_a_hung_engine_does_not_hold_up_the_daemons_end(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "a")
    with Node(tmp_path, null_step_ms=20, config="engine_stall_s = 0\ndrain_timeout_s = 1\n") as node:
        stream = Stream(node, "a", "x", 300)
        stream.wait_for_chunks(10)
        os.kill(node.engine_pids()[0], signal.SIGSTOP)
        begun = time.monotonic()
        assert node.stop() == 0  # asserts that no engine is left, too
        assert time.monotonic() - begun < 30, "the drain, and what ending an engine by force may take"
        assert "server is restarting" in stream.join().error
