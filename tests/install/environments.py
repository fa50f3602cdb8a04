"""Virtual environments with hearthd's wheel and made-up distributions in them, installed by pip. Nothing is downloaded."""

from __future__ import annotations

import base64
import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SITE = Path(sysconfig.get_paths()["purelib"]).resolve()
PACKAGES = ("config", "daemon", "engine", "hearthd", "loader", "scheduler")


def run(command: list[str], **more: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=220, env=plain_environment(), **more)  # type: ignore[call-overload, no-any-return]


def plain_environment() -> dict[str, str]:
    """This process's own, in which nothing leads to the clone."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONSAFEPATH")}


def build_wheel(folder: Path) -> Path:
    """Builds hearthd's wheel from a copy of what a build needs, so that nothing is left in the clone."""
    with tempfile.TemporaryDirectory() as name:
        for one in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / one, name)
        for one in PACKAGES:
            shutil.copytree(ROOT / one, Path(name) / one, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(ROOT / "docs/man", Path(name) / "docs/man")
        command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-index"]
        result = run([*command, "-w", str(folder), name])
        assert result.returncode == 0, result.stderr
    (wheel,) = folder.glob("hearthd-*.whl")
    return wheel


def foreign_wheel(folder: Path, name: str, files: Mapping[str, str], version: str = "1.0") -> Path:
    """Writes the wheel of another distribution."""
    info = f"{name.replace('-', '_')}-{version}.dist-info"
    texts = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    lines = []
    for path, text in texts.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{path},sha256={digest},{len(text.encode())}\n")
    texts[f"{info}/RECORD"] = "".join([*lines, f"{info}/RECORD,,\n"])
    wheel = folder / f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in texts.items():
            archive.writestr(path, text)
    return wheel


class Environment:
    """A virtual environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def make(cls, folder: Path, without: Collection[str] = ()) -> Environment:
        """Makes one without pip that borrows this process's packages, all but `without`, and nothing of the clone."""
        environment = cls(folder)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=220)
        borrowed = folder / "borrowed"
        borrowed.mkdir()
        for one in SITE.iterdir():
            name = one.name.lower().replace("_", "-").partition(".")[0]
            if "hearthd" not in one.name and not any(name == out or name.startswith(f"{out}-") for out in without):
                (borrowed / one.name).symlink_to(one)
        (environment.site / "borrowed.pth").write_text(f"{borrowed}\n")
        return environment

    def copy(self, folder: Path) -> Environment:
        """Makes another one of it, whose scripts are run by its own python here, whatever their first lines say."""
        shutil.copytree(self.folder, folder, symlinks=True)
        return Environment(folder)

    @property
    def site(self) -> Path:
        (found,) = (self.folder / "lib").glob("python*/site-packages")
        return found

    @property
    def python(self) -> str:
        return str(self.folder / "bin" / "python")

    def pip(self, *words: str) -> None:
        # another pip than its own does the same work, in a tenth of the time that giving it one takes
        command = [sys.executable, "-m", "pip", "--python", self.python, *words]
        result = run(command)
        assert result.returncode == 0, result.stdout + result.stderr

    def install(self, wheel: Path) -> None:
        self.pip(
            "install", "-q", "--no-deps", "--no-index", "--force-reinstall", "--no-compile", "--no-warn-script-location", str(wheel)
        )

    def script(self, name: str, *words: str, cwd: str | Path = "/", **variables: str) -> subprocess.CompletedProcess[str]:
        """Runs a console script of it."""
        return self.call(str(self.folder / "bin" / name), *words, cwd=cwd, **variables)

    def module(self, name: str, *words: str, cwd: str | Path = "/") -> subprocess.CompletedProcess[str]:
        """Runs `python -m NAME`."""
        return self.call("-m", name, *words, cwd=cwd)

    def call(self, *words: str, cwd: str | Path = "/", **variables: str) -> subprocess.CompletedProcess[str]:
        environment = {**plain_environment(), **variables}
        return subprocess.run([self.python, *words], capture_output=True, text=True, timeout=220, cwd=cwd, env=environment)
