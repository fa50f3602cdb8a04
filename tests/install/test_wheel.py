"""The wheel: what is in it, and that all of hearthd runs from it, away from the clone."""

from __future__ import annotations

import json
import re
import tomllib
import zipfile
from pathlib import Path

import pytest

from daemon.process.version import VERSION
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node
from tests.install.environments import PACKAGES, ROOT, Environment, plain_environment

ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0}  # drawn, a token may end it


class InstalledNode(Node):
    """A daemon of an environment, started in a folder that is not the clone, with nothing that leads there."""

    def __init__(self, environment: Environment, folder: Path, runner: str) -> None:
        super().__init__(folder, runner=runner, program=("-P", str(environment.folder / "bin/hearthd")))
        self.python = environment.python

    def warm(self) -> None:
        """Nothing: without numba there are no kernels, and the null runner has none."""

    def environment(self) -> dict[str, str]:
        return plain_environment()


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Environment:
    """hearthd as `pip install` without an extra leaves it: no numba, no triton."""
    environment = Environment.make(tmp_path_factory.mktemp("bare") / "environment", without=("numba", "llvmlite", "triton"))
    environment.install(wheel)
    return environment


def test_all_that_is_not_python_is_in_the_wheel(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in PACKAGES:
        assert f"{package}/py.typed" in names, package
        for path in (ROOT / package).rglob("*"):
            name = str(path.relative_to(ROOT))
            if path.is_file() and "__pycache__" not in name and name != "config/example.toml":
                assert name in names, name
    tops = {name.partition("/")[0] for name in names}
    assert tops == {*PACKAGES, f"hearthd-{VERSION}.dist-info", f"hearthd-{VERSION}.data"}
    data = f"hearthd-{VERSION}.data/data/share"
    assert {f"{data}/man/man1/hearth.1", f"{data}/man/man8/hearthd.8", f"{data}/doc/hearthd/example.toml"} <= names


def test_no_module_reaches_for_what_only_the_clone_has() -> None:
    """Its own files lie below the packages; docs, benchmarks, demo and tests do not come along."""
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for line in path.read_text().splitlines():
                assert not re.match(r"\s*(from|import) (benchmarks|demo|tests)\b", line), f"{path}: {line}"


def test_the_null_runner_serves_from_it(installed: Environment, tmp_path: Path) -> None:
    make_model(tmp_path / "n/models/a")
    with InstalledNode(installed, tmp_path / "n", "null") as node:
        assert node.process is not None
        assert node.get("/v1/models")[1]["data"][0]["id"] == "a"
        assert "<title>" in node.get("/")[1], "the status page is package data"
        assert node.json("load", "a")["state"] == "ready"
        assert node.json("version") == {"hearth": VERSION, "hearthd": VERSION}
        doctor = json.loads(node.cli("doctor", "--json").stdout)["findings"]
        assert next(one for one in doctor if one["check"] == "installation")["level"] == "ok"


def test_a_checkpoint_is_served_without_any_extra(bare: Environment, tmp_path: Path) -> None:
    """By torch's operations; log, --check-config and doctor say what that costs and how to mend it."""
    make_model(tmp_path / "n/models/a")
    with InstalledNode(bare, tmp_path / "n", "torch") as node:
        answer = node.openai().chat.completions.create(model="a", **ASK)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "length"
        doctor = json.loads(node.cli("doctor", "--json").stdout)["findings"]
        log = node.log_text()
    told = f"numba is not installed: cpu devices compute with torch's operations alone, at a fraction of the speed; {bare.python}"
    assert f"{told} -m pip install 'numba>=0.61'" in log
    assert "Traceback" not in log
    (finding,) = [one for one in doctor if one["check"] == "device packages"]
    assert (finding["level"], finding["change"]) == ("warn", f"{bare.python} -m pip install 'numba>=0.61'")
    checked = bare.script("hearthd", "--check-config", "--models", str(tmp_path / "n/models"), "--device", "cpu=64MiB")
    assert checked.returncode == 0
    assert "hearthd: warning: numba is not installed" in checked.stderr


def test_a_required_package_is_missing(wheel: Path, tmp_path: Path) -> None:
    """As after `pip install --no-deps`."""
    environment = Environment.make(tmp_path / "environment", without=("msgspec", "uvloop"))
    environment.install(wheel)
    for program, words in (("hearthd", ["--models", "/tmp"]), ("hearth", ["doctor"])):
        result = environment.script(program, *words)
        assert result.returncode == 1, result.stdout
        assert result.stderr.startswith(
            f"{program}: the Python package msgspec is not installed: {environment.python} -m pip install "
        )
        assert "'msgspec>=0.19' 'uvloop>=0.21'" in result.stderr
        assert result.stderr.count("\n") == 1


def test_extras_named_in_the_docs_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), ROOT / "Containerfile"):
        for found in re.findall(r"(?:hearthd|\.|\.whl)\[([a-z,]+)\]", page.read_text()):
            named |= set(found.split(","))
    assert named
    assert named <= set(extras)
