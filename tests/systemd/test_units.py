"""The units as systemd reads them: no warning, little exposure, and in step with the code."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from config import paths
from config.schema import NodeConfig
from daemon import lifecycle
from daemon.http import sockets
from engine.host import child_process

ROOT = Path(__file__).resolve().parents[2]
UNITS = ROOT / "systemd"
MAX_EXPOSURE = 0.7
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is missing: the units are NOT CHECKED; apt-get install systemd"
)


def settings(name: str) -> dict[str, dict[str, str]]:
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment]
    parser.read(UNITS / name)
    return {section: dict(parser[section]) for section in parser.sections()}


@needs_systemd
def test_verify_is_clean(tmp_path: Path) -> None:
    """Programs and pages the units name are put where they are looked for; all else is systemd's own judgement."""
    program = tmp_path / "opt" / "current" / "bin"
    program.mkdir(parents=True)
    for name in ("hearthd", "hearth"):
        (program / name).touch(0o755)
    manual = tmp_path / "man" / "man8"
    manual.mkdir(parents=True)
    shutil.copy(ROOT / "docs/man/hearthd.8", manual)
    for unit in ("hearthd.service", "hearthd.socket"):
        (tmp_path / unit).write_text((UNITS / unit).read_text().replace("/opt/hearthd", str(tmp_path / "opt")))
    command = ["systemd-analyze", "verify", str(tmp_path / "hearthd.service"), str(tmp_path / "hearthd.socket")]
    if shutil.which("man") is None:
        command.insert(2, "--man=no")
    environment = {"PATH": "/usr/bin:/bin:/usr/sbin:/sbin", "MANPATH": str(tmp_path / "man")}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert (result.returncode, result.stdout + result.stderr) == (0, "")


@needs_systemd
def test_a_broken_unit_is_noticed(tmp_path: Path) -> None:
    """The check above can fail."""
    (tmp_path / "x.service").write_text("[Service]\nExecStart=/bin/true\nWatchdogSeconds=3\n")
    result = subprocess.run(["systemd-analyze", "verify", str(tmp_path / "x.service")], capture_output=True, text=True, timeout=60)
    assert "WatchdogSeconds" in result.stderr


@needs_systemd
def test_exposure() -> None:
    command = ["systemd-analyze", "security", "--offline=yes", str(UNITS / "hearthd.service")]
    text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    found = re.search(r"Overall exposure level for hearthd\.service: (\d+\.\d+)", text)
    assert found is not None, text
    assert float(found[1]) <= MAX_EXPOSURE, text


def test_every_exemption_is_explained() -> None:
    text = (UNITS / "hearthd.service").read_text()
    for key in ("MemoryDenyWriteExecute", "PrivateDevices", "ProcSubset", "@resources", "RootDirectory"):
        assert f"#  - {key}" in text, key


def test_the_service_is_in_step_with_the_daemon() -> None:
    service = settings("hearthd.service")["Service"]
    assert float(service["TimeoutStopSec"]) == NodeConfig().drain_timeout_s + lifecycle.TEAR_DOWN_S
    assert (service["Type"], service["NotifyAccess"], service["KillMode"]) == ("notify", "main", "mixed")
    assert service["OOMPolicy"] == "continue"
    assert int(service["OOMScoreAdjust"]) == -child_process.OOM_SCORE_ADJ_OVER_DAEMON
    assert float(service["WatchdogSec"]) > 0
    assert service["RestartPreventExitStatus"] == "2"
    assert paths.SERVICE_CONTROL in service["ExecReload"]
    assert paths.SERVICE_CONTROL.startswith(f"/run/{service['RuntimeDirectory']}/")
    assert (service["RuntimeDirectoryMode"], service["User"], service["Group"]) == ("0755", "hearthd", "hearthd")


def test_the_socket_is_in_step_with_the_daemon() -> None:
    section = settings("hearthd.socket")["Socket"]
    assert section["FileDescriptorName"] == sockets.HTTP
    assert section["ListenStream"] == NodeConfig().listen
    assert int(section["Backlog"]) == sockets.BACKLOG
    assert section["Accept"] == "no"


def test_systemds_folders_are_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STATE_DIRECTORY", "/var/lib/hearthd:/var/lib/other")
    monkeypatch.setenv("CACHE_DIRECTORY", "/var/cache/hearthd")
    assert (paths.state_dir(), paths.cache_dir()) == ("/var/lib/hearthd", "/var/cache/hearthd")


def test_no_comment_stands_behind_a_value_in_the_drop_ins_of_the_docs() -> None:
    """systemd knows comments as lines of their own only: behind a value they are words of it."""
    seen = 0
    for page in (ROOT / "docs").rglob("*.md"):
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.M | re.S):
            if re.search(r"^\[(Service|Socket)\]$", block, re.M):
                seen += 1
                assert not re.search(r"^[A-Z]\w+=.*[ \t]#", block, re.M), f"{page.name}: {block}"
    assert seen >= 3
