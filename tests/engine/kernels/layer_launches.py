"""Counts what a layer of a dense Llama launches in a step that decodes: Triton's kernels by name, torch's operations that are more
than a view or an allocation, and products of matrices, which stay with cuBLAS. Prints a JSON object for each form of decode
attention. It needs no GPU, and computes nothing.

usage: python -m tests.engine.kernels.layer_launches (not under TRITON_INTERPRET)
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

from engine.cuda.kernels import tiles
from engine.cuda.launch_only import LaunchOnlyOps, launch_only_model
from engine.cuda.launches import recorded
from tests.engine.kernels.key_cases import BLOCK_TOKENS, KeyCase, KeyStep, make_table
from tests.engine.kernels.record_keys import HOPPER, joining
from tests.loader.test_families import MISTRAL_7B

ROWS = 8  # more than our own product takes
LAYERS = (2, 5)


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
def counted(counts: Counter[str]) -> Iterator[None]:
    """Counts what is launched inside the context."""
    run, linear = JITFunction.run, LaunchOnlyOps.linear

    def launched(kernel: Any, *args: Any, **options: Any) -> Any:
        counts[kernel.fn.__name__] += 1
        return run(kernel, *args, **options)

    def multiplied(self: LaunchOnlyOps, *args: Any) -> Any:
        counts["product"] += 1
        return linear(self, *args)

    with pytest.MonkeyPatch.context() as patch, Operations(counts):
        patch.setattr(JITFunction, "run", launched)
        patch.setattr(LaunchOnlyOps, "linear", multiplied)
        yield


def of_layer() -> dict[str, float]:
    """Returns how often a layer launches each: the difference between steps of models with more and with fewer layers, by layer."""
    counts = []
    for num_layers in LAYERS:
        case = KeyCase("llama", MISTRAL_7B, more={"sliding_window": None, "num_hidden_layers": num_layers})
        with recorded(HOPPER):
            model = launch_only_model(case.spec, case.shape, BLOCK_TOKENS)
            table, step = make_table(case, model), KeyStep(((100, 1),) * ROWS)
            step.run(model, table, case.max_len)
            counts.append(Counter[str]())
            with counted(counts[-1]):
                step.run(model, table, case.max_len)
    fewer, more = counts
    return {name: (more[name] - fewer[name]) / (LAYERS[1] - LAYERS[0]) for name in more if more[name] != fewer[name]}


def main() -> None:
    warnings.filterwarnings("ignore", category=RuntimeWarning)  # what kernels should have written is undefined
    print(json.dumps(of_layer()), flush=True)
    tiles.use(joining(KeyCase("llama", MISTRAL_7B, more={"sliding_window": None})))
    print(json.dumps(of_layer()), flush=True)


if __name__ == "__main__":
    main()
