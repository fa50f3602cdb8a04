"""Counts what a layer of a dense Llama launches in a step that decodes: Triton's kernels by name, torch's operations that are more
than a view or an allocation, and products of matrices, which stay with cuBLAS. Prints four JSON objects: as it is before a GPU has
chosen anything; where decode attention joins its pieces; where it does and a product of few rows has its activation in it; and of
these the kernels that overlap, where they are to. It needs no GPU, and computes nothing.

usage: python -m tests.engine.kernels.layer_launches (not under TRITON_INTERPRET)
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from engine.cuda.kernels import linear_choice, tiles, triton_overlap
from engine.cuda.launch_only import LaunchOnlyOps, launch_only_model
from engine.cuda.launches import recorded
from engine.cuda.ops import CudaOps
from tests.engine.kernels.key_cases import BLOCK_TOKENS, KeyCase, KeyStep, make_table
from tests.engine.kernels.record_keys import HOPPER, joining
from tests.loader.test_families import MISTRAL_7B

MANY, FEW = 8, 4  # rows: more than our own product takes, and as many
LAYERS = (2, 5)
LLAMA = KeyCase("llama", MISTRAL_7B, more={"sliding_window": None})


class Operations(TorchDispatchMode):
    """Counts torch's operations that launch something on a GPU."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and not any(word in str(func) for word in ("empty", "alias", "detach")):
            self._counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def counted(counts: Counter[str], overlapping: bool = False) -> Iterator[None]:
    """Counts what is launched inside the context. overlapping: only the kernels that overlap."""
    run, linear = JITFunction.run, LaunchOnlyOps.linear

    def launched(kernel: Any, *args: Any, **options: Any) -> Any:
        counts[kernel.fn.__name__] += options.get("launch_pdl", not overlapping)
        return run(kernel, *args, **options)

    def multiplied(self: LaunchOnlyOps, *args: Any) -> Any:
        counts["product"] += not overlapping
        return linear(self, *args)

    with pytest.MonkeyPatch.context() as patch, Operations(counts):
        patch.setattr(JITFunction, "run", launched)
        patch.setattr(LaunchOnlyOps, "linear", multiplied)
        yield


def of_layer(num_rows: int, overlapping: bool = False) -> dict[str, float]:
    """Returns how often a layer launches each: the difference between steps of models with more and with fewer layers, by layer.
    overlapping: as in `counted`."""
    counts = []
    for num_layers in LAYERS:
        case = replace(LLAMA, more=LLAMA.more | {"num_hidden_layers": num_layers})
        with recorded(HOPPER):
            model = launch_only_model(case.spec, case.shape, BLOCK_TOKENS)
            table, step = make_table(case, model), KeyStep(((100, 1),) * num_rows)
            step.run(model, table, case.max_len)
            counts.append(Counter[str]())
            with counted(counts[-1], overlapping):
                step.run(model, table, case.max_len)
    fewer, more = counts
    return {name: (more[name] - fewer[name]) / (LAYERS[1] - LAYERS[0]) for name in more if more[name] != fewer[name]}


def main() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # what kernels should have written is undefined
    print(json.dumps(of_layer(MANY)), flush=True)
    tiles.use(joining(LLAMA))
    print(json.dumps(of_layer(MANY)), flush=True)
    size = (FEW, 2 * LLAMA.shape.intermediate_size, LLAMA.shape.hidden_size, torch.bfloat16, False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(linear_choice._ours_wins, size, True)
        patch.setattr(LaunchOnlyOps, "gated_linear", CudaOps.gated_linear)  # launches what was chosen alone
        patch.setattr(LaunchOnlyOps, "linear", lambda self, x, weight, bias=None: x.new_empty(len(x), len(weight)))
        print(json.dumps(of_layer(FEW)), flush=True)
        triton_overlap.use(True)
        print(json.dumps(of_layer(FEW, overlapping=True)), flush=True)


if __name__ == "__main__":
    main()
