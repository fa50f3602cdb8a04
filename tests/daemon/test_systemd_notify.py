"""The notify and watchdog protocols and socket activation, spoken by the real daemon with the null runner."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import threading
import time
import urllib.request
from pathlib import Path

import pytest

from daemon.process.systemd_notify import Notifier
from tests.daemon.service_manager import NotifySocket, passing
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, environment
from tests.e2e.service_node import ServiceNode


def test_outside_systemd_nothing_is_sent() -> None:
    notifier = Notifier({})
    assert not notifier
    notifier.ready("x")
    asyncio.run(notifier.watchdog(lambda: ""))  # ends at once


def test_engines_do_not_inherit_the_protocol() -> None:
    variables = {"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    assert Notifier(variables).watchdog_s == 3.0
    assert variables == {"HOME": "/"}
    assert Notifier({"NOTIFY_SOCKET": "/x", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": "1"}).watchdog_s == 0.0


def test_abstract_socket_and_one_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as server:
        name = f"hearthd-test-{os.getpid()}"
        server.bind("\0" + name)
        Notifier({"NOTIFY_SOCKET": "@" + name}).ready("serves")
        assert server.recv(100) == b"READY=1\nSTATUS=serves"
    Notifier({"NOTIFY_SOCKET": "@" + name}).ready("serves")
    assert "was not told READY=1" in caplog.text


def test_watchdog_is_withheld_while_something_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """By a problem at once; by a blocked loop, because it is sent from there."""
    notify = NotifySocket(tmp_path, watchdog_s=0.03)
    notifier = Notifier(dict(notify.environment))
    problems = [""]

    async def run() -> None:
        task = asyncio.ensure_future(notifier.watchdog(lambda: problems[0]))
        while notify.count("WATCHDOG") < 3:  # noqa: ASYNC110 - a socket that is polled
            await asyncio.sleep(0.01)
        problems[0] = "cpu:0: the roll-back of a is overdue"
        await asyncio.sleep(0.02)  # a tick that was under way
        count = notify.count("WATCHDOG")
        await asyncio.sleep(0.1)
        assert notify.count("WATCHDOG") == count
        problems[0] = ""
        while notify.count("WATCHDOG") == count:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    notify.close()
    assert caplog.text.count("watchdog withheld") == 1, "one line, not one a tick"
    assert "roll-back of a is overdue" in caplog.text


def test_ready_reload_stop(tmp_path: Path) -> None:
    notify = NotifySocket(tmp_path, watchdog_s=0.3)
    make_model(tmp_path / "n" / "models" / "a")
    with ServiceNode(tmp_path / "n", notify) as node:
        notify.wait_for(lambda messages: any("READY" in one for one in messages), "READY=1")
        first = next(at for at, one in enumerate(notify.messages) if "READY" in one)
        assert notify.messages[first] == {"READY": "1", "STATUS": f"serves {node.url}"}
        assert node.get("/v1/models")[0] == 200, "ready means that requests are answered"
        node.signal(signal.SIGHUP)
        notify.wait_for(lambda messages: sum("READY" in one for one in messages) == 2, "READY=1 after the reload")
        names = [one for one in notify.messages if "WATCHDOG" not in one]
        assert names[1]["RELOADING"] == "1"
        assert int(names[1]["MONOTONIC_USEC"]) > 0
        assert "READY" in names[2]
        node.config.write_text("frob = 1\n")
        assert node.cli("reload").returncode == 2
        notify.wait_for(lambda messages: sum("READY" in one for one in messages) >= 3, "the end of a refused reload")
        count = notify.count("WATCHDOG")
        notify.wait_for(lambda messages: sum("WATCHDOG" in one for one in messages) >= count + 3, "the watchdog's pulse")
        assert node.stop() == 0
        (stopping,) = [one for one in notify.read() if "STOPPING" in one]
        assert int(stopping["EXTEND_TIMEOUT_USEC"]) == 40_000_000, "drain_timeout_s and 10 s"
    notify.close()


def test_a_blocked_loop_withholds_the_watchdog(tmp_path: Path) -> None:
    """Stopped, it can't send; and the SIGABRT systemd sends then leaves the place where it was in the log."""
    notify = NotifySocket(tmp_path, watchdog_s=0.2)
    node = ServiceNode(tmp_path / "n", notify)
    node.start()
    process = node.process
    assert process is not None
    try:
        notify.wait_for(lambda messages: any("WATCHDOG" in one for one in messages), "a pulse")
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        count = notify.count("WATCHDOG")
        time.sleep(0.6)
        assert notify.count("WATCHDOG") == count
        process.send_signal(signal.SIGCONT)
        # once it sleeps again: a stack that is in motion while another thread writes it down may be cut off in the log
        notify.wait_for(lambda messages: sum("WATCHDOG" in one for one in messages) > count, "a pulse after the stop")
        process.send_signal(signal.SIGABRT)
        assert process.wait(20) == -signal.SIGABRT
        assert "Fatal Python error: Aborted" in node.log_text()
        assert "lifecycle.py" in node.log_text()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
        notify.close()


def test_passed_listeners_queue_connections_during_a_restart(tmp_path: Path) -> None:
    """A request that comes while hearthd drains, or is not there, is answered by the next one; an open stream ends well."""
    make_model(tmp_path / "n" / "models" / "a")
    control_path = str(tmp_path / "passed.sock")
    with socket.create_server(("127.0.0.1", 0)) as http, socket.socket(socket.AF_UNIX) as control:
        control.bind(control_path)
        control.listen()
        node = ServiceNode(tmp_path / "n", null_step_ms=10)
        node.listeners, node.control = [("http", http), ("control", control)], control_path
        address = f"http://127.0.0.1:{http.getsockname()[1]}"
        with node:
            assert node.url == address
            assert "listen = 127.0.0.1:0 is not used: systemd passed " + address in node.log_text()
            assert not (tmp_path / "n" / "c.sock").exists()
            stream = Stream(node, "a", "x", 60)
            stream.wait_for_chunks(3)
            node.signal(signal.SIGTERM)
            node.wait_for(lambda: "draining" in node.log_text(), "draining")
            answer: list[object] = []

            def ask() -> None:
                with urllib.request.urlopen(address + "/v1/models", timeout=60) as response:
                    answer.append(json.load(response)["data"][0]["id"])

            asking = threading.Thread(target=ask)
            asking.start()
            assert node.process is not None
            assert node.process.wait(60) == 0
            node.stop()
            assert (stream.join().error, stream.finish_reason) == ("", "length")
            assert answer == [], "it was refused, not queued"
            assert os.path.exists(control_path), "systemd's socket was removed"
            node.start()
            asking.join(60)
            assert answer == ["a"]
            assert node.stop() == 0


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        ("unknown", "tcp", "'unknown' is none of http, admin, control, status"),
        ("http", "unix", "must be a listening TCP socket"),
        ("control", "tcp", "must be a listening Unix stream socket"),
        ("http", "not listening", "must be a listening TCP socket"),
    ],
)
def test_listeners_that_make_no_sense(tmp_path: Path, name: str, kind: str, words: str) -> None:
    family = socket.AF_UNIX if kind == "unix" else socket.AF_INET
    with socket.socket(family) as sock:
        sock.bind(str(tmp_path / "u") if kind == "unix" else ("127.0.0.1", 0))
        if kind != "not listening":
            sock.listen()
        node = Node(tmp_path / "n")
        command, fds = passing(node.command(), [(name, sock.fileno())])
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), pass_fds=fds)
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_private_network_serves_what_it_was_passed(tmp_path: Path) -> None:
    """As the unit has it (PrivateNetwork=yes): the listener is made outside, the daemon has no network of its own."""
    if os.getuid() != 0 or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode != 0:
        pytest.skip("a network namespace needs root")
    make_model(tmp_path / "n" / "models" / "a")
    with socket.create_server(("127.0.0.1", 0)) as http:
        node = ServiceNode(tmp_path / "n")
        node.listeners = [("http", http)]
        plain = node.command
        node.command = lambda: ["/usr/bin/unshare", "--net", *plain()]  # type: ignore[method-assign]
        with node:
            assert Stream(node, "a", "x", 3).join().finish_reason == "length"
