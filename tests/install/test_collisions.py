"""Other distributions with packages of the same names, really installed: who is found, who owns it, what is said."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from daemon.process.version import VERSION
from tests.install.environments import Environment, foreign_wheel

PROGRAMS = ("hearthd", "hearth", "engine")
INIT = "from daemon.context import Context\n"
FOREIGN = {"daemon/__init__.py": INIT, "daemon/context.py": "class Context: pass\n"}
Fresh = Callable[[], Environment]


@pytest.fixture
def fresh(tmp_path: Path, installed: Environment) -> Fresh:
    """hearthd alone in an environment."""
    return lambda: installed.copy(tmp_path / "environment")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return foreign_wheel(tmp_path_factory.mktemp("foreign"), "some-daemon", FOREIGN, "3.1")


@pytest.fixture(scope="module")
def overwriting(installed: Environment, foreign: Path, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The other distribution, and then hearthd over it; not to be changed."""
    environment = installed.copy(tmp_path_factory.mktemp("overwriting") / "environment")
    environment.install(foreign)
    environment.install(wheel)
    return environment


def start(environment: Environment, program: str, cwd: str | Path = "/", **variables: str) -> subprocess.CompletedProcess[str]:
    if program == "engine":
        return environment.call("-m", "engine", "--channel-fd", "90", "--journal-fd", "91", cwd=cwd, **variables)
    words = ["version"] if program == "hearth" else ["--version"]
    return environment.script(program, *words, cwd=cwd, **variables)


def refused(result: subprocess.CompletedProcess[str], program: str, *texts: str) -> None:
    assert result.returncode == 1, result.stdout + result.stderr
    assert result.stderr.startswith(f"{program}: not started, for another package "), result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""
    for text in texts:
        assert text in result.stderr, (text, result.stderr)


def test_nothing_is_said_where_all_is_well(fresh: Fresh) -> None:
    environment = fresh()
    for program in ("hearthd", "hearth"):
        result = start(environment, program)
        assert (result.returncode, result.stderr) == (0, "")
        assert f"{program} {VERSION}" in result.stdout
    code = "import sys; from hearthd.start import require; require('x'); print('hearthd.collisions' in sys.modules)"
    assert environment.call("-c", code).stdout == "False\n", "the lists of other distributions were read for nothing"


def test_ours_was_overwritten(fresh: Fresh, foreign: Path) -> None:
    environment = fresh()
    environment.install(foreign)
    assert (environment.site / "daemon/__init__.py").read_text() == INIT
    path = str(environment.site / "daemon/__init__.py")
    texts = f"daemon: {path} is no longer hearthd's", "some-daemon 3.1", "uninstall some-daemon"
    for program in PROGRAMS:
        refused(start(environment, program), program, *texts)


def test_ours_overwrote_theirs(overwriting: Environment) -> None:
    """hearthd is whole and serves; the other one is not, and whoever runs hearthd hears of it."""
    environment = overwriting
    assert environment.call("-c", "import daemon; daemon.Context").returncode != 0, "the other distribution still works"
    for program in ("hearthd", "hearth"):
        result = start(environment, program)
        assert result.returncode == 0, result.stderr
        assert result.stderr.startswith(f"{program}: warning: another distribution")
        assert "daemon: some-daemon 3.1 has installed" in result.stderr
        assert "virtual environment" in result.stderr
    assert "another distribution" not in start(environment, "engine").stderr, "each engine would say so again"


def test_theirs_is_removed_and_takes_ours_along(overwriting: Environment, tmp_path: Path) -> None:
    environment = overwriting.copy(tmp_path / "environment")
    environment.pip("uninstall", "-q", "-y", "some-daemon")
    assert not (environment.site / "daemon/__init__.py").exists()
    refused(start(environment, "hearthd"), "hearthd", "daemon/__init__.py is missing", "install hearthd again")


def test_theirs_comes_first_on_the_path(fresh: Fresh, tmp_path: Path) -> None:
    environment, first = fresh(), tmp_path / "first"
    wheel = foreign_wheel(tmp_path, "settings", {"config/__init__.py": "x = 1\n", "config/load.py": ""}, "0.5")
    environment.pip("install", "-q", "--no-deps", "--no-index", "--target", str(first), str(wheel))
    texts = f"config: Python finds {first}/config/__init__.py, of settings 0.5,", f"hearthd's own in {environment.site}"
    for program in PROGRAMS:
        refused(start(environment, program, PYTHONPATH=str(first)), program, *texts)


def test_a_module_of_one_file_comes_first(fresh: Fresh, tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "first/loader.py").write_text("")
    result = start(fresh(), "hearthd", PYTHONPATH=str(tmp_path / "first"))
    refused(result, "hearthd", "/first/loader.py, of no distribution that is installed", "first out of PYTHONPATH")


@pytest.mark.parametrize(
    ("module", "program"), [("daemon", "hearthd"), ("hearthd", "hearthd"), ("daemon.cli", "hearth"), ("engine", "engine")]
)
def test_python_m_in_a_folder_with_a_package_of_its_own(fresh: Fresh, tmp_path: Path, module: str, program: str) -> None:
    (tmp_path / "project/config").mkdir(parents=True)
    (tmp_path / "project/config/__init__.py").write_text("")
    environment = fresh()
    refused(environment.module(module, cwd=tmp_path / "project"), program, f"{tmp_path}/project/config/__init__.py", "python -P -m")
    assert start(environment, "hearthd", cwd=tmp_path / "project").returncode == 0, "a console script does not look there"


def test_theirs_is_a_link_to_a_project(fresh: Fresh, tmp_path: Path) -> None:
    """As after `pip install -e` of it: no list names its files."""
    environment, project = fresh(), tmp_path / "project"
    (project / "scheduler").mkdir(parents=True)
    (project / "scheduler/__init__.py").write_text("")
    build = '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
    (project / "pyproject.toml").write_text(f'{build}[project]\nname = "planner"\nversion = "7"\n')
    environment.pip("install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "-e", str(project))
    # setuptools' own link comes last; that of others is a line in a .pth file that sorts before
    result = start(environment, "hearthd", PYTHONPATH=str(project))
    refused(result, "hearthd", f"{project}/scheduler/__init__.py, of planner 7,")


def test_doctor_tells_it_all_where_it_cannot_start(fresh: Fresh, foreign: Path, tmp_path: Path) -> None:
    environment = fresh()
    environment.install(foreign)
    environment.install(foreign_wheel(tmp_path, "planner", {"scheduler/jobs.py": ""}))
    result = environment.script("hearth", "doctor", "--json")
    findings = json.loads(result.stdout)["findings"]
    assert (result.returncode, result.stderr) == (1, "")
    assert [(one["check"], one["level"], one["found"].partition(":")[0]) for one in findings] == [
        ("installation", "fail", "daemon"),
        ("installation", "warn", "scheduler"),
    ]
    assert all(one["change"] for one in findings)
    text = environment.script("hearth", "doctor").stdout.splitlines()
    assert text[1].startswith("fail · installation: daemon: ")


def test_doctor_finds_theirs_also_where_only_its_list_tells(fresh: Fresh, tmp_path: Path, wheel: Path) -> None:
    """Of a package of one file that was overwritten nothing is left in the folder."""
    environment = fresh()
    environment.install(foreign_wheel(tmp_path, "settings", {"config/__init__.py": "x = 1\n"}))
    environment.install(wheel)
    findings = json.loads(environment.script("hearth", "doctor", "--json").stdout)["findings"]
    found = [one["found"] for one in findings if one["check"] == "installation"]
    assert len(found) == 1
    assert found[0].startswith("config: settings 1.0 has installed "), found
