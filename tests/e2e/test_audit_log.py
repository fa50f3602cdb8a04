"""The audit log of a real node: who did what, refusals, reloads, rotation; never a prompt, never a key."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

from daemon.access.keys import hash_key
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

KEY, WRONG, PROMPT = "sk-ann-0123456789abcdefghij", "sk-nobody-0123456789abcdefghij", "a prompt that nobody else should read"


def acts(path: Path) -> list[dict[str, Any]]:
    """The lines so far; the last one may still be written."""
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def wait_for_act(node: Node, path: Path, good: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
    found: list[dict[str, Any]] = node.wait_for(lambda: [act for act in acts(path) if good(act)], what)
    return found[0]


def ask(node: Node, key: str) -> int:
    body = {"model": "m", "prompt": PROMPT, "max_tokens": 3, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "X-Request-Id": "asked-by-the-test"}
    request = urllib.request.Request(node.url + "/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def keys_text(limit: int) -> str:
    return f'[tenants.ann]\nkeys = ["{hash_key(KEY)}"]\nrequests_per_minute = {limit}\n'


def test_who_did_what(tmp_path: Path) -> None:
    path, rotated, keys_file = tmp_path / "audit.log", tmp_path / "audit.log.1", tmp_path / "keys.toml"
    make_model(tmp_path / "n" / "models" / "m")
    keys_file.write_text(keys_text(1))
    config = f'audit_log = "{path}"\naudit_requests = true\nkeys_file = "{keys_file}"\n'
    with Node(tmp_path / "n", config=config) as node:
        wait_for_act(node, path, lambda act: act["act"] == "start", "the start")
        assert ask(node, KEY) == 200
        assert ask(node, KEY) == 429
        assert ask(node, WRONG) == 401
        assert node.cli("unload", "m").returncode == 0
        assert node.cli("load", "nobody").returncode == 3
        assert node.cli("drain", "m").returncode == 0
        assert node.cli("ps").returncode == 0
        keys_file.write_text(keys_text(2))
        assert node.cli("reload").returncode == 0
        keys_file.write_text(keys_text(-2))
        assert node.cli("reload").returncode == 2
        wait_for_act(node, path, lambda act: act["act"] == "command" and act["result"] == "invalid_config", "the refused reload")
        told = acts(path)
        path.rename(rotated)
        node.signal(signal.SIGHUP)
        node.wait_for(path.exists, "a new file, though what was reloaded is no good")
        keys_file.write_text(keys_text(2))
        assert node.stop() == 0
    who = {"uid": os.getuid(), "user": "root" if os.getuid() == 0 else told[-1].get("user")}
    assert told[0] | {"act": "start", "config": str(tmp_path / "n" / "node.toml")} == told[0]
    requests = [act for act in told if act["act"] == "request"]
    sum_start = sha256(KEY.encode()).hexdigest()[:8]
    assert [(act["status"], act["result"]) for act in requests] == [(200, "ok"), (429, "429")]
    first = requests[0]
    assert first["prompt_tokens"] > 3
    assert (
        first
        | {
            "tenant": "ann",
            "key": sum_start,
            "address": "127.0.0.1",
            "model": "m",
            "endpoint": "completions",
            "output_tokens": 3,
            "request_id": "asked-by-the-test",
        }
        == first
    )
    (limit,) = [act for act in told if act["act"] == "limit_refused"]
    assert (limit["tenant"], limit["result"], limit["key"]) == ("ann", "rate_limit_exceeded", sum_start)
    (refused,) = [act for act in told if act["act"] == "key_refused"]
    assert (refused["address"], refused["key"]) == ("127.0.0.1", sha256(WRONG.encode()).hexdigest()[:8])
    assert (refused["result"], refused["endpoint"]) == ("invalid_api_key", "completions")
    commands = [(act["command"], act.get("model"), act["result"]) for act in told if act["act"] == "command"]
    assert commands == [
        ("unload", "m", "ok"),
        ("load", "nobody", "model_not_found"),
        ("drain", "m", "ok"),
        ("reload", None, "ok"),
        ("reload", None, "invalid_config"),
    ]
    for act in told:
        if act["act"] == "command":
            assert (act["uid"], act["user"], act["pid"] > 0) == (who["uid"], who["user"], True)
    reloads = [act for act in told if act["act"] == "reload"]
    assert {tuple(act["tenants"]) for act in reloads if "tenants" in act} == {("ann: requests_per_minute",)}
    assert "tenants.ann.requests_per_minute: -2 must be" in next(act["message"] for act in reloads if act["result"] != "ok")
    stop = next(act for act in acts(path) if act["act"] == "stop")
    assert stop["signal"] == "SIGTERM"
    assert path.stat().st_mode & 0o777 == 0o600
    text = rotated.read_text() + path.read_text()
    for secret in (KEY, WRONG, PROMPT, hash_key(KEY)):
        assert secret not in text


def test_a_missing_folder_is_told_at_the_start(tmp_path: Path) -> None:
    from tests.daemon.test_main import hearthd

    (tmp_path / "models").mkdir()
    done = hearthd("--models", str(tmp_path / "models"), "--audit-log", str(tmp_path / "none" / "audit.log"), "--check-config")
    assert done.returncode == 2
    assert "audit_log" in done.stderr
    assert "there is no folder" in done.stderr
    done = hearthd("--models", str(tmp_path / "models"), "--audit-log", "jornal", "--check-config")
    assert (done.returncode, "must be a path with a" in done.stderr) == (2, True)
