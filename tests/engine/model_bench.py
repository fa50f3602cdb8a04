"""Makes tiny checkpoints with transformers, and a table filled by hand to step them with."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.contracts.loads import LoadTask
from engine.cpu import model as cpu_model
from engine.cpu.backend import CpuBackend
from engine.cpu.memory import CpuMemory
from engine.cpu.model import CpuModel
from engine.loading import runner as loading
from engine.loading.runner import TorchRunner
from engine.memory.host_tier import HostTier
from engine.ops import reference
from engine.protocol import Configure, LoadModel
from loader.models.catalog import scan_one
from loader.models.drafters import joined
from loader.reading.staging import StagingRing
from loader.shapes.kv_layout import KVGroupSpec
from scheduler.batch.plan import BatchPlan, SequenceTable, make_sequence_table
from tests.engine import gpt_oss_checkpoint
from tests.kernel_cache import CACHE_DIR

BLOCK_TOKENS = 4
MAX_LEN = 128
NUM_CHUNKS, CHUNK_BYTES = 64, 64 << 10
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
GEMMA4_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    "sliding_window": 6,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 220,
}
GEMMA4_ROPE = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1000.0, "partial_rotary_factor": 0.25},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
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
    "llama-yarn": {
        "kind": "llama",
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "mscale": 2.0,
            "mscale_all_dim": 0.5,
        },
    },
    "llama-no-gqa": {"kind": "llama", "tie_word_embeddings": False, "num_key_value_heads": 6, "head_dim": 8},
    "qwen3": {"kind": "qwen3", "tie_word_embeddings": False},
    "qwen3-tied-biases": {"kind": "qwen3", "tie_word_embeddings": True, "attention_bias": True},
    "qwen3-windows": {"kind": "qwen3", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2},
    "mistral": {"kind": "mistral", "sliding_window": None},
    "mistral-window": {"kind": "mistral", "sliding_window": 7},
    "qwen2": {"kind": "qwen2", "tie_word_embeddings": True},
    "qwen2-windows": {"kind": "qwen2", "use_sliding_window": True, "sliding_window": 13, "max_window_layers": 1},
    "phi3": {"kind": "phi3", "head_dim": 8, "pad_token_id": 0},
    "phi3-partial-window": {
        "kind": "phi3",
        "pad_token_id": 0,
        "head_dim": 8,
        "sliding_window": 11,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    },
    "gemma2": {
        "kind": "gemma2",
        "num_hidden_layers": 4,
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
        "query_pre_attn_scalar": 24,
    },
    "gemma3": {
        "kind": "gemma3",
        "num_hidden_layers": 7,
        "sliding_window": 6,
        "query_pre_attn_scalar": 24,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "gemma4": {  # all that its models have, of which each has some
        "kind": "gemma4",
        **GEMMA4_LAYERS,
        "enable_moe_block": True,
        "num_experts": 7,
        "top_k_experts": 3,
        "moe_intermediate_size": 24,
        "final_logit_softcapping": 9.0,
        "rope_parameters": GEMMA4_ROPE,
    },
    "olmo2": {"kind": "olmo2", "tie_word_embeddings": False, "pad_token_id": 0},
    "glm4": {
        "kind": "glm4",
        "pad_token_id": 0,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "smollm3": {
        "kind": "smollm3",
        "num_hidden_layers": 4,
        "no_rope_layers": [1, 0, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "cohere2": {
        "kind": "cohere2",
        "num_hidden_layers": 4,
        "head_dim": 8,
        "layer_norm_eps": 1e-3,
        "logit_scale": 0.75,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "pad_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "mixtral": {"kind": "mixtral", "num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7},
    "qwen2-moe": {
        "kind": "qwen2_moe",
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 2,
    },
    "qwen3-moe": {
        "kind": "qwen3_moe",
        "num_hidden_layers": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "qwen3-next": {
        "kind": "qwen3_next",
        "full_attention_interval": 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "qwen3.5": {
        "kind": "qwen3_5",
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    },
    "qwen3.5-moe": {
        "kind": "qwen3_5_moe",
        "full_attention_interval": 2,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 3,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "glm4-moe": {
        "kind": "glm4_moe",
        "num_hidden_layers": 2,
        "pad_token_id": 0,
        "attention_bias": True,
        "use_qk_norm": True,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "deepseek-v2": {
        "kind": "deepseek_v2",
        "num_key_value_heads": 6,
        "q_lora_rank": None,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "deepseek-v2-groups": {
        "kind": "deepseek_v2",
        "num_key_value_heads": 6,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 12,
        "num_experts_per_tok": 3,
        "topk_method": "group_limited_greedy",
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 4.0,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
    },
    "deepseek-v3": {
        "kind": "deepseek_v3",
        "num_key_value_heads": 6,
        "attention_bias": True,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 20,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 24,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 100.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
        },
    },
    "glm4-moe-lite": {
        "kind": "glm4_moe_lite",
        "num_key_value_heads": 6,
        "q_lora_rank": 28,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
        "n_routed_experts": 12,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "rope_interleave": False,
        "pad_token_id": 0,
    },
    "gpt-oss": {
        "kind": "gpt_oss",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 32,
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "sliding_window": 7,
        "swiglu_limit": 1.5,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 8.0,
            "truncate": False,
        },
    },
    "llama4": {
        "kind": "llama4",
        "num_hidden_layers": 4,
        "intermediate_size": 24,
        "intermediate_size_mlp": 80,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2,
        "moe_layers": [1, 3],
        "no_rope_layer_interval": 2,
        "no_rope_layers": [1, 0, 1, 0],
        "attention_chunk_size": 14,
        "attn_scale": 0.7,
        "floor_scale": 5,
        "pad_token_id": 0,
        "rope_parameters": {**LLAMA3_ROPE, "low_freq_factor": 1.0, "high_freq_factor": 1.0},
    },
    "gemma3-caps": {  # transformers caps the logits by these and leaves the scores alone
        "kind": "gemma3",
        "num_hidden_layers": 3,
        "sliding_window": 6,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 9.0,
    },
}
# One case for each way in which a recorded step differs.
RECORDED_CASES = [
    "llama-biases-linear",
    "qwen3-tied-biases",
    "mistral-window",
    "phi3-partial-window",
    "gemma2",
    "gemma3",
    "gemma4",
    "olmo2",
    "glm4",
    "cohere2",
    "qwen2-moe",
    "qwen3-next",
    "glm4-moe",
    "deepseek-v3",
    "gpt-oss",
    "llama4",
]


def is_stacked(folder: Path) -> bool:
    """Returns whether the checkpoint holds all experts of a layer in one tensor."""
    shape = scan_one(folder).shape
    return shape is not None and shape.experts is not None and shape.experts.stacked


SIGMOID_KINDS = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")


def _without_head_dim(changes: dict[str, Any]) -> dict[str, Any]:
    """Returns a configuration of latent attention, in which head_dim is another name of qk_rope_head_dim."""
    return {key: value for key, value in (COMMON | changes).items() if key != "head_dim"}


def make_checkpoint(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.float32, seed: int = 3, **changes: Any) -> Any:
    """Saves a seeded random model whose norms and biases are random too, and returns transformers' own copy of it."""
    import transformers

    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "phi3": (transformers.Phi3Config, transformers.Phi3ForCausalLM),
        "olmo2": (transformers.Olmo2Config, transformers.Olmo2ForCausalLM),
        "olmo3": (transformers.Olmo3Config, transformers.Olmo3ForCausalLM),
        "glm": (transformers.GlmConfig, transformers.GlmForCausalLM),
        "glm4": (transformers.Glm4Config, transformers.Glm4ForCausalLM),
        "smollm3": (transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM),
        "seed_oss": (transformers.SeedOssConfig, transformers.SeedOssForCausalLM),
        "granite": (transformers.GraniteConfig, transformers.GraniteForCausalLM),
        "cohere": (transformers.CohereConfig, transformers.CohereForCausalLM),
        "cohere2": (transformers.Cohere2Config, transformers.Cohere2ForCausalLM),
        "phi": (transformers.PhiConfig, transformers.PhiForCausalLM),
        "mixtral": (transformers.MixtralConfig, transformers.MixtralForCausalLM),
        "qwen2_moe": (transformers.Qwen2MoeConfig, transformers.Qwen2MoeForCausalLM),
        "qwen3_moe": (transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM),
        "qwen3_next": (transformers.Qwen3NextConfig, transformers.Qwen3NextForCausalLM),
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
        "qwen3_5_moe": (transformers.Qwen3_5MoeTextConfig, transformers.Qwen3_5MoeForCausalLM),
        "glm4_moe": (transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM),
        "deepseek_v2": (transformers.DeepseekV2Config, transformers.DeepseekV2ForCausalLM),
        "deepseek_v3": (transformers.DeepseekV3Config, transformers.DeepseekV3ForCausalLM),
        "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM),
        "llama4": (transformers.Llama4TextConfig, transformers.Llama4ForCausalLM),
        "gpt_oss": (transformers.GptOssConfig, transformers.GptOssForCausalLM),
        "gemma2": (transformers.Gemma2Config, transformers.Gemma2ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
        "gemma4": (transformers.Gemma4TextConfig, transformers.Gemma4ForCausalLM),
    }[kind]
    torch.manual_seed(seed)
    config = config_class(**(COMMON | changes)) if "kv_lora_rank" not in changes else config_class(**_without_head_dim(changes))
    config._attn_implementation = "eager"  # the only one of transformers' that caps scores
    model = model_class(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or (kind == "gemma4" and name.endswith("scale")):
                parameter.uniform_(0.5, 1.5)
                if kind.startswith(("gemma2", "gemma3", "qwen3_next", "qwen3_5")) and not name.endswith("linear_attn.norm.weight"):
                    parameter -= 1.0  # factors are 1 + weight
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
            elif name.endswith("A_log"):  # so small that states last
                parameter.uniform_(-4.0, 0.0)
            elif name.endswith("sinks"):
                parameter.normal_()
            elif kind in SIGMOID_KINDS and name.endswith("mlp.gate.weight"):
                parameter *= 2.0  # scores from 0 to 1
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3)
            elif name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model = model.to(dtype).eval()
    if kind == "gpt_oss":
        gpt_oss_checkpoint.save(model, folder, seed)
    else:
        model.save_pretrained(folder)
    return model


WEIGHT_CHUNKS, NUM_MODELS = 32, 8
_names = itertools.count()
_places = itertools.cycle(range(NUM_MODELS))


def make_memory(num_chunks: int = NUM_CHUNKS, chunk_bytes: int = CHUNK_BYTES) -> CpuMemory:
    """Returns memory with num_chunks chunks for blocks that tests assign to tables by hand, followed by the chunks for weights."""
    return CpuMemory(num_chunks + NUM_MODELS * WEIGHT_CHUNKS * CHUNK_BYTES // chunk_bytes, chunk_bytes)


def load_task(spec: LoadModel, progress: Any = None, cancelled: Any = None, memory: CpuMemory | None = None) -> LoadTask:
    """Returns a load into chunks after the tables' own, spec.weights_chunks at most. A few models can be loaded at a time."""
    chunk_bytes = memory.chunk_bytes if memory else CHUNK_BYTES
    num = WEIGHT_CHUNKS * CHUNK_BYTES // chunk_bytes
    first = (memory.num_chunks - NUM_MODELS * num if memory else NUM_CHUNKS) + next(_places) * num
    chunks = np.arange(first, first + min(num, spec.weights_chunks), dtype=np.int32)
    return LoadTask(spec, chunks, progress or (lambda done, total: None), cancelled or (lambda: False))


def make_runner(memory: CpuMemory, cache_dir: str = CACHE_DIR, tier: HostTier | None = None, **options: Any) -> TorchRunner:
    place = ("cpu:0", memory.num_chunks, memory.chunk_bytes)
    configure = Configure(*place, 64 << 20, 512, BLOCK_TOKENS, 10.0, 1, cache_dir=cache_dir, **options)
    with pytest.MonkeyPatch.context() as patch:  # touching all of an engine's staging memory takes longer than most tests
        patch.setattr(loading, "StagingRing", partial(StagingRing, 4, 256 << 10))
        return TorchRunner(CpuBackend(memory, configure), configure, tier)


def runner_with_kernels() -> Iterator[TorchRunner]:
    """Yields a runner whose compiled kernels are ready, and frees its memory afterwards: the body of a fixture."""
    memory = make_memory()
    runner = make_runner(memory)
    runner._kernels.result()
    yield runner
    memory.close()


def load(
    runner: TorchRunner,
    folder: Path,
    dtype: str = "float32",
    eos: tuple[int, ...] = (1,),
    max_len: int = MAX_LEN,
    max_sequences: int = 8,
    quantize: str = "",
    kv_cache_dtype: str = "",
    name: str = "",
    speculator: str = "none",
    head: str = "",
) -> CpuModel:
    name = name or f"tiny{next(_names)}"  # a new name gets a new weight range
    seen = scan_one(folder)
    assert seen.shape is not None, seen.error
    held = quantize or seen.shape.stored_format
    limits = (1 << 20, 0, 0, max_len, max_sequences, list(eos))
    formats = {"quantize": held, "kv_cache_dtype": kv_cache_dtype}
    fingerprint = joined(seen, scan_one(head)).fingerprint if head else seen.fingerprint
    drafts = {"speculator": speculator, "head_path": head}
    spec = LoadModel(1, name, str(folder), dtype, fingerprint, *limits, **formats, **drafts)
    model = runner.load(load_task(spec, memory=runner.memory))
    assert isinstance(model, CpuModel)
    return model


def load_both(
    runner: TorchRunner, folder: Path, dtype: str, quantize: str = "", max_sequences: int = 8
) -> tuple[CpuModel, CpuModel]:
    """Returns two copies of a model: one that records its steps, and one that does not."""
    recorded = load(runner, folder, dtype, max_sequences=max_sequences, quantize=quantize)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_model, "MAX_RECORDED_ROWS", 0)
        return recorded, load(runner, folder, dtype, max_sequences=max_sequences, quantize=quantize)


def make_table(slots: int = 8, length: int = MAX_LEN, groups: Sequence[KVGroupSpec] = ()) -> SequenceTable:
    """Returns a table whose slots have their own blocks, scattered over the arena. Each group's blocks come after those of the
    group before it."""
    blocks = -(-length // BLOCK_TOKENS)
    table = make_sequence_table(slots, length, blocks, max(1, len(groups)))
    table.temperature[:] = 0
    table.max_total_tokens[:] = length
    begin_bytes = 0
    for number, block_table in enumerate(table.block_tables):
        order = np.random.default_rng(5 + number).permutation(slots * blocks).astype(np.int32)
        block_table[:] = order.reshape(slots, blocks)
        if groups:
            first = -(-begin_bytes // groups[number].block_bytes)
            block_table += first
            begin_bytes = (first + slots * blocks) * groups[number].block_bytes
    assert begin_bytes <= NUM_CHUNKS * CHUNK_BYTES
    return table


def forget_behind_windows(model: CpuModel, table: SequenceTable, slot: int, num_computed: int) -> None:
    """Drops blocks that no query from position num_computed on sees, as the batch scheduler does, and fills them with NaN."""
    for memory, block_table in zip(model._kv, table.block_tables, strict=True):
        if memory.reach:
            num_blocks = reference.first_seen(num_computed + 1, memory.reach) // BLOCK_TOKENS
            memory.kv[block_table[slot, :num_blocks]] = torch.nan
            memory.kv[-1] = torch.nan  # the block that an index of -1 would read
            block_table[slot, :num_blocks] = -1


def put(table: SequenceTable, slot: int, tokens: list[int]) -> None:
    table.tokens[slot, : len(tokens)] = tokens
    table.num_tokens[slot] = len(tokens)


def plan(*rows: tuple[int, int, int], samples: tuple[bool, ...] | None = None) -> BatchPlan:
    """Returns a plan of these rows (slot, num_computed, num_new), decode rows first."""
    columns = np.array(rows, np.int32)
    return BatchPlan(
        step_id=0,
        model="tiny",
        slots=columns[:, 0].copy(),
        num_computed=columns[:, 1].copy(),
        num_new=columns[:, 2].copy(),
        samples=np.array(samples if samples is not None else [True] * len(rows), np.bool_),
    )


def logits_of(
    prompt: list[int], runner: TorchRunner, folder: Path, dtype: str = "float32", steps: tuple[int, ...] = (60,)
) -> np.ndarray:
    """Returns the logits of a prompt's tokens, computed in steps of so many of them."""
    model = load(runner, folder, dtype)
    table = make_table(groups=model.kv_groups)
    put(table, 2, prompt)
    starts = np.cumsum((0, *steps[:-1])).tolist()
    found = [model.logits(plan((2, at, num)), table, every_token=True) for at, num in zip(starts, steps, strict=True)]
    model.release()
    return np.concatenate(found)
