"""Models of well known shapes with random weights made on the device: nothing is read, nothing is downloaded."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import numpy as np
import torch

from benchmarks.gpu_limits import CACHE_DIR
from benchmarks.plain_memory import PlainRange
from engine.cuda.backend import MAX_GRAPH_TOKENS
from engine.cuda.model import CudaModel
from engine.cuda.ops import CudaOps
from engine.cuda.work_space import KEPT_BYTES
from engine.protocol import LoadModel
from loader.configs.hf_config import parse_config
from loader.shapes import kv_layout
from loader.shapes.model_shape import ModelShape
from loader.sizes import layout
from loader.sizes.gpu_sizing import gpu_work_space_bytes
from scheduler.batch.plan import BatchPlan, SequenceTable, make_sequence_table

BLOCK_TOKENS = 16
SPARE_BLOCKS = 64  # for a scheduler that reserves some
MOST_STEP_TOKENS = 8192  # of the longest prompt step that a benchmark runs
LIBRARIES_BYTES = 512 << 20  # what compiled kernels, libraries and graph executables take after a model was made
CONFIGS: dict[str, dict[str, Any]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 300,
    },
}
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


def shape_of(name: str) -> ModelShape:
    return parse_config(json.dumps(LLAMA | CONFIGS[name]).encode())


def random_weights(shape: ModelShape, dtype: str, device: str) -> PlainRange:
    """Normal numbers small enough that hidden states stay finite; norms are ones."""
    memory = PlainRange(layout.weights_bytes(shape, dtype), device)
    kind: torch.dtype = getattr(torch, dtype)
    memory.memory.view(kind).normal_(0.0, 0.02)
    for slot in layout.weight_layout(shape, dtype):
        if "norm" in slot.name:
            memory.tensor(slot.offset_bytes, slot.shape, kind).fill_(1.0)
    return memory


def kv_room_bytes(shape: ModelShape, dtype: str, num_rows: int) -> int:
    """Returns what KV may take of the current GPU's free memory: the rest is for steps, graphs and libraries."""
    work_bytes = gpu_work_space_bytes(shape, dtype, MOST_STEP_TOKENS, num_rows)
    return int(torch.cuda.mem_get_info()[0]) - work_bytes - KEPT_BYTES - LIBRARIES_BYTES


class Bench:
    """A model of a shape with a table of num_rows sequences of up to `length` tokens to step it with. Steps with pieces of prompts
    may run as graphs where decode steps do (max_graph_rows).

    KV takes what fits on the device: where that is less than all sequences need, several share a block. Steps read as many bytes
    then and take as long, but sample other tokens. num_blocks: how many there shall be; 0: as many as the sequences need."""

    def __init__(
        self,
        name: str,
        device: str,
        num_rows: int,
        length: int,
        max_graph_rows: int,
        weights: PlainRange | None = None,
        num_blocks: int = 0,
    ) -> None:
        self.name, self.device, self.shape = name, device, shape_of(name)
        self.dtype = "bfloat16" if device == "cuda" else "float32"
        self.weights = random_weights(self.shape, self.dtype, device) if weights is None else weights
        self.block_bytes = kv_layout.block_bytes(self.shape, self.dtype, BLOCK_TOKENS)
        self.num_blocks = num_blocks or num_rows * -(-length // BLOCK_TOKENS) + SPARE_BLOCKS
        if device == "cuda":
            self.num_blocks = min(self.num_blocks, kv_room_bytes(self.shape, self.dtype, num_rows) // self.block_bytes)
        arena = torch.zeros(self.num_blocks * self.block_bytes, dtype=torch.uint8, device=device)
        spec = LoadModel(1, name, "", self.dtype, "", 0, 0, 0, length, num_rows, [])
        limits = (max_graph_rows, MAX_GRAPH_TOKENS if max_graph_rows else 0)
        self.model = CudaModel(CudaOps(CACHE_DIR), spec, self.shape, cast(Any, self.weights), arena, BLOCK_TOKENS, *limits)
        began_s = time.perf_counter()
        self.model.warm()
        self.warm_s = time.perf_counter() - began_s
        self.table = self.new_table(num_rows, length)

    def new_table(self, num_rows: int, length: int) -> SequenceTable:
        """Returns num_rows greedy sequences of random tokens whose blocks are scattered over the arena. A sequence's own blocks
        differ unless it has more than there are."""
        generator = np.random.default_rng(0)
        blocks = -(-length // BLOCK_TOKENS)
        table = make_sequence_table(num_rows, length, blocks)
        table.request_id[:] = np.arange(1, num_rows + 1)
        table.tokens[:] = generator.integers(0, self.shape.vocab_size, table.tokens.shape)
        places = generator.permutation(self.num_blocks)
        table.block_tables[0][:] = places[np.arange(num_rows * blocks) % self.num_blocks].reshape(num_rows, blocks)
        table.temperature[:] = 0.0
        table.max_total_tokens[:] = length
        return table

    def plan(self, num_rows: int, computed: int, num_new: int, known: bool = True) -> BatchPlan:
        """Returns a step in which the first num_rows sequences run num_new tokens from position `computed` on and sample. known:
        the host has these tokens; else they are what the last steps sampled."""
        slots = np.arange(num_rows, dtype=np.int32)
        self.table.num_tokens[slots] = computed + num_new if known else computed
        full = np.full(num_rows, computed, np.int32)
        return BatchPlan(0, "bench", slots, full, np.full(num_rows, num_new, np.int32), np.ones(num_rows, np.bool_))

    def mixed_plan(self, num_rows: int, computed: int, chunk: int) -> BatchPlan:
        """Returns a step of num_rows sequences that decode at position `computed`, and one more that computes a piece of its
        prompt, `chunk` tokens from its position `computed` on, and does not sample."""
        plan = self.plan(num_rows + 1, computed, 1, known=False)
        self.table.num_tokens[num_rows] = computed + chunk + 1
        plan.num_new[num_rows], plan.samples[num_rows] = chunk, False
        return plan
