"""Manual pages and the reference of command lines are made from the parsers; what those don't know is held to the code here."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from config import paths
from daemon import errors
from daemon.cli import manual
from daemon.cli.main import make_parser
from daemon.operate.control_status import EXIT_FAULT

ROOT = Path(__file__).resolve().parents[3]
MAN, REFERENCE = ROOT / "docs/man", ROOT / "docs/reference"
COMMITTED = {"hearthd.8": MAN / "hearthd.8", "hearth.1": MAN / "hearth.1", "cli.md": REFERENCE / "cli.md"}


@pytest.mark.parametrize("name", list(manual.PAGES))
def test_committed_pages_are_current(name: str) -> None:
    assert COMMITTED[name].read_text() == manual.PAGES[name](), f"run: python -m daemon.cli.manual {name} > {COMMITTED[name]}"


def test_every_exit_code_is_told() -> None:
    codes = {value for name, value in vars(errors).items() if name.startswith("EXIT_")} | {EXIT_FAULT}
    assert set(manual.EXITS) == codes
    assert set(manual.DAEMON_EXITS) == {errors.EXIT_OK, 1, errors.EXIT_USAGE}


def test_files_are_those_of_the_code_and_the_units() -> None:
    assert {paths.SERVICE_CONTROL, paths.SERVICE_STATUS} <= set(manual.FILES)
    units = "".join(path.read_text() for path in (ROOT / "systemd").iterdir())
    for name in ("/etc/hearthd/node.toml", "/var/lib/hearthd/models", "/opt/hearthd/current", "/run/hearthd/control.sock"):
        assert name in manual.FILES
        assert name in units, name


def test_signals_are_those_that_are_handled() -> None:
    named = set(re.findall(r"SIG[A-Z0-9]+", " ".join(manual.SIGNALS)))
    handled = set(re.findall(r"signal\.(SIG[A-Z0-9]+)", (ROOT / "daemon/lifecycle.py").read_text()))
    assert named == handled | {"SIGABRT"}


def test_environment_variables_are_those_that_are_read() -> None:
    read: set[str] = set()
    for path in (
        "config/paths.py",
        "daemon/process/systemd_notify.py",
        "daemon/process/passed_descriptors.py",
        "config/credential.py",
    ):
        read |= set(re.findall(r'"([A-Z]{3,}_[A-Z_]+)"', (ROOT / path).read_text()))
    named = set(re.findall(r"[A-Z]{3,}_[A-Z_]+", " ".join(manual.VARIABLES)))
    assert named == read


def test_examples_parse() -> None:
    for line in manual.EXAMPLES:
        make_parser().parse_args(line.split()[1:])


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff to look at the pages' markup")
@pytest.mark.parametrize("name", ["hearthd.8", "hearth.1"])
def test_the_markup_is_sound(name: str) -> None:
    command = ["groff", "-Kutf8", "-man", "-ww", "-Tutf8", str(COMMITTED[name])]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert result.stderr == ""
    text = re.sub(r"\x1b\[[0-9;]*m|.\x08", "", result.stdout)
    assert "--control SOCKET" in text
