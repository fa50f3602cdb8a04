"""`make install` below a DESTDIR: what lies where, the daemon run from there as the service's user, upgrade and back."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from config.load import load
from daemon.process.version import VERSION
from tests.daemon.service_manager import NotifySocket, passing
from tests.e2e import processes
from tests.e2e.checkpoints import make_model
from tests.e2e.node import wait_gone

ROOT = Path(__file__).resolve().parents[2]
# where it is, not where a link to it lies: the service's user may be let into the one and not into the other
SITE = str(Path(sysconfig.get_paths()["purelib"]).resolve())


def usable_by_others(path: str) -> bool:
    """Whether any user may read it and pass through the folders it lies in."""
    real = Path(path).resolve()
    return all(folder.stat().st_mode & 0o005 == 0o005 for folder in [real, *real.parents])


def interpreter() -> str:
    """The one below the tests' environment, or the distribution's of the same version where others may not reach that one."""
    base = str(getattr(sys, "_base_executable", sys.executable))
    own = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    return own if not usable_by_others(base) and os.path.exists(own) else base


def make(destdir: Path, target: str, version: str = VERSION) -> str:
    """Nothing is downloaded: no dependency is installed, the new environment borrows this one's packages."""
    variables = {
        **os.environ,
        "PYTHONPATH": SITE,
        "VERSION": version,
        "VENV_ARGS": "--without-pip",
        "PIP_ARGS": "--no-deps --no-build-isolation --no-index --ignore-installed",
    }
    command = ["make", "-s", target, f"DESTDIR={destdir}", f"PYTHON={interpreter()}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=220, env=variables)
    assert result.returncode == 0, result.stdout + result.stderr
    if target == "install":
        (site,) = (destdir / "opt/hearthd" / version / "lib").glob("python*/site-packages")
        (site / "borrowed.pth").write_text(SITE + "\n")
        # so that a running daemon tells which version it is
        (site / "daemon/process/version.py").write_text(f'VERSION = "{version}"\n')
    return result.stdout


@pytest.fixture(scope="module")
def destdir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)  # pytest's own folders are closed to other users
        make(folder, "install")
        yield folder


@pytest.fixture(scope="module", autouse=True)
def untouched(destdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of all that `make install` has left, made before a test changes it: another install takes seconds."""
    return Path(shutil.copytree(destdir, tmp_path_factory.mktemp("untouched") / "destdir", symlinks=True))


class Service:
    """The daemon of DESTDIR's `current` version, started as the unit does: user, folders, notify socket, listener."""

    def __init__(self, destdir: Path, listener: socket.socket, user: int, group: int) -> None:
        self.root, self.listener, self.user, self.group = destdir, listener, user, group
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.control = destdir / "run/hearthd/control.sock"
        for path in ("run/hearthd", "var/cache/hearthd", "var/lib/hearthd"):
            (destdir / path).mkdir(parents=True, exist_ok=True)
            os.chown(destdir / path, user, group)

    @contextlib.contextmanager
    def running(self) -> Iterator[subprocess.Popen[str]]:
        programs = (self.root / "opt/hearthd/current").resolve() / "bin"
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)
            notify = NotifySocket(Path(name))
            os.chmod(Path(name) / "notify", 0o666)
            command = [
                str(programs / "python"),
                "-P",
                str(programs / "hearthd"),
                "--config",
                str(self.root / "etc/hearthd/node.toml"),
            ]
            command += ["--models", str(self.root / "var/lib/hearthd/models"), "--control", str(self.control)]
            command += ["--status-socket", str(self.control.with_name("status.sock")), "--runner", "null", "--device", "cpu=64MiB"]
            launch, fds = passing(command, [("http", self.listener.fileno())])
            launch[0] = interpreter()
            variables = {
                "PATH": "/usr/bin:/bin",
                "STATE_DIRECTORY": str(self.root / "var/lib/hearthd"),
                "CACHE_DIRECTORY": str(self.root / "var/cache/hearthd"),
                **notify.environment,
            }
            identity = {"user": self.user, "group": self.group, "extra_groups": []} if os.getuid() == 0 else {}
            process = subprocess.Popen(
                launch, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd="/", umask=0o077, env=variables,
                pass_fds=fds, start_new_session=True, **identity,
            )  # fmt: skip
            try:
                try:
                    notify.wait_for(
                        lambda messages: any("READY" in one for one in messages) or process.poll() is not None, "READY=1"
                    )
                    assert process.poll() is None
                except AssertionError:
                    process.kill()
                    raise AssertionError(process.communicate()[1]) from None
                yield process
            finally:
                children = [child.pid for child in psutil.Process(process.pid).children(True)] if process.poll() is None else []
                process.send_signal(signal.SIGTERM)
                try:
                    process.communicate(timeout=60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.communicate()
                notify.close()
                wait_gone(children)

    def get(self, path: str) -> object:
        with urllib.request.urlopen(self.url + path, timeout=60) as response:
            return json.load(response)

    def hearth(self, *args: str) -> dict[str, str]:
        programs = self.root / "opt/hearthd/current/bin"
        command = [str(programs / "python"), "-P", str(programs / "hearth"), "--control", str(self.control), *args, "--json"]
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}  # which may lead to other packages
        return dict(json.loads(subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, env=own).stdout))


@pytest.fixture
def service(destdir: Path) -> Iterator[Service]:
    if os.getuid() != 0:
        user, group = os.getuid(), os.getgid()
    elif not usable_by_others(interpreter()) or not usable_by_others(SITE):
        pytest.skip(f"other users cannot run {interpreter()} with {SITE}: the service's user cannot be simulated")
    elif shutil.which("systemd-sysusers"):
        subprocess.run(["systemd-sysusers", f"--root={destdir}", "hearthd.conf"], check=True, capture_output=True, timeout=60)
        line = next(one for one in (destdir / "etc/passwd").read_text().splitlines() if one.startswith("hearthd:"))
        user, group = (int(number) for number in line.split(":")[2:4])
        subprocess.run(
            ["systemd-tmpfiles", f"--root={destdir}", "--create", "hearthd.conf"], check=True, capture_output=True, timeout=60
        )
    else:
        user, group = pwd.getpwnam("nobody")[2:4]
    models = destdir / "var/lib/hearthd/models"
    models.mkdir(parents=True, exist_ok=True)
    if not (models / "a").exists():
        make_model(models / "a")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield Service(destdir, listener, user, group)


def test_a_private_folder_is_not_usable_by_others(destdir: Path) -> None:
    """What decides whether the service's user is simulated below."""
    folder = destdir / "var/private"
    (folder / "site").mkdir(parents=True)
    link = destdir / "var/link"
    link.symlink_to(folder / "site")
    assert usable_by_others(str(link))
    folder.chmod(0o700)
    assert not usable_by_others(str(link))
    link.unlink()
    shutil.rmtree(folder)


def test_what_lies_where(destdir: Path) -> None:
    local = destdir / "usr/local"
    for path in (
        "lib/systemd/system/hearthd.service", "lib/systemd/system/hearthd.socket", "lib/sysusers.d/hearthd.conf",
        "lib/tmpfiles.d/hearthd.conf", "share/man/man8/hearthd.8", "share/man/man1/hearth.1",
        "share/bash-completion/completions/hearth", "share/zsh/site-functions/_hearth",
        "share/fish/vendor_completions.d/hearth.fish",
    ):  # fmt: skip
        assert (local / path).stat().st_size > 0, path
    assert os.readlink(destdir / "opt/hearthd/current") == VERSION
    assert os.readlink(local / "bin/hearth") == "/opt/hearthd/current/bin/hearth"
    assert (destdir / "opt/hearthd/current/bin/hearthd").read_text().startswith(f"#!/opt/hearthd/{VERSION}/bin/python")
    for path in (destdir / "opt/hearthd" / VERSION / "bin").iterdir():
        if path.is_file() and not path.is_symlink():
            assert str(destdir).encode() not in path.read_bytes(), f"{path.name} names the folder it was made in"


def test_no_file_of_the_packages_is_left_behind(destdir: Path) -> None:
    """What is not Python must be named in pyproject.toml's package-data; an example of settings is no part of the program."""
    (site,) = (destdir / "opt/hearthd" / VERSION / "lib").glob("python*/site-packages")
    for package in ("config", "daemon", "engine", "hearthd", "loader", "scheduler"):
        for path in (ROOT / package).rglob("*"):
            name = path.relative_to(ROOT)
            if path.is_file() and "__pycache__" not in name.parts and str(name) != "config/example.toml":
                assert (site / name).exists(), name


def test_the_installed_settings_are_valid_and_name_no_model(destdir: Path) -> None:
    config = load(str(destdir / "etc/hearthd/node.toml"))
    assert (config.models_dir, config.models) == ("/var/lib/hearthd/models", {})


def test_settings_are_never_overwritten(destdir: Path) -> None:
    path = destdir / "etc/hearthd/node.toml"
    before = path.read_text()
    path.write_text(before + "# mine\n")
    assert "stays as it is" in make(destdir, "install")
    assert path.read_text() == before + "# mine\n"
    assert not list((destdir / "opt/hearthd").glob(".*")), "something half made is left"


def test_the_service_serves_from_there(service: Service) -> None:
    with service.running() as process:
        assert psutil.Process(process.pid).uids().real == service.user
        assert service.get("/v1/models")["data"][0]["id"] == "a"  # type: ignore[index]
        assert service.hearth("load", "a")["state"] == "ready", "an engine runs as that user, too"
        assert stat.S_IMODE(service.control.stat().st_mode) == 0o660
        assert stat.S_IMODE(service.control.with_name("status.sock").stat().st_mode) == 0o666
        assert service.control.stat().st_gid == service.group
        assert service.hearth("pin", "a")["ok"]
        assert (service.root / "var/lib/hearthd/state.json").exists()
    assert not service.control.exists()


def test_upgrade_and_back(service: Service) -> None:
    """New folder, link, restart: the old version runs on until then, with engines of its own; and back by the link."""
    newer = "99.0"
    try:
        with service.running() as process:
            make(service.root, "install", newer)
            assert os.readlink(service.root / "opt/hearthd/current") == newer
            assert service.hearth("version") == {"hearth": newer, "hearthd": VERSION}
            (engine,) = processes.engines(process.pid)
            engine.kill()
            assert service.hearth("load", "a")["state"] == "ready"
        with service.running():
            assert service.hearth("version") == {"hearth": newer, "hearthd": newer}
            assert service.get("/v1/models")["data"][0]["id"] == "a"  # type: ignore[index]
    finally:
        subprocess.run(["ln", "-sfn", VERSION, str(service.root / "opt/hearthd/current")], check=True)
    with service.running():
        assert service.hearth("version") == {"hearth": VERSION, "hearthd": VERSION}
        assert service.hearth("why", "a")["name"] == "a"


def test_uninstall_keeps_settings_and_models(untouched: Path) -> None:
    (untouched / "opt/hearthd/own").mkdir()
    (untouched / "var/lib/hearthd/models").mkdir(parents=True)
    assert "kept:" in make(untouched, "uninstall")
    left = {str(path.relative_to(untouched)) for path in untouched.rglob("*") if not path.is_dir() or not any(path.iterdir())}
    folders = {path for path in left if path.startswith("usr/local/")}
    assert all((untouched / path).is_dir() for path in folders), folders
    assert left - folders == {"etc/hearthd/node.toml", "var/lib/hearthd/models", "opt/hearthd/own"}
