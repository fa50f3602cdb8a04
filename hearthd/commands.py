"""The console scripts. They import from the other packages only after checking that those are hearthd's own."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable

from hearthd.packages import NAMES, odd
from hearthd.start import EXIT_OTHERS, require


def hearthd() -> None:
    gc.disable()  # what is made at the start stays; from then on daemon/lifecycle.py has garbage collected
    require("hearthd")
    _run("hearthd", _hearthd)


def hearth() -> None:
    if "doctor" in sys.argv[1:]:
        _tell_as_doctor()
    else:
        require("hearth")
    _run("hearth", _hearth)


def _hearthd() -> int:
    from daemon.main import main

    return main()


def _hearth() -> int:
    gc.disable()  # what is imported stays
    from daemon.cli.main import run

    gc.enable()
    return run()


def _tell_as_doctor() -> None:
    """Prints the findings of `hearth doctor` and ends the process, if other packages keep the command itself from starting."""
    if not odd():
        return
    from hearthd import collisions

    found = collisions.look_into()
    if any(one.breaks for one in found):
        sys.stdout.write(collisions.findings(found, "--json" in sys.argv))
        sys.exit(EXIT_OTHERS)


def _run(program: str, main: Callable[[], int]) -> None:
    """Runs `main` and ends the process with the exit code it returns. Where a package that hearthd needs is not installed, it
    prints a message instead."""
    try:
        code = main()
    except ModuleNotFoundError as error:
        module = (error.name or "").partition(".")[0]
        if module in (*NAMES, "hearthd"):
            raise  # a fault of hearthd itself
        words = " ".join(f"'{one}'" for one in _not_installed()) or f"'{module}'"
        text = f"{program}: the Python package {module} is not installed: {sys.executable} -m pip install {words}"
        sys.stderr.write(text + "\n")
        code = EXIT_OTHERS
    sys.exit(code)


def _not_installed() -> list[str]:
    """Returns hearthd's requirements (without those of extras) that are not installed, in the form that pip takes."""
    import re
    from importlib import metadata

    missing = []
    try:
        asked = [line for line in metadata.requires("hearthd") or [] if "extra ==" not in line]
    except metadata.PackageNotFoundError:
        return []
    for line in asked:
        name = re.match(r"[\w.-]+", line)
        try:
            metadata.version(name[0] if name else line)
        except metadata.PackageNotFoundError:
            missing.append(line.partition(";")[0].strip())
    return missing
