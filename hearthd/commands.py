"""The console scripts. They import from the other packages only after checking that those are hearthd's own."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable

from hearthd.packages import NAMES, odd
from hearthd.start import EXIT_OTHERS, require

# The programs' modules are imported by name, as `python -m` does, once their packages are known to be hearthd's own.
_DAEMON, _CLI = "daemon.main", "daemon.cli.main"


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
    code: int = importlib.import_module(_DAEMON).main()
    return code


def _hearth() -> int:
    gc.disable()  # what is imported stays
    run = importlib.import_module(_CLI).run
    gc.enable()
    code: int = run()
    return code


def _tell_as_doctor() -> None:
    """Reports for `hearth doctor` that packages of other distributions keep it from starting: prints the collisions and ends the
    process. Does nothing if there are no such packages."""
    if not odd():
        return
    from hearthd import collisions

    found = collisions.look_into()
    if any(one.breaks for one in found):
        sys.stdout.write(collisions.findings(found, "--json" in sys.argv))
        sys.exit(EXIT_OTHERS)


def _run(program: str, main: Callable[[], int]) -> None:
    """Runs `main` and ends the process with the exit code that `main` returns. If `main` fails because a required Python package is
    not installed, prints how to install it and ends the process with exit code 1. program: the command's name, for the message."""
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
    """Returns the Python packages that hearthd requires (without those of extras) and that are not installed, in the form that pip
    takes: `name>=version`."""
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
