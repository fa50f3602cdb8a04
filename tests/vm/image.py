"""A Debian with systemd as a disk image, with hearthd in it as `make install` puts it there. Debian's packages and the wheels are
fetched once; the image is made anew for every run, so that each begins with the same disk."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tests import clone
from tests.clone import ROOT

SUITE, PYTHON_VERSION = "bookworm", "3.11"
QEMU = "qemu-system-x86_64"
DEBIAN_PACKAGES = (
    *("ca-certificates", "dbus", "iproute2", "kmod", "linux-image-cloud-amd64", "make", "openssl", "procps", "python3"),
    *("python3-venv", "systemd", "systemd-sysv", "udev", "util-linux"),
)
CLONE, WHEELS, BUILD_WHEELS = "usr/src/hearthd", "usr/src/wheels", "usr/src/build-wheels"  # in the image
DISK_BYTES = 4 << 30  # the file is sparse
# torch is 1 GB and computes nothing here: the null runner needs neither it nor numba
NOT_NEEDED = {"torch"}
# what `make install` hands on to pip: no network, and no torch for the sake of hearthd's requirements
PIP_ARGS = f"--no-index --no-deps --find-links /{BUILD_WHEELS} /{WHEELS}/*.whl"

_UNIT = f"""
[Unit]
Description=The checks of tests/vm
After=multi-user.target
SuccessAction=poweroff
FailureAction=poweroff
[Service]
WorkingDirectory=/{CLONE}
Environment=PYTHONDONTWRITEBYTECODE=1
ExecStart=/usr/bin/python3 -m tests.vm.guest
StandardOutput=journal+console
StandardError=journal+console
[Install]
WantedBy=multi-user.target
"""

# $1: root; the rest is run in it. Mounts and processes are its own: none outlives it.
_ENTER = """
set -e
root=$1
shift
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/run"
exec chroot "$root" /usr/bin/env -i PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root LANG=C.UTF-8 "$@"
"""

# null models need a configuration and a tokenizer; `slow` takes 25 ms for each token
_MODELS = """
import os
os.umask(0o022)
from pathlib import Path
from tests.e2e.checkpoints import make_model
models = Path("/var/lib/hearthd/models")
make_model(models / "fast")
make_model(models / "slow", hearthd_null={"token_ms": 25})
"""


class CannotBuild(Exception):
    """A command that builds the image failed; the message says which."""


def missing() -> list[str]:
    """What this machine lacks, each with what brings it."""
    if platform.system() != "Linux":
        return [f"Linux: this is {platform.system()}"]
    lacks = []
    if platform.machine() != "x86_64":
        lacks.append(f"x86-64: the image is built by running its programs, and this machine is {platform.machine()}")
    if os.geteuid():
        lacks.append("root: the image is built in a chroot (sudo make test-vm)")
    programs = {QEMU: "qemu-system-x86", "mmdebstrap": "mmdebstrap", "unshare": "util-linux", "mke2fs": "e2fsprogs"}
    for program, package in programs.items():
        if not shutil.which(program):
            lacks.append(f"{program}: apt install --no-install-recommends {package}")
    return lacks


def build(folder: Path) -> None:
    """Makes folder/debian, where it is not there yet. Raises CannotBuild."""
    root, done = folder / "debian", folder / "debian.done"
    packages = ",".join(DEBIAN_PACKAGES)
    if done.exists() and done.read_text() == packages:
        return
    print(f"Building Debian {SUITE} in {folder} (420 MB; two minutes)", flush=True)
    shutil.rmtree(root, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    _run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", SUITE, str(root)])
    done.write_text(packages)


def fetch_wheels(folder: Path) -> None:
    """Makes folder/wheels and folder/build-wheels, where they are not those of pyproject.toml yet. Raises CannotBuild."""
    done = folder / "wheels.done"
    digest = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if done.exists() and done.read_text() == digest:
        return
    print("Fetching wheels (40 MB)", flush=True)
    for name in ("wheels", "build-wheels"):
        shutil.rmtree(folder / name, ignore_errors=True)
    _run([sys.executable, "-m", "venv", "--clear", str(folder / "host")])
    pip = [str(folder / "host" / "bin" / "python"), "-m", "pip", "download", "-qq", "--disable-pip-version-check"]
    pip += ["--python-version", PYTHON_VERSION, "--only-binary=:all:"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    _run([*pip, "-d", str(folder / "wheels"), *wanted(project["project"]["dependencies"])])
    _run([*pip, "-d", str(folder / "build-wheels"), *project["build-system"]["requires"]])
    done.write_text(digest)


def wanted(requirements: Sequence[str]) -> list[str]:
    """Those of the project's requirements that a node with the null runner needs."""
    names = {line: re.match(r"[A-Za-z0-9._-]+", line) for line in requirements}
    return [line for line, name in names.items() if name and name[0].lower() not in NOT_NEEDED]


def make_disk(folder: Path) -> None:
    """Makes folder/disk.img of Debian, the clone and hearthd installed from it, folder/vmlinuz and folder/initrd. Raises
    CannotBuild."""
    print("Installing hearthd into a copy of it, by make install", flush=True)
    root = folder / "root"
    shutil.rmtree(root, ignore_errors=True)
    _run(["cp", "-a", str(folder / "debian"), str(root)])
    clone.copy_to(root / CLONE)
    shutil.copytree(folder / "wheels", root / WHEELS)
    shutil.copytree(folder / "build-wheels", root / BUILD_WHEELS)
    (root / "etc/systemd/system/vm-checks.service").write_text(_UNIT.lstrip())
    (root / "etc/hostname").write_text("hearthd-vm\n")
    _run(inside(root, f"cd /{CLONE} && make -s install PIP_ARGS='{PIP_ARGS}'"))
    _run(inside(root, f"cd /{CLONE} && /opt/hearthd/current/bin/python -c {shlex.quote(_MODELS)}"))
    _run(inside(root, "useradd -m -G hearthd ada && useradd -m bob && systemctl -q enable vm-checks"))
    for name in ("vmlinuz", "initrd.img"):
        (found,) = (root / "boot").glob(f"{name}-*")
        shutil.copy(found, folder / name)
    disk = folder / "disk.img"
    disk.unlink(missing_ok=True)
    _run(["mke2fs", "-q", "-t", "ext4", "-d", str(root), str(disk), f"{DISK_BYTES >> 10}k"])
    shutil.rmtree(root)


def inside(root: Path, script: str) -> list[str]:
    """What runs a shell script in a root folder."""
    alone = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    return [*alone, "sh", "-c", _ENTER, "sh", str(root), "sh", "-ec", script]


def _run(argv: Sequence[str]) -> None:
    """What a command writes is shown if it fails: the compiling of kernels, say, complains that there is no torch."""
    done = subprocess.run(argv, check=False, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise CannotBuild(f"{done.stdout}failed: {shlex.join(argv)}")
