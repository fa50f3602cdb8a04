"""`hearth doctor` as it is called, on this machine."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from daemon.cli.main import run
from daemon.gpu.driver import Driver
from daemon.gpu.inventory import Gpu, GpuProcess
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node
from tests.loader.checkpoints import write_checkpoint

Capture = pytest.CaptureFixture[str]
CHECKS = [
    "settings",
    "installation",
    "packages",
    "device packages",
    "kernel",
    "processor",
    "driver",
    "C compiler",
    "cache folder",
    "state folder",
    "memory",
    "memory limit",
    "huge pages",
    "locked memory",
    "open files",
    "models",
    "drive",
    "TLS",
    "HTTP address",
]


def config(tmp_path: Path, **settings: str) -> str:
    (tmp_path / "models").mkdir(exist_ok=True)
    write_checkpoint(tmp_path / "models" / "one")
    path = tmp_path / "node.toml"
    settings = {"models_dir": f"{tmp_path}/models", "cache_dir": f"{tmp_path}/cache", "listen": "127.0.0.1:0", **settings}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items()))
    return str(path)


def by_check(capsys: Capture) -> dict[str, dict[str, Any]]:
    return {one["check"]: one for one in json.loads(capsys.readouterr().out)["findings"]}


def test_without_a_daemon(tmp_path: Path, capsys: Capture) -> None:
    path = config(tmp_path)
    assert run(["doctor", "--config", path]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"checked against {path}"
    assert [line.split(" · ")[1].partition(":")[0] for line in lines[1:]] == CHECKS
    assert any("1 of 1 in" in line for line in lines)


def test_who_holds_a_part_of_a_gpu_and_the_budget_that_is_left_are_told(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A budget that is not given is what others leave: it fits, and nothing fails."""
    gib = 1 << 30
    trainer = GpuProcess(7, "trainer", 30 * gib, is_engine=False)
    monkeypatch.setattr(Driver, "gpus", lambda _: [Gpu(0, "GPU-a", "H200", 80 * gib, 31 * gib, processes=(trainer,))])
    path = config(tmp_path)
    with open(path, "a") as file:
        file.write('device = ["cuda"]\n')
    run(["doctor", "--config", path, "--json"])
    finding = by_check(capsys)["cuda:0"]
    assert finding["level"] == "ok"
    assert finding["found"] == (
        "H200, 31.0 GiB of 80.0 GiB used; others hold 30.0 GiB of 80.0 GiB: pid 7 trainer 30.0 GiB; its budget is 48.5 GiB"
    )
    run(["doctor", "--config", path])
    assert f"ok   · cuda:0: {finding['found']}" in capsys.readouterr().out.splitlines()


def test_a_port_that_is_taken_fails(tmp_path: Path, capsys: Capture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        path = config(tmp_path, listen=f"127.0.0.1:{other.getsockname()[1]}")
        exit_code = run(["doctor", "--config", path, "--json"])
        address = by_check(capsys)["HTTP address"]
    assert address["level"] in ("fail", "warn"), "warn where the process can't be named"
    assert exit_code == (1 if address["level"] == "fail" else 0)
    assert "is taken" in address["found"]


def test_a_folder_that_is_not_there_fails(tmp_path: Path, capsys: Capture) -> None:
    assert run(["doctor", "--config", config(tmp_path), "--models", str(tmp_path / "none"), "--json"]) == 1
    assert by_check(capsys)["models"]["level"] == "fail"


def test_a_configuration_that_is_not_valid(tmp_path: Path, capsys: Capture) -> None:
    assert run(["doctor", "--config", config(tmp_path, listen="nowhere")]) == 2
    assert "node.toml:3: listen: " in capsys.readouterr().err


def test_a_running_daemon_is_asked(tmp_path: Path, capsys: Capture) -> None:
    with Node(tmp_path / "node", devices=["cpu=64MiB"]) as node:
        assert run(["--control", node.control, "doctor", "--json"]) == 0
        value = json.loads(capsys.readouterr().out)
        assert value["settings"]["models_dir"] == str(node.models)
        assert value["settings"]["budgets"] == {"cpu:0": 64 << 20}
        found = {one["check"]: one["found"] for one in value["findings"]}
        assert found["HTTP address"] == f"hearthd serves {node.url}"
        assert "(hearthd's)" in found["open files"]
        assert found["memory"].startswith("cpu:0 64.0 MiB of ")
        assert found["state folder"].startswith(f"{node.folder}/state, ")
        assert "hearthd" not in found


def test_a_running_daemon_says_what_it_cannot_write(tmp_path: Path, capsys: Capture) -> None:
    """An audit log on a full disk, and a state folder that is gone."""
    make_model(tmp_path / "node" / "models" / "a")
    with Node(tmp_path / "node", devices=["cpu=64MiB"], config='audit_log = "/dev/full"\n') as node:
        state = Path(node.json("status")["state_dir"])
        shutil.rmtree(state)
        state.write_text("in its place")
        assert node.cli("pin", "a").returncode == 7
        node.wait_for(lambda: node.json("status")["problems"], "the audit log's problem")
        assert run(["--control", node.control, "doctor", "--json"]) == 1
        found = by_check(capsys)
        state.unlink()
    assert (found["hearthd"]["level"], found["state folder"]["level"]) == ("warn", "fail")
    assert "acts were dropped" in found["hearthd"]["found"]
    assert "a restart would forget pins" in found["state folder"]["found"]


def test_acts_that_the_audit_log_lacks_are_told_after_it_is_written_again(tmp_path: Path, capsys: Capture) -> None:
    make_model(tmp_path / "node" / "models" / "a")
    with Node(tmp_path / "node", devices=["cpu=64MiB"], config='audit_log = "/dev/full"\n') as node:
        node.wait_for(lambda: node.json("status")["problems"], "the audit log's problem")
        node.config.write_text(f'audit_log = "{tmp_path}/audit.log"\n')
        node.cli("reload")
        node.wait_for(lambda: not node.json("status")["problems"], "the audit log being written")
        dropped = node.json("status")["audit_dropped"]
        assert run(["--control", node.control, "doctor", "--json"]) == 0
        found = by_check(capsys)
    assert dropped > 0
    assert (found["audit log"]["level"], "hearthd" in found) == ("warn", False)
    assert found["audit log"]["found"].startswith(f"{dropped} acts are missing")
