"""Runs the checks named on the kernel's command line (hearthd.checks=PART,PART) and tells the results over the virtio port."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.vm.guest import checks
from tests.vm.machine import PORT


def main() -> int:
    words = dict(word.partition("=")[::2] for word in Path("/proc/cmdline").read_text().split())
    with open(f"/dev/virtio-ports/{PORT}", "w") as out:
        for result in checks.run(words["hearthd.checks"].split(",")):
            print(result.line(), flush=True)
            print(result.to_json(), file=out, flush=True)
        print(json.dumps({"end": True}), file=out, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
