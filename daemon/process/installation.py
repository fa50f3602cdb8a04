"""Finds out which of the Python packages that hearthd needs are missing, the consequences, and the command that installs them.

There are two kinds: packages without which nothing runs (`required`), and packages that a kind of device needs (`of_devices`). The
packages are not imported: the import system is asked for them, and the versions are read from the installers' metadata.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from config.device_names import host_of, kind_of

NUMBA, TRITON, BINDINGS, TORCH = "numba", "triton", "cuda-bindings", "torch"
# optional package -> what needs it; numba also decodes packed weights, which numpy does without it
NEEDED_BY = {NUMBA: "cpu devices and packed weights", TRITON: "cuda devices", BINDINGS: "cuda devices"}
_MODULES = {BINDINGS: "cuda.bindings"}  # module names of packages, if they differ
SLOW_CPU = "cpu devices compute with torch's operations alone, at a fraction of the speed"

ONE_AT_A_TIME = "kernels run on threads of Numba's own beside torch's, and models of a cpu device never at the same time"
GET_OPENMP = "install the system's libgomp: apt-get install libgomp1, or dnf install libgomp"


@dataclass(frozen=True, slots=True)
class Lack:
    """A package that is missing or unsuitable. package: the name of its distribution. found: what is wrong with it. cost: the
    consequence, in words. stops: whether something does not work at all because of it; otherwise it is only slower. change: the
    command that repairs it."""

    package: str
    found: str
    cost: str
    stops: bool
    change: str

    def __str__(self) -> str:
        return f"{self.found}: {self.cost}; {self.change}"


def is_there(package: str) -> bool:
    """Returns whether Python finds the package, in any version. package: the name of its distribution."""
    try:
        return importlib.util.find_spec(_MODULES.get(package, package)) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def has_openmp() -> bool:
    """Returns whether the system has GCC's OpenMP library, libgomp. The wheels of Numba need it for their threads, and do not find
    the copy that torch brings."""
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return False
    return True


def of_devices(devices: Iterable[str]) -> list[Lack]:
    """Returns the packages that are missing or unsuitable for computing models on these devices. devices: their names. Devices of
    other hosts are ignored, because their hosts compute for them."""
    kinds = {kind_of(name) for name in devices if not host_of(name)}
    found = []
    if not is_there(TORCH):
        found.append(_lack(TORCH, "no model can be computed", stops=True))
    if "cpu" in kinds and not is_there(NUMBA):
        found.append(_lack(NUMBA, SLOW_CPU, stops=False))
    elif "cpu" in kinds and not has_openmp():
        found.append(Lack(NUMBA, "numba finds no libgomp.so.1", ONE_AT_A_TIME, False, GET_OPENMP))
    if "cuda" in kinds:
        cost = "cuda devices cannot be used"
        found += [_lack(package, cost, stops=True) for package in (TRITON, BINDINGS) if not is_there(package)]
        if is_there(TORCH) and (version := installed_version(TORCH)).endswith("+cpu"):
            found.append(Lack(TORCH, f"torch {version} is built without CUDA", cost, True, cuda_torch_command()))
    return found


def _lack(package: str, cost: str, stops: bool) -> Lack:
    return Lack(package, f"{package} is not installed", cost, stops, install_command(requirement(package)))


def installed_version(package: str) -> str:
    """Returns the installed version of the package, or "" if no installer has recorded one."""
    from importlib import metadata  # takes 10 ms, and is needed only if something is wrong

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def requirement(package: str) -> str:
    """Returns hearthd's requirement for a package, as written in pyproject.toml: `numba>=0.61`. Returns the package's name alone if
    there is none or hearthd itself is not installed."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        asked = map(Requirement, metadata.requires("hearthd") or [])
    except metadata.PackageNotFoundError:
        return package
    return next((f"{one.name}{one.specifier}" for one in asked if one.name == package), package)


def required() -> tuple[list[str], list[Lack]]:
    """Checks the packages that hearthd requires, and those in NEEDED_BY, which its extras require.

    Returns two lists: the requirements that are met, as `aiohttp 3.11.1` (without those of extras), and the packages that are
    missing or too old. A package of an extra is listed only if the installed version is too old. Raises PackageNotFoundError if
    hearthd is not installed but runs from its folder."""
    from importlib import metadata

    from packaging.requirements import Requirement

    there, lacking = [], []
    for one in map(Requirement, metadata.requires("hearthd") or []):
        is_extra = one.marker is not None and not one.marker.evaluate({"extra": ""})
        version = installed_version(one.name)
        if is_extra and one.name not in NEEDED_BY:
            continue
        asked = f"{one.name}{one.specifier}"
        if not version:
            if not is_extra:
                lacking.append(Lack(one.name, f"{one.name} is not installed", "hearthd needs it", True, install_command(asked)))
        elif not one.specifier.contains(version, prereleases=True):
            cost = f"hearthd needs {asked}"
            lacking.append(Lack(one.name, f"{one.name} {version} is installed", cost, not is_extra, install_command(asked)))
        elif not is_extra:
            there.append(f"{one.name} {version}")
    return there, lacking


def install_command(*words: str) -> str:
    """Returns the shell command that installs packages into the Python environment of this process. words: requirements and options
    for pip."""
    given = " ".join(map(shlex.quote, words))
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx runpip {shlex.quote(os.path.basename(sys.prefix))} install {given}"
    return f"{shlex.quote(sys.executable)} -m pip install {given}"


def cuda_torch_command() -> str:
    """Returns the shell command that replaces an installed torch without CUDA by the build with CUDA from PyPI. It has options
    without which pip would regard the two builds as equal and do nothing."""
    return install_command("--force-reinstall", "--index-url", "https://pypi.org/simple", requirement(TORCH))
