"""Runs hearthd's kernels, models and a daemon on an emulated aarch64 processor: python -m tests.aarch64.run [NAME ...]

It needs root and four Debian packages, and says which it lacks (then it ends with 2). The first run builds an arm64 userland in
.aarch64/ of the clone and compiles the kernels there; both are kept. What each part wrote goes to .aarch64/run.log, a summary to
.aarch64/run.md. Ends with 1 if a part fails.
"""

from __future__ import annotations

import argparse
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from tests.aarch64 import userland
from tests.aarch64.chosen import CHOSEN, LEFT_OUT, Item

FOLDER = userland.ROOT / ".aarch64"
SUMMARY = re.compile(r"^=*\s*((?:\d+ \w+(?:, )?)+) in [\d.]+s")  # pytest's last line


@dataclass(slots=True, frozen=True)
class Outcome:
    item: Item
    result: str
    took_s: float
    output: str
    has_failed: bool


def run(item: Item, root: Path, processor: str, log: TextIO) -> Outcome:
    print(f"\n== {item.name}: {item.why}\n$ {shlex.join(item.argv)}", flush=True)
    log.write(f"\n== {item.name}\n$ {shlex.join(item.argv)}\n")
    begin = time.monotonic()
    lines: list[str] = []
    process = subprocess.Popen(
        userland.command(root, processor, item.argv), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            log.write(line)
            log.flush()
            lines.append(line)
        code = process.wait()
    finally:
        process.kill()  # unshare's own end takes all it has started with it
    counted = next((found[1] for line in reversed(lines) if (found := SUMMARY.match(line))), "")
    result = counted or ("done" if code == 0 else f"ended with {code}")
    outcome = Outcome(item, result, time.monotonic() - begin, "".join(lines), code != 0)
    print(f"== {item.name}: {result}, {outcome.took_s:.0f} s", flush=True)
    return outcome


def summary(outcomes: Sequence[Outcome], processor: str) -> str:
    qemu = subprocess.run([userland.QEMU, "--version"], capture_output=True, text=True, check=False).stdout.splitlines()[0]
    versions = next((outcome.output.strip() for outcome in outcomes if outcome.item.name == "versions"), "")
    rows = [f"| {o.item.name} | {o.item.why} | {o.result} | {o.took_s:.0f} s |" for o in outcomes]
    left_out = [f"- {what}: {why}" for what, why in LEFT_OUT]
    return "\n".join(
        [
            f"{qemu}, as a {processor} (`-cpu {userland.PROCESSORS[processor].qemu}`), {time.strftime('%Y-%m-%d')}:",
            *("", "```", versions, "```", ""),
            *("| part | what it shows | result | took |", "|---|---|---|---|", *rows),
            *("", "Left out:", "", *left_out, ""),
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help=f"parts to run (default: all): {', '.join(item.name for item in CHOSEN)}")
    parser.add_argument("--processor", choices=userland.PROCESSORS, default="neoverse-v1")
    options = parser.parse_args()
    names = options.name or [item.name for item in CHOSEN]
    if unknown := set(names) - {item.name for item in CHOSEN}:
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    if lacks := userland.missing():
        print("This machine cannot run the tests for aarch64. It lacks:", *lacks, sep="\n  ", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what is registered goes again
    with userland.registered():
        try:
            root = userland.build(FOLDER)
            userland.install(FOLDER)
        except userland.CannotBuild as error:
            print(error, file=sys.stderr)
            return 2
        userland.copy_clone(root)
        with (FOLDER / "run.log").open("w") as log:
            outcomes = [run(item, root, options.processor, log) for item in CHOSEN if item.name in names]
    text = summary(outcomes, options.processor)
    (FOLDER / "run.md").write_text(text)
    print(f"\n{text}\nEverything that was written: {FOLDER / 'run.log'}; this summary: {FOLDER / 'run.md'}")
    return int(any(outcome.has_failed for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
