"""The daemon as a process: start, errors at start, signals, what it leaves behind. Null runner, no torch."""

from __future__ import annotations

import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from daemon.process.version import VERSION
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import ROOT, Node, environment, wait_gone


def hearthd(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "daemon", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())


def test_version_is_the_projects() -> None:
    import tomllib

    assert hearthd("--version").stdout == f"hearthd {VERSION}\n"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == VERSION


def test_check_config(tmp_path: Path) -> None:
    good = hearthd("--check-config", "--models", str(tmp_path), "--device", "cpu:1=64MiB")
    assert (good.returncode, "cpu:1 64.0 MiB" in good.stdout) == (0, True)
    path = tmp_path / "node.toml"
    path.write_text("max_wait_s = 'soon'\n")
    bad = hearthd("--check-config", "--models", str(tmp_path), "--config", str(path))
    assert bad.returncode == 2
    assert bad.stderr == f"hearthd: {path}:1: max_wait_s: 'soon' must be a number\n"


def test_check_config_looks_at_the_models(tmp_path: Path) -> None:
    for name in ("org/real", "b"):
        make_model(tmp_path / "models" / name)
    path = tmp_path / "node.toml"
    flags = ("--check-config", "--models", str(tmp_path / "models"), "--config", str(path))
    path.write_text('[models."org/real"]\naliases = ["real"]\n[models."org/reel"]\npriority = 2.0\n')
    warned = hearthd(*flags)
    assert warned.returncode == 0
    assert warned.stdout.startswith("ok: ")
    folder = tmp_path / "models"
    said = f'hearthd: warning: {path}:3: models."org/reel": there is no model of that name in {folder} (yet)'
    assert warned.stderr == f'{said}; did you mean "org/real"?\n'
    path.write_text('[models."org/real"]\nchat_template = "own.jinja"\n')
    said = f'models."org/real".chat_template: there is no file {tmp_path}/own.jinja (yet), so chats would be refused'
    assert hearthd(*flags).stderr == f"hearthd: warning: {path}:2: {said}\n"
    path.write_text('[models."org/real"]\npriority = 2.0\naliases = ["b"]\n')
    refused = hearthd(*flags)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"hearthd: {path}:3: models.\"org/real\".aliases: 'b' is the name of a model in {folder}")
    path.write_text('[models."org/real"]\naliases = ["x"]\n[models.b]\naliases = ["x"]\n')
    twice = hearthd(*flags)
    assert twice.returncode == 2
    assert 'models."b".aliases: \'x\' is already an alias of "org/real"' in twice.stderr


def test_check_config_tells_a_model_from_the_models_folder(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    told = hearthd("--check-config", "--models", str(folder))
    said = f"models_dir: {folder} is a model's folder itself; name the folder that holds it"
    assert (told.returncode, said in told.stderr) == (0, True)
    assert "itself" not in hearthd("--check-config", "--models", str(tmp_path)).stderr


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        ([], 2, "--models DIR"),
        (["--models", "/nowhere/models"], 2, "'/nowhere/models' is no folder"),
        (["--models", "/tmp", "--device", "cuda:9999=50%"], 2, "device: 'cuda:9999=50%': "),
        (["--models", "/tmp", "--max-wait-s", "soon"], 2, "--max-wait-s"),
        (["--models", "/tmp", "--frobnicate"], 2, "hearthd: there is no --frobnicate; `hearthd --help` lists what there is"),
        (["--modles", "/tmp"], 2, "there is no --modles; did you mean --models?"),
        (["--models", "/tmp", "/srv"], 2, "'/srv' is one word too many"),
        (["--models", "/tmp", "--device", "cpu"], 2, "--device: 'cpu' must be NAME=BUDGET"),
        (["--models", "/tmp", "--state-dir", "/proc/x"], 1, "state_dir /proc/x cannot be made: No such file or directory; name"),
        (["--models", "/tmp", "--control", "/tmp/" + 120 * "x", "--check-config"], 2, "flags: control: '/tmp/xxx"),
        (
            ["--models", "/tmp", "--status-socket", "/tmp/" + 120 * "x", "--check-config"],
            2,
            "125 bytes is too long for a socket path",
        ),
        (["--models", "/tmp", "--control", "/tmp/" + 120 * "x"], 1, "too long for a socket path, at most 107"),
        (["--models", "/tmp", "--control", "/proc/nowhere/c.sock"], 1, "/proc/nowhere"),
        (["--models", "/tmp", "--listen", "no.such.host.invalid:0", "--control", "/tmp/hearthd-test-main.sock"], 1, "no address"),
    ],
)
def test_errors_at_start(tmp_path: Path, args: list[str], code: int, words: str) -> None:
    result = hearthd("--state-dir", str(tmp_path), *args)
    assert result.returncode == code, result.stderr
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_the_log_at_start_tells_what_the_processor_means_for_speed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTHD_CPU_FEATURES", "-avx2,-neon")
    result = hearthd("--models", str(tmp_path), "--state-dir", str(tmp_path), "--control", "/proc/nowhere/c.sock")
    assert result.returncode == 1, "it starts no engine"
    told = r"processor: no vectors hearthd knows( \(without .*, by HEARTHD_CPU_FEATURES\))?: everything is computed .*, slowly$"
    assert re.search(told, result.stderr, re.M), result.stderr


def test_port_and_socket_in_use(tmp_path: Path) -> None:
    flags = ["--models", str(tmp_path), "--state-dir", str(tmp_path / "s"), "--device", "cpu=64MiB", "--runner", "null"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        result = hearthd(*flags, "--listen", listen, "--control", str(tmp_path / "x.sock"))
    assert result.returncode == 1
    assert listen in result.stderr
    assert "in use" in result.stderr
    assert not (tmp_path / "x.sock").exists()
    with Node(tmp_path / "n") as node:
        result = hearthd(*flags, "--listen", "127.0.0.1:0", "--control", node.control)
        assert result.returncode == 1
        assert "another hearthd is running" in result.stderr
        assert node.cli("status").returncode == 0


def test_what_is_not_a_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "precious"
    path.write_text("x")
    result = hearthd(
        "--models", str(tmp_path), "--state-dir", str(tmp_path / "s"), "--control", str(path), "--listen", "127.0.0.1:0"
    )
    assert result.returncode == 1
    assert path.read_text() == "x"


def test_small_ready_and_clean(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "a")
    node = Node(tmp_path / "n", models=tmp_path / "models", forked=False)  # its memory is measured
    Path(node.control).touch()
    Path(node.control).unlink()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(node.control)  # left behind by a daemon that was killed
    with node:
        assert node.process is not None
        assert stat.S_IMODE(os.stat(node.control).st_mode) == 0o660
        assert psutil.Process(node.process.pid).memory_info().rss <= 80 << 20
        assert "torch" not in Path(f"/proc/{node.process.pid}/maps").read_text()
        assert node.get("/v1/models")[1]["data"][0]["id"] == "a"
        assert node.get("/healthz")[0] == 200
        assert "hearth_event_loop_stall_seconds_max" in node.get("/metrics")[1]
        assert node.stop() == 0
    assert not os.path.exists(node.control)
    assert "Traceback" not in node.log_text()


def test_load_tells_how_many_requests_are_open(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=200) as node:
        assert node.get("/load") == (200, {"server_load": 0})
        streams = [Stream(node, "a", f"{at}", 250) for at in range(2)]
        for stream in streams:
            stream.wait_for_chunks(1)
        assert node.get("/load") == (200, {"server_load": 2})
        assert node.get("/version") == (200, {"version": VERSION})
        for stream in streams:
            stream.hang_up()
        node.wait_for(lambda: node.get("/load") == (200, {"server_load": 0}), "nobody there")


def test_allowed_origins_come_in_from_the_next_reading_on(tmp_path: Path) -> None:
    path = tmp_path / "node.toml"
    site = {"Origin": "https://chat.example.org"}
    path.write_text("")
    with Node(tmp_path / "n", flags=["--config", str(path)]) as node:
        assert node.get("/v1/models", site)[0] == 403
        path.write_text('allowed_origins = ["https://chat.example.org/"]\n')
        refused = node.cli("reload")
        assert refused.returncode == 2
        assert "node.toml:1: allowed_origins: 'https://chat.example.org/' must hold origins" in refused.stderr
        path.write_text('allowed_origins = ["https://chat.example.org"]\n')
        assert node.cli("reload").returncode == 0
        assert node.get("/v1/models", site)[0] == 200
        assert node.get("/v1/models", {"Origin": "https://evil.example"})[0] == 403


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(tmp_path: Path, number: signal.Signals) -> None:
    """The whole process group gets it, engines included, as from systemd or a terminal."""
    make_model(tmp_path / "n" / "models" / "a")
    devices = ["cpu:0=64MiB", "cpu:1=64MiB"]
    with Node(tmp_path / "n", devices=devices, null_step_ms=20, config="engine_stall_s = 0\n") as node:
        streams = [Stream(node, "a", f"{i}", 250) for i in range(8)]
        for stream in streams:
            stream.wait_for_chunks(3)
        engines = node.engine_pids()
        assert len(engines) == 2
        for pid in engines:
            os.kill(pid, signal.SIGSTOP)  # the streams are there when the last question is asked
        node.signal(number, group=True)
        for pid in engines:
            os.kill(pid, number)
        node.wait_for(lambda: node.json("status")["draining"], "draining")
        assert node.get("/readyz")[0] == 503
        assert "the server is restarting" in Stream(node, "a", "late", 3).join().error
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
        for stream in streams:
            assert (stream.join().error, stream.finish_reason) == ("", "length")
        assert node.process is not None
        assert node.process.wait(30) == 0
        wait_gone(engines)


def test_drain_timeout_tells_the_rest(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=20, flags=["--drain-timeout-s", "0.3"]) as node:
        stream = Stream(node, "a", "x", 1900)
        stream.wait_for_chunks(3)
        assert node.stop() == 0
        assert "restarting" in stream.join().error


def test_second_signal_stops_at_once(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", null_step_ms=20, flags=["--drain-timeout-s", "600"]) as node:
        stream = Stream(node, "a", "x", 1900)
        stream.wait_for_chunks(3)
        node.signal(signal.SIGTERM)
        node.wait_for(lambda: node.json("status")["draining"], "draining")
        node.signal(signal.SIGTERM)
        assert node.process is not None
        assert node.process.wait(20) == 0
        assert "restarting" in stream.join().error


def test_killed_daemon_leaves_no_engine(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n", devices=["cpu:0=64MiB", "cpu:1=64MiB"]) as node:
        stream = Stream(node, "a", "x", 1900)
        stream.wait_for_chunks(3)
        assert node.process is not None
        children = [child.pid for child in psutil.Process(node.process.pid).children(recursive=True)]
        assert len(node.kill()) == 2
        wait_gone(children)
        assert stream.join().error
        node.start()  # the socket left behind is no obstacle
        assert Stream(node, "a", "x", 3).join().finish_reason == "length"


def test_idle_costs_next_to_nothing(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "a")
    with Node(tmp_path / "n") as node:
        assert node.process is not None
        Stream(node, "a", "x", 3).join()
        processes = [psutil.Process(node.process.pid), *psutil.Process(node.process.pid).children(recursive=True)]
        time.sleep(1.5)
        for _ in range(10):  # on a busy machine the work of the start may last longer
            before = {process: sum(process.cpu_times()[:2]) for process in processes if process.is_running()}
            time.sleep(3)
            processes = [process for process in before if process.is_running()]  # that which scans ends when it has been idle
            used = sum(sum(process.cpu_times()[:2]) - before[process] for process in processes)
            if used <= 0.03 + 0.02:  # 1 % of a core, and a clock tick's grain
                break
        else:
            pytest.fail(f"{used} CPU seconds in 3 s, ten times in a row no less than a hundredth of a core")
