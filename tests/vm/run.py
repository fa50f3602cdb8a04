"""Proves the systemd units in a virtual machine that boots Debian: python -m tests.vm.run [PART | PART.CHECK ...]

It needs root and two Debian packages, and says which it lacks (then it ends with 2). What it builds lies in .vm/ of the clone. The
log of the machine's console and journal goes to .vm/console-N.log, a summary to .vm/run.md. Ends with 1 if a check fails, or if one
that was asked for is not reported.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import time

from tests.clone import ROOT
from tests.vm import image, machine, results
from tests.vm.guest.parts import BOOTS
from tests.vm.results import Result

FOLDER = ROOT / ".vm"
BOOT_LIMIT_S = 3600.0


def boot(number: int, parts: list[str]) -> list[Result]:
    """Boots the machine once and returns what its checks found; that it ended before they were done is a failure of its own."""
    found: list[Result] = []
    begin = time.monotonic()
    is_whole = False
    words = [f"hearthd.checks={','.join(parts)}"]
    with machine.booted(FOLDER, FOLDER / f"console-{number}.log", words, BOOT_LIMIT_S) as lines:
        for line in lines:
            is_whole = is_whole or results.has_ended(line)
            if (one := results.parse(line)) is not None:
                found.append(one)
                print(one.line(), flush=True)
    took_s = time.monotonic() - begin
    if not is_whole:
        why = "the machine ran all checks of this boot"
        found.append(Result(f"boot {number}", "boot", why, False, took_s, f"it ended before: {FOLDER / f'console-{number}.log'}"))
        print(found[-1].line(), flush=True)
    print(f"boot {number}: {took_s:.0f} s", flush=True)
    return found


def summary(found: list[Result], took_s: float) -> str:
    qemu = subprocess.run([image.QEMU, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()[0]
    counted = ", ".join(f"{sum(one.word == word for one in found)} {word}" for word in ("ok", "FAILED", "left out"))
    head = f"{time.strftime('%Y-%m-%d')}, {qemu}, without KVM: {counted}, {took_s / 60:.1f} minutes with the image."
    return f"{head}\n\n{results.table(found)}\n"


def main() -> int:
    names = [name for one in BOOTS for name in one]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="*", help=f"parts to run, or single checks of them (default: all): {', '.join(names)}")
    options = parser.parse_args()
    chosen = options.part or names
    if unknown := {one.partition(".")[0] for one in chosen} - set(names):
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    if lacks := image.missing():
        print("This machine cannot run the tests of the units. It lacks:", *lacks, sep="\n  ", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the machine is turned off
    begin = time.monotonic()
    try:
        image.build(FOLDER)
        image.fetch_wheels(FOLDER)
        image.make_disk(FOLDER)
    except image.CannotBuild as error:
        print(error, file=sys.stderr)
        return 2
    found: list[Result] = []
    for number, parts in enumerate(BOOTS, 1):
        if asked := [one for name in parts for one in chosen if one.partition(".")[0] == name]:
            found += boot(number, asked)
    text = summary(found, time.monotonic() - begin)
    (FOLDER / "run.md").write_text(text)
    print(f"\n{text}\nThe consoles: {FOLDER}/console-*.log; this summary: {FOLDER / 'run.md'}")
    return int(any(one.ok is False for one in found))


if __name__ == "__main__":
    sys.exit(main())
