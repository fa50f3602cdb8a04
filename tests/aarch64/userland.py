"""An aarch64 Debian in a folder, whose programs this machine runs by qemu-user. Built once; a copy of the clone is put into it for
every run, so that nothing of the clone is written to."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests import clone
from tests.clone import ROOT

SUITE, PYTHON_VERSION = "bookworm", "3.11"
QEMU = "qemu-aarch64-static"
DEBIAN_PACKAGES = ("ca-certificates", "python3", "python3-pip", "python3-venv")
SITE = f"usr/local/lib/python{PYTHON_VERSION}/dist-packages"
CLONE = "hearthd"  # in the userland
# What the tests that are chosen import, of the extras; the rest checks or compiles, which needs no other architecture.
EXTRAS = ("cpu", "test")
NOT_NEEDED = {"mypy", "ruff", "triton"}
NOT_OF_TORCH = {"cuda-bindings", "triton"}  # that it imports only where it is asked to; the other libraries it is linked with
PLATFORMS = ("manylinux2014_aarch64", *(f"manylinux_2_{minor}_aarch64" for minor in range(17, 37)))  # glibc 2.36
_BINFMT = Path("/proc/sys/fs/binfmt_misc")
_ENTRY = "hearthd-aarch64"
# magic and mask of a 64-bit little-endian ELF executable or shared object for machine 0xb7; F: opened now, so it works in a chroot
_FORMAT = (
    rf":{_ENTRY}:M::\x7fELF\x02\x01\x01\x00\x00\x00\x00\x00\x00\x00\x00\x00\x02\x00\xb7\x00"
    r":\xff\xff\xff\xff\xff\xff\xff\x00\xff\xff\xff\xff\xff\xff\xff\xff\xfe\xff\xff\xff"
)


@dataclass(slots=True, frozen=True)
class Processor:
    """qemu: its -cpu. features and part: as /proc/cpuinfo has them, where LLVM looks; qemu-user shows the host's."""

    qemu: str
    part: str
    features: str


PROCESSORS = {
    "neoverse-v1": Processor(
        # "max" alone has vectors of 512 bits, where a Neoverse V1 has 256; the other way of computing pointers' signatures is slow
        "max,sve-max-vq=2,pauth-impdef=on",
        "0xd40",
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm jscvt fcma lrcpc dcpop sha3 sm3 sm4 asimddp"
        " sha512 sve asimdfhm dit uscat ilrcpc flagm ssbs paca pacg dcpodp svei8mm svebf16 i8mm bf16 dgh rng",
    ),
    "neoverse-n1": Processor(
        "neoverse-n1",
        "0xd0c",
        "fp asimd evtstrm aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp ssbs",
    ),
    "cortex-a72": Processor("cortex-a72", "0xd08", "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"),
}


class CannotBuild(Exception):
    """A command that builds the userland failed; the message says which."""


def missing() -> list[str]:
    """What this machine lacks, each with what brings it."""
    lacks = []
    if platform.system() != "Linux":
        return [f"Linux: this is {platform.system()}"]
    if platform.machine() == "aarch64":
        return ["another architecture: this machine is aarch64, where `make test` runs everything"]
    if os.geteuid():
        lacks.append("root: mounts, chroot and binfmt_misc need it (sudo make test-aarch64)")
    programs = {QEMU: "qemu-user-static", "mmdebstrap": "mmdebstrap", "arch-test": "arch-test", "unshare": "util-linux"}
    for program, package in programs.items():
        if not shutil.which(program):
            lacks.append(f"{program}: apt install --no-install-recommends {package}")
    if not lacks and not (_BINFMT / "register").exists():
        mounted = subprocess.run(["mount", "-t", "binfmt_misc", "binfmt_misc", str(_BINFMT)], capture_output=True, check=False)
        if mounted.returncode:
            lacks.append("binfmt_misc: the kernel neither has it mounted nor lets it be")
    return lacks


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """While it lasts Linux starts aarch64 programs by qemu, in a chroot too."""
    entry = _BINFMT / _ENTRY
    if entry.exists():  # of a run that was killed
        entry.write_text("-1")
    (_BINFMT / "register").write_text(f"{_FORMAT}:{shutil.which(QEMU)}:F")
    try:
        yield
    finally:
        entry.write_text("-1")


def build(folder: Path) -> Path:
    """The userland's root, made where it is not there yet. Raises CannotBuild."""
    root, done = folder / "root", folder / "root.done"
    if not done.exists():
        print(f"Building Debian {SUITE} for arm64 in {folder} (300 MB; some minutes, as its programs are emulated)", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        packages = ",".join(DEBIAN_PACKAGES)
        _run(["mmdebstrap", "--quiet", "--arch=arm64", "--variant=minbase", f"--include={packages}", SUITE, str(root)])
        done.touch()
    return root


def install(folder: Path) -> None:
    """Wheels of everything but the project into the userland, by this machine's pip, which takes seconds where the emulated one
    takes minutes. Raises CannotBuild."""
    site, done = folder / "root" / SITE, folder / "site.done"
    digest = hashlib.sha256(b"".join((ROOT / name).read_bytes() for name in ("pyproject.toml", "constraints.txt"))).hexdigest()
    if done.exists() and done.read_text() == digest:
        return
    print("Installing wheels for aarch64 (4.5 GB of disk: torch comes with CUDA only, and linked with its libraries)", flush=True)
    shutil.rmtree(site, ignore_errors=True)
    host = folder / "host"
    _run([sys.executable, "-m", "venv", "--clear", str(host)])
    pip = [str(host / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--target", str(site)]
    pip += ["--python-version", PYTHON_VERSION, "--only-binary=:all:", *(f"--platform={name}" for name in PLATFORMS)]
    _run([*pip, "--no-deps", *(line for line in _lines(ROOT / "constraints.txt") if _name(line) == "torch")])
    _run([*pip, *_requirements(), *_torch_requirements(site)])
    done.write_text(digest)


def _requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    return [line for line in wanted if _name(line) not in NOT_NEEDED | {"torch"}]


def _torch_requirements(site: Path) -> list[str]:
    (metadata,) = site.glob("torch-*.dist-info/METADATA")
    lines = [line.partition(": ")[2] for line in _lines(metadata) if line.startswith("Requires-Dist: ")]
    return [line for line in lines if "extra ==" not in line and _name(line) not in NOT_OF_TORCH]


def _name(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    return found[0].lower() if found else ""


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def copy_clone(root: Path) -> None:
    """What git tracks, or would, to the userland, with its times: Numba's cache goes by them. What was there goes, but for
    compiled kernels."""
    copy = root / CLONE
    copy.mkdir(exist_ok=True)
    for old in copy.iterdir():
        if old.name != ".pytest_cache":
            shutil.rmtree(old) if old.is_dir() else old.unlink()
    clone.copy_to(copy)
    shutil.copy2("/etc/resolv.conf", root / "etc" / "resolv.conf")


# $1: root, $2: cpuinfo, $3: folder, $4: qemu's -cpu; then the command
_ENTER = """
set -e
root=$1 cpuinfo=$2 folder=$3 cpu=$4
shift 4
mount -t proc proc "$root/proc"
mount --bind "$cpuinfo" "$root/proc/cpuinfo"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
mount -t tmpfs tmpfs "$root/tmp"
cd "$root/$folder"
exec chroot "$root" /usr/bin/env -i -C "/$folder" PATH=/usr/local/bin:/usr/bin:/bin HOME=/root LANG=C.UTF-8 \\
    QEMU_CPU="$cpu" HEARTHD_TESTS_SLOWER=20 "$@"
"""


def command(root: Path, processor: str, argv: Sequence[str]) -> list[str]:
    """What runs argv in the copy of the clone. Mounts and processes are its own: none outlives it."""
    cpuinfo = root / "etc" / "cpuinfo"
    cpuinfo.write_text(_cpuinfo(PROCESSORS[processor]))
    alone = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
    return [*alone, "sh", "-c", _ENTER, "sh", str(root), str(cpuinfo), CLONE, PROCESSORS[processor].qemu, *argv]


def _cpuinfo(processor: Processor) -> str:
    core = f"Features\t: {processor.features}\nCPU implementer\t: 0x41\nCPU architecture: 8\nCPU variant\t: 0x1\n"
    core += f"CPU part\t: {processor.part}\nCPU revision\t: 1\n\n"
    return "".join(f"processor\t: {number}\nBogoMIPS\t: 2100.00\n{core}" for number in range(os.cpu_count() or 1))


def _run(argv: Sequence[str]) -> None:
    print(f"$ {shlex.join(argv)}", flush=True)
    if subprocess.run(argv, check=False).returncode:
        raise CannotBuild(f"failed: {shlex.join(argv)}")
