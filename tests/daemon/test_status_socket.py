"""The status socket: everybody may look, nobody may touch."""

from __future__ import annotations

import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from config import paths
from daemon.cli.completion import commands_of
from daemon.cli.main import make_parser
from daemon.cli.manual import _READING
from daemon.operate.control import NUM_FOLLOWERS
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, environment


@pytest.fixture(scope="module")
def node() -> Iterator[Node]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # pytest's own folders are closed to others
        make_model(folder / "models" / "a")
        with Node(folder, flags=["--status-socket", str(folder / "s.sock")]) as running:
            yield running


def over_status(node: Node, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "daemon.cli", "--control", str(node.folder / "s.sock"), *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


def test_modes(node: Node) -> None:
    modes = [stat.S_IMODE(os.stat(path).st_mode) for path in (node.control, node.folder / "s.sock")]
    assert modes == [0o660, 0o666]


def test_reading_commands_work_and_the_others_are_denied(node: Node) -> None:
    arguments = {"NAME": ["a"], "MODEL|REQUEST": ["a"], "": []}
    for command in commands_of(make_parser()):
        if command.argument not in arguments or command.name in ("cp", "hash-key", "lend", "pack", "rm", "verify"):
            continue  # work as the caller, not in the daemon
        result = over_status(node, command.name, *arguments[command.argument], "--json")
        if command.name == "gpus" and result.returncode:
            assert json.loads(result.stdout)["code"] == "not_found", "no driver is what this machine may say"
        elif command.name == "experts":
            assert json.loads(result.stdout)["code"] == "no_experts", "which the model does not have"
        elif command.name in _READING:
            assert result.returncode == 0, (command.name, result.stderr)
        else:
            assert (result.returncode, json.loads(result.stdout)["code"]) == (6, "permission_denied"), command.name
    deleting = over_status(node, "rm", "a", "--yes", "--models", str(node.folder / "models"), "--json")
    assert (deleting.returncode, json.loads(deleting.stdout)["code"]) == (6, "permission_denied")
    assert (node.folder / "models" / "a").is_dir()
    assert node.state("a") == "cold", "a denied command did something"
    assert node.json("status")["draining"] is False


def test_status_says_that_no_keys_are_set(node: Node) -> None:
    assert "no keys are set" in over_status(node, "status").stdout
    value = json.loads(over_status(node, "status", "--json").stdout)
    assert (value["keys"], value["tenants"]) == (False, 0)


def test_followers_are_limited_and_the_refusal_says_so(node: Node) -> None:
    followers = []
    try:
        for _ in range(NUM_FOLLOWERS):
            follower = socket.socket(socket.AF_UNIX)
            followers.append(follower)
            follower.connect(str(node.folder / "s.sock"))
            follower.sendall(b"GET /control/v1/events?follow=1 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert follower.recv(64).startswith(b"HTTP/1.1 200")
        refused = over_status(node, "events", "--follow", "--json")
        assert (refused.returncode, json.loads(refused.stdout)["code"]) == (5, "too_many_followers")
        assert over_status(node, "events").returncode == 0, "looking back is no following"
    finally:
        for follower in followers:
            follower.close()
    after = subprocess.Popen(
        [sys.executable, "-P", "-m", "daemon.cli", "--control", str(node.folder / "s.sock"), "events", "--follow"],
        stdout=subprocess.PIPE,
        env=environment(),
    )
    assert after.stdout is not None
    assert after.stdout.readline(), "places are given back"
    after.kill()
    after.wait()
    after.stdout.close()


def test_answers_name_the_server_and_not_what_it_is_made_of(node: Node) -> None:
    for path in (node.control, node.folder / "s.sock"):
        for asked in (b"GET /control/v1/status", b"GET /nowhere", b"GET /control/v1/events"):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))
                client.sendall(asked + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
                head = client.makefile("rb").read().partition(b"\r\n\r\n")[0]
            assert b"\r\nServer: hearthd\r\n" in head + b"\r\n", head


def test_hearth_falls_back_to_it(node: Node) -> None:
    """A user outside the group sees the service without naming a socket; commands say what is missing."""
    if os.getuid() != 0:
        pytest.skip("needs root to become somebody else")
    code = (
        "import encodings.idna, os, sys, shutil; from daemon.cli import main as cli; from config import paths; "
        "paths.SERVICE_CONTROL, paths.SERVICE_STATUS = sys.argv[1:3]; "
        "os.setgroups([]); os.setgid(65534); os.setuid(65534); sys.exit(cli.run(['--control', *sys.argv[1:2], *sys.argv[3:]]))"
    )
    for args, exit_code, words in ((["models"], 0, "cold"), (["load", "a"], 6, "no permission to open")):
        command = [sys.executable, "-P", "-c", code, node.control, str(node.folder / "s.sock"), *args]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
        assert (result.returncode, words in result.stdout + result.stderr) == (exit_code, True), result.stderr


def test_where_it_is_by_default() -> None:
    assert paths.daemon_status_path(paths.SERVICE_CONTROL) == paths.SERVICE_STATUS
    assert paths.daemon_status_path("/tmp/c.sock") == "", "only the service has one unasked"


def test_both_sockets_go_with_the_daemon(tmp_path: Path) -> None:
    with Node(tmp_path / "n", flags=["--status-socket", str(tmp_path / "s.sock")]) as node:
        assert (tmp_path / "s.sock").exists()
        assert node.stop() == 0
    assert not (tmp_path / "s.sock").exists()
    assert not os.path.exists(node.control)
