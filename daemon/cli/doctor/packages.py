"""Checks the Python packages: hearthd's own, those that it needs, and those that one kind of device needs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import metadata

from daemon.cli.doctor.finding import FAIL, OK, WARN, Finding
from daemon.process import installation
from daemon.process.installation import Lack
from daemon.process.version import VERSION
from hearthd import collisions
from hearthd.packages import HOME


def installed(found: Sequence[collisions.Collision]) -> list[Finding]:
    """Returns the findings on hearthd's own packages. found: packages of other distributions with the same names, which Python may
    import in place of hearthd's."""
    if not found:
        python = ".".join(map(str, sys.version_info[:3]))
        return [Finding("installation", OK, f"hearthd {VERSION} in {HOME}, Python {python} of {sys.prefix}")]
    return [Finding("installation", FAIL if one.breaks else WARN, str(one), one.change) for one in found]


def required(there: Sequence[str], lacking: Sequence[Lack]) -> list[Finding]:
    """Returns the findings on the packages that hearthd requires: one for each that is missing or unsuitable or, if there is none,
    a single one that lists the packages. there: the suitable packages. lacking: the missing and unsuitable ones."""
    return _lacks("packages", lacking) or [Finding("packages", OK, ", ".join(there))]


def _lacks(check: str, lacking: Sequence[Lack]) -> list[Finding]:
    return [Finding(check, FAIL if one.stops else WARN, f"{one.found}: {one.cost}", one.change) for one in lacking]


def of_devices(lacking: Sequence[Lack], versions: Mapping[str, str]) -> list[Finding]:
    """Returns the findings on the packages that only devices of one kind need. lacking: those that are missing or unsuitable.
    versions: package -> version, "" if it is not installed."""
    parts = [
        f"{package} {version}" if version else f"no {package}, which only {installation.NEEDED_BY[package]} need"
        for package, version in versions.items()
    ]
    return _lacks("device packages", lacking) or [Finding("device packages", OK, ", ".join(parts))]


def find_packages(devices: Sequence[str]) -> list[Finding]:
    """Checks hearthd's own packages, those that it requires, and those of the configured devices; returns the findings. devices:
    the names of these devices."""
    try:
        found = required(*installation.required())
    except metadata.PackageNotFoundError:
        text = f"hearthd runs from {HOME} and is not installed, so nothing says what it needs"
        found = [Finding("packages", WARN, text, f"{installation.install_command('-e', HOME)} checks it")]
    versions = {package: installation.installed_version(package) for package in installation.NEEDED_BY}
    return [
        *installed(collisions.look_into()),
        *found,
        *of_devices(installation.of_devices(devices), versions),
    ]
