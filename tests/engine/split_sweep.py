"""Compares the logits of divided models with those of one device, for every family and every way to divide it:

    python -m tests.engine.split_sweep [--gpu] [FAMILY ...] > RESULT.jsonl

prints a JSON line for each case, with the largest difference of float32 logits or the reason for a refusal, and a table of all of
them on stderr. Exits with 1 if a difference is too large. --gpu: ranks compute as on GPUs, with interpreted kernels and in fewer
steps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.run import machine, table
from loader.sizes import slices
from tests.engine.rank_processes import RankGroup
from tests.engine.split_checks import FLOAT32_TOLERANCE, divided_logits, on_one_device
from tests.engine.split_models import FAMILIES, How, drawn_copies, shape_of

# name -> number of ranks, how they divide a model, and how many further experts each of them has
WAYS = {
    "TP 2": (2, How(), 0),
    "TP 4": (4, How(), 0),
    "PP 2": (2, How(num_stages=2), 0),
    "PP 3": (3, How(num_stages=3), 0),
    "PP 4": (4, How(num_stages=4), 0),
    "EP 2": (2, How(expert_parts=2), 0),
    "EP 4": (4, How(expert_parts=4), 0),
    "TP 2 x PP 2": (4, How(num_stages=2), 0),
    "TP 2 x EP 2": (4, How(expert_parts=2), 0),
    "EP 2 x PP 2": (4, How(expert_parts=2, num_stages=2), 0),
    "EP 2, copies": (2, How(expert_parts=2), 1),
    "EP 4, copies": (4, How(expert_parts=4), 1),
    "TP 2 x EP 2, copies": (4, How(expert_parts=2), 1),
}


class Sweep:
    """Groups of ranks of each size, and the logits of each family on one device."""

    def __init__(self, gpu: bool) -> None:
        self._gpu = gpu
        self._groups: dict[int, RankGroup] = {}
        self._whole: dict[str, list[np.ndarray]] = {}

    def case(self, family: str, way: str) -> dict[str, Any]:
        """Returns what a family computes, divided in one of WAYS: the largest difference, or why it is refused."""
        size, how, number = WAYS[way]
        shape = shape_of(family, "float32")
        if why := slices.refusal(shape, how.division(size)):
            return {"refused": why}
        how = replace(how, gpu=self._gpu, few_steps=self._gpu)
        if number:
            how = replace(how, copies=drawn_copies(shape, how.expert_parts, number))
        group = self._group(size)
        if family not in self._whole:
            self._whole[family] = on_one_device(group, family, "float32", how)
        whole = self._whole[family]
        of_ranks = divided_logits(group, family, [how] * size)
        group.renew()
        differences = [float(np.abs(own - one).max()) for logits in of_ranks for own, one in zip(logits, whole, strict=True)]
        num_logits = sum(logits.size for logits in whole)
        largest = float(max(np.abs(logits).max() for logits in whole))
        return {"largest_difference": float(np.max(differences)), "logits": num_logits, "largest_logit": round(largest, 2)}

    def close(self) -> None:
        for group in self._groups.values():
            group.close()

    def _group(self, size: int) -> RankGroup:
        if size not in self._groups:
            self._groups[size] = RankGroup(size)
        return self._groups[size]


def main() -> int:
    """Prints all cases, and returns the exit status."""
    gpu, named = "--gpu" in sys.argv[1:], [word for word in sys.argv[1:] if not word.startswith("-")]
    if gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read by ranks, which are started later
    sweep, began_s, rows = Sweep(gpu), time.monotonic(), []
    about = {"benchmark": "split-logits", **machine(), "device": "cuda, interpreted" if gpu else "cpu", "bar": FLOAT32_TOLERANCE}
    print(json.dumps(about), flush=True)
    differences: list[float] = []
    num_refused = 0
    for family in named or FAMILIES:
        row = {"family": family}
        for way in WAYS:
            found = sweep.case(family, way)
            architecture = FAMILIES[family]["architectures"][0]
            print(json.dumps({"family": family, "architecture": architecture, "way": way, **found}), flush=True)
            if "refused" in found:
                num_refused += 1
                row[way] = "no experts" if "has none" in found["refused"] else "refused"
            else:
                differences.append(found["largest_difference"])
                row[way] = f"{differences[-1]:.0e}"
        rows.append(row)
    sweep.close()
    met = bool(np.max(differences) < FLOAT32_TOLERANCE)  # not met where one is NaN
    total = {"cases": len(differences), "refused": num_refused, "largest_difference": float(np.max(differences)), "met": met}
    print(json.dumps(total | {"seconds": round(time.monotonic() - began_s)}))
    print(table(rows, {"family": "family"} | {way: way for way in WAYS}), file=sys.stderr)
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
