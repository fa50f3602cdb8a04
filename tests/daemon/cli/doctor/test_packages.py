"""What doctor says of Python packages, on made-up installations."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from daemon.cli.doctor import packages
from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding
from daemon.process import installation
from hearthd.collisions import ELSEWHERE, SHARED, Collision

ASKED = ["aiohttp>=3.11", "uvloop>=0.21", "torch>=2.11", 'numba>=0.61; extra == "cpu"', 'cuda-bindings>=12.9; extra == "cuda"']
ASKED += ['triton>=3.6; sys_platform == "linux" and extra == "cuda"', 'pytest>=8; extra == "test"']
WHOLE = {"aiohttp": "3.11.1", "uvloop": "0.21.0", "torch": "2.13.0+cpu", "numba": "0.61.0", "libgomp": "1"}
Install = Callable[[dict[str, str]], None]


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Says which packages there are, in which versions."""

    def install(versions: dict[str, str]) -> None:
        monkeypatch.setattr(metadata, "requires", lambda name: {"hearthd": ASKED}[name])
        monkeypatch.setattr(installation, "installed_version", lambda package: versions.get(package, ""))
        monkeypatch.setattr(installation, "has_openmp", lambda: "libgomp" in versions)
        monkeypatch.setattr(installation, "is_there", lambda package: package in versions)

    return install


def found(devices: list[str]) -> dict[str, list[Finding]]:
    findings: dict[str, list[Finding]] = {}
    for one in packages.find_packages(devices):
        findings.setdefault(one.check, []).append(one)
        assert bool(one.change) == (one.level != OK), one
    return findings


def test_all_is_there(installed: Install) -> None:
    installed(WHOLE)
    (required,) = found(["cpu:0"])["packages"]
    assert (required.level, required.found) == (OK, "aiohttp 3.11.1, uvloop 0.21.0, torch 2.13.0+cpu")
    (devices,) = found(["cpu:0"])["device packages"]
    assert devices.found == "numba 0.61.0, no triton, which only cuda devices need, no cuda-bindings, which only cuda devices need"


def test_missing_and_too_old(installed: Install) -> None:
    installed({"aiohttp": "3.9.5", "torch": "2.13.0", "numba": "0.60.0"})
    old, missing, extra = found(["cpu:0"])["packages"]
    pip = f"{sys.executable} -m pip install"
    assert old == Finding("packages", FAIL, "aiohttp 3.9.5 is installed: hearthd needs aiohttp>=3.11", f"{pip} 'aiohttp>=3.11'")
    assert missing == Finding("packages", FAIL, "uvloop is not installed: hearthd needs it", f"{pip} 'uvloop>=0.21'")
    assert extra == Finding("packages", WARN, "numba 0.60.0 is installed: hearthd needs numba>=0.61", f"{pip} 'numba>=0.61'")


def test_numba_is_missing(installed: Install) -> None:
    installed({name: version for name, version in WHOLE.items() if name != "numba"})
    (lack,) = found(["cpu:0", "cpu:1"])["device packages"]
    assert (lack.level, lack.change) == (WARN, f"{sys.executable} -m pip install 'numba>=0.61'")
    assert "numba is not installed" in lack.found
    assert "fraction of the speed" in lack.found
    installed({"torch": "2.13.0", "triton": "3.6.0", "cuda-bindings": "13.0.3"})
    assert found(["cuda:0"])["device packages"][0].found.startswith(
        "no numba, which only cpu devices and packed weights need, triton 3.6.0"
    )


def test_openmp_is_missing(installed: Install) -> None:
    """Slim containers lack it: torch has a libgomp of its own, but Numba's wheels look for the system's."""
    installed({name: version for name, version in WHOLE.items() if name != "libgomp"})
    (lack,) = found(["cpu:0"])["device packages"]
    assert (lack.level, "numba finds no libgomp.so.1" in lack.found, "apt-get install libgomp1" in lack.change) == (
        WARN,
        True,
        True,
    )


def test_what_gpus_need_is_missing(installed: Install) -> None:
    installed(WHOLE)
    triton, bindings, torch = found(["cuda:0"])["device packages"]
    assert {triton.level, bindings.level, torch.level} == {FAIL}
    assert "triton is not installed: cuda devices cannot be used" in triton.found
    assert triton.change.endswith("'triton>=3.6'")
    assert "cuda-bindings is not installed" in bindings.found
    assert torch.found == "torch 2.13.0+cpu is built without CUDA: cuda devices cannot be used"
    assert "--force-reinstall --index-url https://pypi.org/simple" in torch.change


def test_hearthd_runs_from_its_folder(installed: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(WHOLE)

    def unknown(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    (required,) = found(["cpu:0"])["packages"]
    assert (required.level, "is not installed, so nothing says what it needs" in required.found) == (WARN, True)


def test_pipx_has_a_command_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "hearthd").mkdir()
    (tmp_path / "hearthd/pipx_metadata.json").touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "hearthd"))
    assert installation.install_command("numba>=0.61") == "pipx runpip hearthd install 'numba>=0.61'"


def test_collisions() -> None:
    breaks = Collision("config", ELSEWHERE, "/x/config/__init__.py", "")
    shares = Collision("daemon", SHARED, "/y/daemon/__init__.py", "python-daemon 3.1")
    first, second = packages.installed([breaks, shares])
    assert (first.check, first.level, second.level) == ("installation", FAIL, WARN)
    assert "/x/config/__init__.py, of no distribution that is installed" in first.found
    assert "pip uninstall python-daemon" in second.change
    assert packages.installed([])[0].level == OK


def test_packages_are_looked_for_without_being_imported() -> None:
    assert installation.is_there("msgspec")
    assert not installation.is_there("no-such-package")
    assert installation.is_there("cuda-bindings") in (True, False), "its module lies in another package, which may be missing"
