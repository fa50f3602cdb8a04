"""`hearth` without a daemon, and what it costs."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from daemon.cli import table
from daemon.cli.main import make_parser, run
from daemon.cli.models import models
from tests.e2e.node import environment


def hearth(*args: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "daemon.cli", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**environment(), **variables})


def test_not_running(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    result = hearth("--control", path, "ps")
    assert result.returncode == 5
    assert result.stderr == f"hearth: hearthd is not running at {path}; start it, or name its socket with --control\n"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
    assert hearth("--control", path, "status").returncode == 5


def test_the_daemon_says_that_its_models_folder_is_a_models(capsys: pytest.CaptureFixture[str]) -> None:
    """The command's user may see another file system, or may not read the folder."""
    status = {"models_dir": "/far/away", "models_dir_is_model": True}
    told = {"/control/v1/models": [], "/control/v1/names": [], "/control/v1/status": status}
    client = SimpleNamespace(get=told.__getitem__)
    for status["models_dir_is_model"], is_told in ((True, True), (False, False)):
        models(client, argparse.Namespace(json=False))  # type: ignore[arg-type]
        assert ("/far/away is a model's folder itself; name the folder that holds it" in capsys.readouterr().out) == is_told


def test_usage() -> None:
    for args in ((), ("frob",), ("load",), ("ps", "extra"), ("ps", "--frob")):
        assert hearth(*args).returncode == 2
    assert hearth("--control", "/tmp/" + 200 * "x", "ps").returncode == 2


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("bogus",), "COMMAND: 'bogus' is none of ps, models, "),
        (("--socket", "/run/x.sock", "ps"), "there is no --socket; `hearth --help` lists what there is"),
        (("--js", "bogus"), "COMMAND: 'bogus' is none of ps, models, "),
        (("statsu",), "COMMAND: 'statsu' is unknown; did you mean status?"),
        (("unpin", "a", "--no-wait"), "hearth unpin: there is no --no-wait; `hearth unpin --help` lists what there is"),
        (("load", "a", "--no-wiat"), "hearth load: there is no --no-wiat; did you mean --no-wait?"),
        (("ps", "extra"), "hearth ps: 'extra' is one word too many"),
        (("drain", ""), "hearth drain: NAME: is empty; `hearth drain --help` tells what it takes"),
        (("load", ""), "hearth load: NAME: is empty"),
        (("load", "a", "--adapter", ""), "hearth load: --adapter: is empty"),
    ],
)
def test_only_what_is_there_is_proposed(args: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        make_parser().parse_args(args)
    error = capsys.readouterr().err
    assert ended.value.code == 2
    assert said in error
    assert error.count("\n") == 1


def test_alone_it_says_what_it_can_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 2
    assert "load a model and wait until it is ready" in capsys.readouterr().err


@pytest.mark.parametrize("args", [("--json", "bogus"), ("load", "--json"), ("ps", "--frob", "--json"), ("drain", "", "--json")])
def test_wrong_usage_is_json_where_json_was_asked_for(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([word for word in args if word != "--json"]) == 2
    said = capsys.readouterr().err.strip()
    assert run(args) == 2
    out, err = capsys.readouterr()
    assert err == ""
    message = said.partition(": ")[2]
    assert json.loads(out) == {"code": "invalid_request", "message": message, "details": {}}


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("plan", "m", "--devices", "cpu=1GiB"), "--devices: goes with --config FOLDER"),
        (("plan", "m", "--kv-cache-dtype", "fp8"), "--kv-cache-dtype: goes with --config FOLDER"),
        (("plan", "m", "--max-sequences", "1"), "--max-sequences: goes with --config FOLDER"),
        (("evict", "m", "--dry-run", "--device", "cpu:0"), "--device: goes with --bytes"),
    ],
)
def test_no_option_is_ignored(args: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--control", str(tmp_path / "c.sock"), *args]) == 2
    assert capsys.readouterr().err == f"hearth: {said}\n"


@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize("args", [("completion", "bash"), ("hash-key", "--generate", "--json"), ("--json", "bogus")])
def test_output_that_cannot_be_written_is_one_line(args: tuple[str, ...], buffered: bool) -> None:
    command = [sys.executable, "-P", *(() if buffered else ("-u",)), "-m", "daemon.cli", *args]
    variables = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=variables)
    assert result.stderr == "hearth: the output cannot be written: No space left on device\n"
    assert result.returncode == 1


def test_closed_streams_lose_what_is_printed() -> None:
    command = f"{sys.executable} -P -m daemon.cli hash-key --generate"
    for closed in (">&-", "2>&- >&-"):
        result = subprocess.run(["sh", "-c", f"{command} {closed}"], capture_output=True, text=True, timeout=60, env=environment())
        assert (result.returncode, result.stderr) == (0, "")


def test_default_socket(tmp_path: Path) -> None:
    if os.path.exists("/run/hearthd/control.sock"):
        pytest.skip("a hearthd service runs on this machine")
    assert f"{tmp_path}/hearthd/control.sock" in hearth("ps", XDG_RUNTIME_DIR=str(tmp_path)).stderr
    assert f"/tmp/hearthd-{os.getuid()}/control.sock" in hearth("ps", XDG_RUNTIME_DIR="").stderr


def test_version_without_a_daemon(tmp_path: Path) -> None:
    result = hearth("--control", str(tmp_path / "c.sock"), "version", "--json")
    assert result.returncode == 0
    assert '"hearthd": null' in result.stdout


def test_something_else_listens(tmp_path: Path) -> None:
    path = str(tmp_path / "c.sock")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()

        def hang_up() -> None:
            connection, _ = server.accept()
            connection.close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        result = hearth("--control", path, "ps")
        thread.join()
    assert result.returncode == 5
    assert "Traceback" not in result.stderr


def test_hash_key() -> None:
    known = "sk-0123456789abcdef0123456789"
    command = [sys.executable, "-P", "-m", "daemon.cli", "hash-key"]
    run = partial(subprocess.run, capture_output=True, text=True, env=environment(), timeout=60)
    printed = run(command, input=known + "\n").stdout
    assert printed == f"sha256:{hashlib.sha256(known.encode()).hexdigest()}\n"
    made = json.loads(run([*command, "--generate", "--json"]).stdout)
    assert run(command, input=made["key"]).stdout.strip() == made["hash"]
    short = run(command, input="hunter2\n")
    assert short.returncode == 2
    assert "20 printable ASCII characters" in short.stderr
    assert "hunter2" not in short.stderr + short.stdout


def test_nothing_heavy_is_imported() -> None:
    """`hearth ps` has 0.2 s for everything."""
    code = "import sys, daemon.cli.main; print(*sorted(sys.modules))"
    command = [sys.executable, "-P", "-c", code]
    loaded = set(subprocess.run(command, capture_output=True, text=True, env=environment(), check=True).stdout.split())
    heavy = {"torch", "aiohttp", "msgspec", "numpy", "rich", "asyncio", "tokenizers", "jinja2", "prometheus_client", "uvloop"}
    assert not loaded & heavy


def test_every_command_takes_json_and_control_on_both_sides() -> None:
    parser = make_parser()
    for argv in (["--json", "--control", "s", "ps"], ["ps", "--json", "--control", "s"]):
        options = parser.parse_args(argv)
        assert (options.json, options.control) == (True, "s")


def test_tables() -> None:
    text = table.table(("A", "BB"), [("xyz", "1"), ("", "22")], frozenset({1}))
    assert text == "A    BB\nxyz   1\n     22"
    assert [table.size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 40)] == ["0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3072.0 GiB"]
    assert table.ago(None) == "never"
    assert [table.duration(s) for s in (5, 600, 7200)] == ["5 s", "10 min", "2.0 h"]
