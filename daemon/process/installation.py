"""What of the Python packages that hearthd asks for is not installed beside it, what that costs, and the command that mends it.

Two kinds: those without which nothing runs (`required`), and those that a kind of device needs (`of_devices`). Nothing is imported
here: a package is looked for, and its version read from what its installer has written.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass

NUMBA, TRITON, BINDINGS, TORCH = "numba", "triton", "cuda-bindings", "torch"
# what is no requirement of all -> what needs it; numba also decodes packed weights, numpy does without it
NEEDED_BY = {NUMBA: "cpu devices and packed weights", TRITON: "cuda devices", BINDINGS: "cuda devices"}
_MODULES = {BINDINGS: "cuda.bindings"}  # where it is not the distribution's name
SLOW_CPU = "cpu devices compute with torch's operations alone, at a fraction of the speed"

ONE_AT_A_TIME = "kernels run on threads of Numba's own beside torch's, and models of a cpu device never at the same time"
GET_OPENMP = "install the system's libgomp: apt-get install libgomp1, or dnf install libgomp"


@dataclass(frozen=True, slots=True)
class Lack:
    """package: its distribution's name. found: what is the matter with it. cost: what that takes away. stops: all of it. change: a
    command."""

    package: str
    found: str
    cost: str
    stops: bool
    change: str

    def __str__(self) -> str:
        return f"{self.found}: {self.cost}; {self.change}"


def is_there(package: str) -> bool:
    """Whether Python finds the package; it may be of any version."""
    try:
        return importlib.util.find_spec(_MODULES.get(package, package)) is not None
    except ModuleNotFoundError:  # of the package it lies in
        return False


def has_openmp() -> bool:
    """Whether the system has GCC's OpenMP. Numba's wheels need it for their threads; torch brings one, which they do not find."""
    try:
        ctypes.CDLL("libgomp.so.1")
    except OSError:
        return False
    return True


def of_devices(devices: Iterable[str]) -> list[Lack]:
    """Returns what devices of these names need and do not have, for the runner that computes."""
    kinds = {name.partition(":")[0] for name in devices}
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
    """Returns "" where no installer has written one down."""
    from importlib import metadata  # 10 ms, and only where something is amiss

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def requirement(package: str) -> str:
    """Returns what hearthd asks for, as in pyproject.toml: `numba>=0.61`; the bare name where hearthd itself is not installed."""
    from importlib import metadata

    from packaging.requirements import Requirement

    try:
        asked = map(Requirement, metadata.requires("hearthd") or [])
    except metadata.PackageNotFoundError:
        return package
    return next((f"{one.name}{one.specifier}" for one in asked if one.name == package), package)


def required() -> tuple[list[str], list[Lack]]:
    """Returns what is there of hearthd's requirements without an extra, as `aiohttp 3.11.1`, and what is missing or too old; also
    what is there of an extra's and too old. Raises PackageNotFoundError where hearthd is not installed but runs from its folder."""
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
    """What installs into the environment this process runs in. words: requirements and options of pip."""
    given = " ".join(map(shlex.quote, words))
    if os.path.exists(os.path.join(sys.prefix, "pipx_metadata.json")):
        return f"pipx runpip {shlex.quote(os.path.basename(sys.prefix))} install {given}"
    return f"{shlex.quote(sys.executable)} -m pip install {given}"


def cuda_torch_command() -> str:
    """Puts a build with CUDA, as PyPI has it, in the place of one without, which pip takes for its equal."""
    return install_command("--force-reinstall", "--index-url", "https://pypi.org/simple", requirement(TORCH))
