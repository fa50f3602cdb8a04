"""Follows what the steps of models on a GPU allocate, without a GPU: their tensors are meta tensors, their kernels do nothing, and
what they hold at each moment lies in a stand-in for torch's allocator (tests/caching_allocator.py). Models have their published
sizes. Prints one JSON line for each model: the bytes that are reckoned for a step beside libraries' work spaces
(loader/sizes/gpu_sizing.py), and for each kind of step the most bytes in use and in segments; last, those of all kinds in turn, and
how often segments were given back then for lack of room.

What torch's own CUDA kernels allocate within an operation is not seen, nor cuBLAS's work space.

usage: python -m tests.engine.step_memory [--every] (not under TRITON_INTERPRET; --every: all models, with all their layers)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction

from engine.cuda import model as cuda_model
from engine.cuda.launch_only import ARENA_BLOCKS, NoRanks
from engine.cuda.launches import NoGpu
from engine.cuda.model import CudaModel
from engine.cuda.ops import CudaOps
from engine.cuda.share import CudaShare, ShareLinks
from engine.protocol import LoadModel
from loader.configs.hf_config import parse_config
from loader.formats.registry import FORMATS
from loader.shapes import kv_layout
from loader.shapes.model_shape import DeviceShare, Division, ModelShape
from loader.sizes import slices
from loader.sizes.gpu_sizing import gpu_step_bytes
from loader.sizes.layout import weights_bytes
from scheduler.batch.plan import SequenceTable, make_sequence_table
from tests.caching_allocator import Block, CachingAllocator
from tests.engine.kernels.key_cases import BY_HOST, SETTINGS, KeyStep

PUBLISHED = Path(__file__).parents[1] / "published"
MAX_TOKENS, MAX_ROWS, MAX_LEN, BLOCK_TOKENS = 4096, 256, 8192, 16  # a GPU's defaults, and lengths that a table of tokens holds
CORES = 256  # multiprocessors, of which loader/sizes/gpu_sizing.py reckons with so many
HOPPER = 90
TURNS = 2  # how often each kind of step runs in turn with the others, about
RANK = 256  # of LoRA adapters, the largest

WITH_ADAPTERS = {"rows", "rows and a prompt", "prompts"}


@dataclass(frozen=True)
class MemoryCase:
    """A model. config: the name of a published config.json (tests/published). more: what is changed in it. pooling, predicts: of
    ModelShape. share: the part of a split model that it is; None: it is whole. num_layers: how many it has; 0: those published."""

    name: str
    config: str
    dtype: str = "bfloat16"
    kv_cache_dtype: str = ""
    more: dict[str, Any] = field(default_factory=dict)
    pooling: str = ""
    predicts: bool = False
    share: DeviceShare | None = None
    max_tokens: int = MAX_TOKENS
    max_rows: int = MAX_ROWS
    num_layers: int = 0

    @property
    def shape(self) -> ModelShape:
        config = json.loads((PUBLISHED / f"{self.config}.json").read_text())
        fewer = {"num_hidden_layers": self.num_layers} if self.num_layers else {}
        shape = replace(parse_config(json.dumps(config | self.more | fewer).encode()), pooling=self.pooling, predicts=self.predicts)
        return shape if self.share is None else slices.split(shape, *self.share)

    @property
    def spec(self) -> LoadModel:
        limits = (1 << 20, 0, 0, MAX_LEN, self.max_rows, [1])
        return LoadModel(1, self.name, "", self.dtype, "", *limits, self.shape.stored_format, kv_cache_dtype=self.kv_cache_dtype)


TWO = Division(2)
CASES = [
    MemoryCase("llama 3.1 8b", "llama-3.1-8b"),
    MemoryCase("llama 3.1 8b, few sequences", "llama-3.1-8b", max_tokens=512, max_rows=4),
    MemoryCase("llama 3.1 8b float32, fp8 KV", "llama-3.1-8b", "float32", "fp8"),
    MemoryCase("llama 3.1 8b embedder", "llama-3.1-8b", pooling="last_token"),
    MemoryCase("llama 3.1 8b share", "llama-3.1-8b", share=DeviceShare(0, TWO)),
    MemoryCase("llama 3.1 8b share, few sequences", "llama-3.1-8b", share=DeviceShare(0, TWO), max_tokens=512, max_rows=4),
    MemoryCase("gemma 4 31b", "gemma-4-31b"),
    MemoryCase("phi-2", "phi-2", "float16"),
    MemoryCase("command r7b", "command-r7b"),
    MemoryCase("qwen3 235b", "qwen3-235b-a22b"),
    MemoryCase("gpt-oss 20b", "gpt-oss-20b"),
    MemoryCase("llama 4 scout", "llama-4-scout"),
    MemoryCase("qwen3 next", "qwen3-next-80b-a3b"),
    MemoryCase("deepseek v2 lite", "deepseek-v2-lite"),
    MemoryCase("deepseek v3", "deepseek-v3", predicts=True),
    MemoryCase("glm 4.7 flash", "glm-4.7-flash"),
]
# A dense model, one whose logits are large beside its other arrays, a mixture, and latent attention. All layers take a minute and a
# half more, and allocate no more than these few.
COVERING = ("llama 3.1 8b", "llama 3.1 8b, few sequences", "qwen3 235b", "deepseek v2 lite")
FEW_LAYERS = 6


class MetaRange:
    """Stands in for a WeightRange (engine.memory.weight_range): weights that have a size and no memory."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.all = torch.empty(num_bytes, dtype=torch.uint8, device="meta")

    def tensor(self, offset_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        num_bytes = int(np.prod(shape)) * dtype.itemsize
        return self.all[offset_bytes : offset_bytes + num_bytes].view(dtype).view(shape)

    def unmap(self) -> None:
        """Does nothing, because nothing is mapped."""


class MetaOps(CudaOps):
    """The operations of a GPU's steps, whose kernels do nothing."""

    def __init__(self) -> None:
        """Skips CudaOps.__init__, which would set Triton's cache folder."""


class Followed(TorchDispatchMode):
    """Gives each storage of a meta tensor that is made inside it a block of `allocator` for as long as it lives. While that is
    None, storages belong to the model, and get none. What is copied from there to the host is zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator: CachingAllocator | None = None
        self._of_model: dict[int, StorageWeakRef] = {}
        self._held: dict[int, tuple[StorageWeakRef, Block]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        name = function.overloadpacket.__name__
        if name == "_to_copy" and arguments[0].is_meta and str(options.get("device")) == "cpu":
            return torch.zeros(arguments[0].shape, dtype=options.get("dtype") or arguments[0].dtype)
        if name == "copy_" and arguments[1].is_meta and not arguments[0].is_meta:
            return arguments[0]
        if name.endswith("_") and function._schema.is_mutable:
            return arguments[0]  # it is changed in place, which allocates nothing
        with self:
            made = function.decompose(*arguments, **options)  # in inference mode operations arrive that consist of others
        if made is NotImplemented:
            made = function(*arguments, **options)
            for tensor in tree_leaves(made):
                if isinstance(tensor, Tensor) and tensor.is_meta:
                    self._note(tensor.untyped_storage())
        return made

    def free_what_ended(self) -> None:
        """Frees the blocks of storages that nothing holds any more. When that happens makes no difference until the next
        allocation."""
        if self.allocator is not None:
            for key in [key for key, (ref, _) in self._held.items() if ref.expired()]:
                self.allocator.free(self._held.pop(key)[1])

    def _note(self, storage: Any) -> None:
        ref = StorageWeakRef(storage)
        if self.allocator is None:
            self._of_model[ref.cdata] = ref
        elif ref.cdata not in self._of_model and ref.cdata not in self._held and storage.nbytes():
            self.free_what_ended()
            self._held[ref.cdata] = ref, self.allocator.allocate(storage.nbytes())


class Launched:
    """Stands in for PendingStep. On a GPU a step's results are copied to the host, so it keeps none of the device's memory."""

    def __init__(self, *_: Any) -> None:
        """Drops the step's results."""

    def wait(self) -> None:
        """Does nothing, because nothing was computed."""


@contextmanager
def following() -> Iterator[Followed]:
    """Returns a context in which kernels do nothing, and in which the yielded object follows what is allocated. From then on this
    process takes itself for one with an H100."""
    triton.runtime.driver.set_active(NoGpu(HOPPER))
    followed = Followed()
    with pytest.MonkeyPatch.context() as patch, followed:
        patch.setattr(JITFunction, "run", lambda *_, **__: None)
        patch.setattr(cuda_model, "PendingStep", Launched)
        patch.setattr(cuda_model, "WithProposals", lambda step, proposals: step)
        patch.setattr(cuda_model, "CPU_CORES", CORES)
        yield followed


def made_model(case: MemoryCase) -> tuple[CudaModel, SequenceTable]:
    """Returns a model without memory, and a table of its sequences, of which each third has one of two LoRA adapters."""
    shape, spec = case.shape, case.spec
    groups = kv_layout.kv_groups(shape, spec.kv_dtype, BLOCK_TOKENS)
    arena = torch.empty(ARENA_BLOCKS * max(group.block_bytes for group in groups), dtype=torch.uint8, device="meta")
    weights: Any = MetaRange(weights_bytes(shape, spec.dtype, FORMATS[spec.quantize]))
    parts = (MetaOps(), spec, shape, weights, arena, BLOCK_TOKENS)
    if shape.split is None:
        model = CudaModel(*parts)
    else:
        model = CudaShare(*parts, ShareLinks(NoRanks(shape.split.size), None, np.zeros(1, np.int64)))
    table = make_sequence_table(case.max_rows, MAX_LEN, -(-MAX_LEN // BLOCK_TOKENS), len(groups))
    return model, table


def kinds_of_steps(case: MemoryCase) -> dict[str, KeyStep]:
    """Returns steps of each kind that may need the most memory, by name: as many rows and tokens as the model may have."""
    rows, tokens = case.max_rows, case.max_tokens
    decoding = tuple((1000 + at, 1) for at in range(rows))
    kinds = {
        "one row": KeyStep(decoding[:1]),
        "rows": KeyStep(decoding, ("temperature", "top_p")),
        "a prompt": KeyStep(((0, tokens),)),
        "the end of a prompt": KeyStep(((MAX_LEN - tokens, tokens),), ("top_k",)),
        "rows and a prompt": KeyStep((*decoding[1:], (0, tokens - rows + 1))),
        "prompts": KeyStep(tuple((at, tokens // rows) for at in range(rows)), ("greedy", "min_p")),
    }
    if not case.pooling:
        kinds |= {
            "rows with penalties": KeyStep(decoding, ("penalties",)),
            "rows with all settings": KeyStep(decoding, tuple(SETTINGS)),
            "rows with log-probabilities": KeyStep(decoding, ("sixteen logprobs",)),
            "prompts with all settings": KeyStep(tuple((at, tokens // rows) for at in range(rows)), tuple(BY_HOST)),
            "a prompt with log-probabilities": KeyStep(((0, tokens),), ("prompt logprobs",)),
        }
    return kinds


def record(case: MemoryCase) -> dict[str, Any]:
    """Returns what is printed for one model."""
    steps: dict[str, tuple[int, int]] = {}
    with following() as followed:
        model, table = made_model(case)
        reckoned = gpu_step_bytes(model.shape, case.dtype, case.max_tokens, case.max_rows)

        def run(name: str, step: KeyStep, adapted: bool) -> None:
            table.adapter[:] = np.arange(case.max_rows) % 3 - 1 if adapted else -1
            model.adapter_memory.bound = RANK if adapted else 0
            step.run(model, table, MAX_LEN)
            followed.free_what_ended()

        kinds = [(name, step, False) for name, step in kinds_of_steps(case).items()]
        kinds += [(name, step, True) for name, step, _ in kinds if name in WITH_ADAPTERS]
        for name, step, adapted in kinds:
            allocator = followed.allocator = CachingAllocator()
            run(name, step, adapted)
            steps[name + ", adapters" * adapted] = allocator.most_bytes, allocator.most_reserved_bytes
            assert allocator.used_bytes == 0, f"{case.name}: {name} keeps {allocator.used_bytes} bytes"
        allocator = followed.allocator = CachingAllocator(reckoned)
        order = np.random.default_rng(0)
        for at in order.integers(0, len(kinds), TURNS * len(kinds)).tolist():
            run(*kinds[at])
        steps["in turn"] = allocator.most_bytes, allocator.most_reserved_bytes
    return {"model": case.name, "reckoned": reckoned, "given_back": allocator.num_given_back, "steps": steps}


def main() -> None:
    every = "--every" in sys.argv
    for case in CASES:
        if every or case.name in COVERING:
            print(json.dumps(record(case if every else replace(case, num_layers=FEW_LAYERS))), flush=True)


if __name__ == "__main__":
    main()
