"""Tiny checkpoints made with transformers, and a hand-driven table to step them with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine.contracts import BatchPlan, SequenceTable
from engine.hosted_model import TorchModel
from engine.memory.arena import KVArena
from engine.model_runner import TorchRunner
from engine.protocol import Configure, LoadModel
from loader.catalog import scan_one

CACHE_DIR = str(Path(__file__).parents[2] / ".pytest_cache" / "kernels")
BLOCK_TOKENS = 4
MAX_LEN = 128
NUM_CHUNKS, CHUNK_BYTES = 32, 64 << 10
COMMON: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "initializer_range": 0.2,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {"kind": "llama", "tie_word_embeddings": False},
    "llama-tied-llama3": {"kind": "llama", "tie_word_embeddings": True, "rope_parameters": LLAMA3_ROPE},
    "llama-biases-linear": {
        "kind": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 2.0},
    },
    "llama-no-gqa": {"kind": "llama", "tie_word_embeddings": False, "num_key_value_heads": 6, "head_dim": 8},
    "qwen3": {"kind": "qwen3", "tie_word_embeddings": False},
    "qwen3-tied-biases": {"kind": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
}


def make_checkpoint(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 3, **changes: Any) -> Any:
    """Saves a seeded random model whose norms and biases are random too, and returns transformers' own copy of it."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[kind]
    torch.manual_seed(seed)
    model = model_class(config_class(**(COMMON | changes)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    model = model.to(dtype).eval()
    model.save_pretrained(folder)
    return model


def make_runner(arena: KVArena, cache_dir: str = CACHE_DIR, **options: Any) -> TorchRunner:
    return TorchRunner(
        arena, Configure("cpu:0", NUM_CHUNKS, CHUNK_BYTES, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=cache_dir, **options)
    )


def load(runner: TorchRunner, folder: Path, dtype: str = "float32", eos: tuple[int, ...] = (1,)) -> TorchModel:
    spec = LoadModel(1, "tiny", str(folder), dtype, scan_one(folder).fingerprint, 1 << 20, 0, 0, MAX_LEN, 8, list(eos))
    return runner.load(spec, lambda done, total: None, lambda: False)


def make_table(slots: int = 8, length: int = MAX_LEN) -> SequenceTable:
    """Slot s starts with blocks of its own, scattered over the arena."""
    blocks = -(-length // BLOCK_TOKENS)
    order = np.random.default_rng(5).permutation(slots * blocks).astype(np.int32)
    return SequenceTable(
        request_id=np.zeros(slots, np.int64),
        tokens=np.zeros((slots, length), np.int32),
        num_tokens=np.zeros(slots, np.int32),
        num_prompt=np.zeros(slots, np.int32),
        num_computed=np.zeros(slots, np.int32),
        block_tables=[order.reshape(slots, blocks)],
        temperature=np.zeros(slots, np.float32),
        top_p=np.ones(slots, np.float32),
        top_k=np.zeros(slots, np.int32),
        seed=np.zeros(slots, np.uint64),
        num_logprobs=np.full(slots, -1, np.int32),
        min_tokens_until=np.zeros(slots, np.int32),
        max_total_tokens=np.full(slots, length, np.int32),
        ignore_eos=np.zeros(slots, np.bool_),
        min_p=np.zeros(slots, np.float32),
        edits_logits=np.zeros(slots, np.bool_),
        prompt_logprobs=np.zeros(slots, np.bool_),
        constrained=np.zeros(slots, np.bool_),
        params=[None] * slots,
    )


def put(table: SequenceTable, slot: int, tokens: list[int]) -> None:
    table.tokens[slot, : len(tokens)] = tokens
    table.num_tokens[slot] = len(tokens)


def plan(*rows: tuple[int, int, int], samples: tuple[bool, ...] | None = None) -> BatchPlan:
    """rows: (slot, num_computed, num_new); decode rows first."""
    columns = np.array(rows, np.int32)
    return BatchPlan(
        step_id=0,
        model="tiny",
        slots=columns[:, 0].copy(),
        num_computed=columns[:, 1].copy(),
        num_new=columns[:, 2].copy(),
        samples=np.array(samples if samples is not None else [True] * len(rows), np.bool_),
    )
