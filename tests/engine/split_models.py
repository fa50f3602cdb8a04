"""Tiny random models of several families, as ranks of a group hold them, and a script of steps that each rank runs."""

from __future__ import annotations

import json
import random
import time
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.contracts.ranks import GroupBroken
from engine.contracts.steps import StepResult
from engine.cpu import model as cpu_model
from engine.cpu.memory import CpuMemory
from engine.cpu.model import CpuModel
from engine.cpu.ops import CpuOps
from engine.cpu.programs.program import Scratch
from engine.cpu.ranks import SharedRanks
from engine.cpu.stages import SharedStages
from engine.cuda.begins import DeviceBegins
from engine.cuda.ops import CudaOps
from engine.cuda.peers import Peers
from engine.cuda.ranks import DeviceRanks, connect
from engine.cuda.share import CudaShare, ShareLinks
from engine.cuda.stages import DeviceStages
from engine.grammar.row_masks import RowMasks
from engine.host.rank_memory import rank_memory_bytes
from engine.host.rendezvous import Rendezvous, rendezvous_words
from engine.host.stage_memory import stage_memory_bytes
from engine.host.step_begins import StepBegins
from engine.memory.stage_link import StageLink
from engine.memory.weight_range import WeightRange
from engine.protocol import LoadModel, SamplingParams
from loader.configs.adapter_matrices import decoder_of
from loader.configs.hf_config import parse_config
from loader.formats.registry import FORMATS, stored_format
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.shapes.model_shape import DeviceShare, Division, ExpertCopies, ModelShape
from loader.sizes.layout import stored_tensors, weight_layout, weights_bytes
from loader.sizes.slices import split
from loader.sizes.work_space import handed_bytes
from scheduler.batch.plan import BatchPlan, SequenceTable, write_sampling
from tests.engine.gloo import Gloo
from tests.engine.gpt_oss_checkpoint import draw_mxfp4
from tests.engine.model_bench import BLOCK_TOKENS, GEMMA4_LAYERS, GEMMA4_ROPE, MAX_LEN, make_table, plan, put
from tests.engine.rank_processes import BUFFER_BYTES, STAGE_BYTES, Rank
from tests.engine.shared_regions import SharedRegions
from tests.kernel_cache import CACHE_DIR
from tests.loader import compressed, fp8, gptq, int4
from tests.loader.checkpoints import cut_out, write_checkpoint

VOCAB = 212
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": MAX_LEN,
    "rms_norm_eps": 1e-5,
}
# Sizes of latent attention that all differ, in layers without experts; the longest chunks make keys and values of the latents.
LATENTS: dict[str, Any] = {
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 4,
    "moe_intermediate_size": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "tie_word_embeddings": False},
    "llama-biases": {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {"architectures": ["MistralForCausalLM"], "tie_word_embeddings": False, "sliding_window": 7},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "tie_word_embeddings": True,
        "use_sliding_window": True,
        "sliding_window": 13,
        "max_window_layers": 1,
    },
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "tie_word_embeddings": True, "num_key_value_heads": 4},
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "no_rope_layers": [1, 0, 0, 1],
        "use_sliding_window": True,
        "sliding_window": 7,
        "layer_types": ["full_attention", "full_attention", "sliding_attention", "sliding_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "seed-oss": {  # a bias of attention's output, which the first rank alone adds, without one of the MLP's
        "architectures": ["SeedOssForCausalLM"],
        "tie_word_embeddings": False,
        "attention_bias": True,
        "attention_out_bias": True,
    },
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "tie_word_embeddings": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 2.0,
    },
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"],
        "sliding_window": 6,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 9.0,
        "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "sliding_window": 6,
        "sliding_window_pattern": 3,
        "query_pre_attn_scalar": 24,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 50000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
        },
    },
    "cohere": {"architectures": ["CohereForCausalLM"], "logit_scale": 0.75, "layer_norm_eps": 1e-3},
    "cohere2": {
        "architectures": ["Cohere2ForCausalLM"],
        "logit_scale": 0.75,
        "layer_norm_eps": 1e-3,
        "sliding_window": 7,
        "sliding_window_pattern": 3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
    "phi": {
        "architectures": ["PhiForCausalLM"],
        "num_key_value_heads": 8,
        "hidden_size": 64,
        "head_dim": 8,
        "tie_word_embeddings": False,
        "layer_norm_eps": 1e-5,
        "hidden_act": "gelu_new",
    },
    "phi3": {  # queries, keys and values in one tensor, gate and up in another
        "architectures": ["Phi3ForCausalLM"],
        "sliding_window": 11,
        "tie_word_embeddings": False,
    },
    "glm": {
        "architectures": ["GlmForCausalLM"],
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"],
        "num_key_value_heads": 4,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "olmo2": {"architectures": ["Olmo2ForCausalLM"], "tie_word_embeddings": False, "head_dim": 6},
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "tie_word_embeddings": False,
        "head_dim": 6,
        "num_key_value_heads": 4,
        "sliding_window": 7,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
    "qwen3.5": {  # gates of attention's output, between layers of the delta rule
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 12,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    },
    "gemma4": {  # all that models without experts have, of which each has some
        "architectures": ["Gemma4ForCausalLM"],
        **GEMMA4_LAYERS,
        "num_key_value_heads": 4,
        "final_logit_softcapping": 9.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_parameters": GEMMA4_ROPE,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "attention_bias": True,
        "q_lora_rank": 40,
        **LATENTS,
    },
    "deepseek-v2": {"architectures": ["DeepseekV2ForCausalLM"], "q_lora_rank": None, "tie_word_embeddings": True, **LATENTS},
}
# Gemma 4 without inputs of layers, and without layers that read others' keys and values.
FAMILIES["gemma4-unified"] = FAMILIES["gemma4"] | {
    "architectures": ["Gemma4UnifiedForCausalLM"],
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
}
# Widths of which each of two ranks has whole blocks, groups and words.
WIDE = {"hidden_size": 64, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "num_hidden_layers": 2}
QUANTISED: dict[str, Callable[[Path, Path], Any]] = {
    "int8": compressed.compress,
    "FP8 by block": lambda plain, folder: fp8.quantize(plain, folder, fp8.KINDS["fine-grained"]),
    "INT4": lambda plain, folder: int4.quantize(plain, folder, int4.compressed({"group_size": 64}), dtype=torch.bfloat16),
    "AWQ": lambda plain, folder: gptq.quantize(plain, folder, gptq.awq()),
}
GROUPED_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.5,
    "first_k_dense_replace": 1,
}
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2-moe": {
        "architectures": ["Qwen2MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "qwen3-moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3-next": {  # one matrix for all inputs of a layer of the delta rule, key head by key head; a layer without experts
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 4,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    },
    "qwen3.5-moe": FAMILIES["qwen3.5"]
    | {
        "architectures": ["Qwen3_5MoeForCausalLM"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40,
    },
    "glm4-moe": {
        "architectures": ["Glm4MoeForCausalLM"],
        **GROUPED_EXPERTS,
        "use_qk_norm": True,
    },
    "llama4": {
        "architectures": ["Llama4ForCausalLM"],
        "num_local_experts": 4,
        "intermediate_size": 24,
        "intermediate_size_mlp": 64,
        "interleave_moe_layer_step": 2,
        "attention_chunk_size": 8,
        "use_qk_norm": True,
    },
    "gpt-oss": {  # with plain experts, which no checkpoint has: biases, rows of gate and up that alternate, sinks
        "architectures": ["GptOssForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 6,
        "quantization_config": {"quant_method": "mxfp4"},
    },
}
MIXTURES["gemma4-moe"] = FAMILIES["gemma4-unified"] | {  # beside each layer's MLP, and stacked
    "architectures": ["Gemma4ForCausalLM"],
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
}
MIXTURES["deepseek-v3-moe"] = FAMILIES["deepseek-v3"] | GROUPED_EXPERTS
MIXTURES["glm4-moe-lite"] = (
    FAMILIES["deepseek-v3"]
    | GROUPED_EXPERTS
    | {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "attention_bias": False,
        "n_shared_experts": 1,
        "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
        "rope_interleave": False,
    }
)
MIXTURES["deepseek-v2-moe"] = FAMILIES["deepseek-v2"] | GROUPED_EXPERTS | {"topk_method": "group_limited_greedy"}
FAMILIES |= MIXTURES
SLOTS = 24
AnyModel = CpuModel | CudaShare
TOKENS = np.random.default_rng(2).integers(2, VOCAB, (SLOTS, 60)).tolist()
KV_BYTES, CHUNK_BYTES = 8 << 20, 64 << 10


@dataclass(frozen=True)
class How:
    """How a rank computes. compiled: with compiled kernels. recorded: from recorded steps. expert_parts, num_stages, copies: as in
    Division. misrouting: its router is another one, and would choose other experts. gpu: as on a GPU, with interpreted
    kernels. maps: ranks add up small tensors through memory that they map from each other. few_steps, few_layers: it runs fewer
    steps, and of a model with four layers the first three, since interpreted kernels take seconds for each. graph_rows,
    graph_tokens: as max_graph_rows and max_graph_tokens of CudaShare, for tests with a stand-in for graphs."""

    compiled: bool = True
    recorded: bool = True
    expert_parts: int = 1
    misrouting: bool = False
    num_stages: int = 1
    gpu: bool = False
    maps: bool = False
    few_steps: bool = False
    few_layers: bool = False
    graph_rows: int = 0
    graph_tokens: int = 0
    copies: ExpertCopies = ()

    def division(self, size: int) -> Division:
        return Division(size, self.expert_parts, self.num_stages, self.copies)


def drawn_copies(shape: ModelShape, expert_parts: int, number: int, seed: int = 1) -> ExpertCopies:
    """Returns `number` further experts, any of other parts, for each part of the experts of each layer."""
    draw, experts = random.Random(seed), shape.experts
    assert experts is not None
    num_own = experts.num_experts // expert_parts
    parts = [range(part * num_own, (part + 1) * num_own) for part in range(expert_parts)]
    others = [sorted(set(range(experts.num_experts)).difference(own)) for own in parts]
    return tuple(
        () if layer in experts.dense_layers else tuple(tuple(sorted(draw.sample(own, number))) for own in others)
        for layer in range(shape.num_layers)
    )


def shape_of(family: str, dtype: str, few_layers: bool = False) -> ModelShape:
    """Returns the shape of one of FAMILIES. few_layers: as in How."""
    config = COMMON | FAMILIES[family] | {"torch_dtype": dtype}
    if few_layers and config["num_hidden_layers"] == COMMON["num_hidden_layers"]:
        lists = {key: config[key][:3] for key in ("layer_types", "mlp_layer_types", "no_rope_layers") if key in config}
        config |= {"num_hidden_layers": 3, **lists}
    return replace(parse_config(json.dumps(config).encode()), stored_format="")  # weights are drawn


def write_quantised(name: str, folder: Path) -> str:
    """Writes a checkpoint in one of QUANTISED and returns its folder, which load_share takes in place of a family."""
    config = COMMON | FAMILIES["llama"] | WIDE | {"dtype": "float32"}
    plain = write_checkpoint(folder / "plain", config)
    tensors = {key: _drawn(key, tensor.shape, False) for key, tensor in load_file(plain / "model.safetensors").items()}
    save_file(tensors, plain / "model.safetensors")
    QUANTISED[name](plain, folder / "quantised")
    return str(folder / "quantised")


def write_gemma4(folder: Path) -> str:
    """Writes a checkpoint of Gemma 4 with seven layers, of which the last two read the keys and values of two others, so that it
    can have four stages. Returns its folder, as write_quantised does."""
    kinds = ["sliding_attention", "full_attention", *("sliding_attention",) * 2, "full_attention"]
    layers = {"num_hidden_layers": 7, "layer_types": [*kinds, *kinds[-2:]]}
    config = COMMON | FAMILIES["gemma4"] | layers | {"dtype": "float32"}
    shape = parse_config(json.dumps(config).encode())
    (folder / "config.json").write_text(json.dumps(config))
    save_file({one.name: _drawn_of(shape, one.name, one.shape) for one in stored_tensors(shape)}, folder / "model.safetensors")
    return str(folder)


def write_mxfp4(folder: Path) -> str:
    """Writes a checkpoint of gpt-oss, whose experts are in MXFP4, and returns its folder, as write_quantised does."""
    config = json.dumps(COMMON | FAMILIES["gpt-oss"] | {"dtype": "float32"})
    generator, tensors = torch.Generator().manual_seed(1), {}
    for tensor in stored_tensors(parse_config(config.encode())):
        if tensor.name.endswith("_blocks"):
            blocks, scales = draw_mxfp4(*tensor.shape[:2], tensor.shape[2] * 32, generator)
            tensors |= {tensor.name: blocks, f"{tensor.name.removesuffix('_blocks')}_scales": scales}
        elif not tensor.name.endswith("_scales"):
            tensors[tensor.name] = _drawn(tensor.name, tensor.shape, False)
    (folder / "config.json").write_text(config)
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


def _load_files(own: Rank, folder: str, dtype: str, how: How, whole: bool) -> AnyModel:
    """Returns a rank's share of a checkpoint, or all of it, as an engine loads it."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, share=None if whole else DeviceShare(own.rank, how.division(own.size)))
        held_in = stored_format(source.shape)
        memory, weights = _memory_for(weights_bytes(source.shape, dtype, held_in))
        sink = HostSink(weights.buffer, weights.prepare)
        stream_weights(source, dtype, sink, StagingRing(3, 256 << 10), lambda *_: None, lambda: False, held_in)
    return _model(own, source.shape, dtype, how, whole, memory, weights, held_in.name)


def load_share(own: Rank, family: str, dtype: str, how: How, whole: bool = False) -> AnyModel:
    """Returns a rank's share of a model, or all of it. Its weights are drawn by their names. family: or the folder of a
    checkpoint."""
    if "/" in family:
        return _load_files(own, family, dtype, how, whole)
    of_whole = shape_of(family, dtype, how.few_layers)
    shape = of_whole if whole else split(of_whole, own.rank, how.division(own.size))
    memory, weights = _memory_for(weights_bytes(shape, dtype))
    for slot in weight_layout(shape, dtype):
        drawn = _drawn_of(of_whole, slot.name, slot.stored_shape)
        if how.misrouting and slot.name.endswith((".mlp.gate.weight", "router.proj.weight")):
            drawn = -drawn
        held = weights.tensor(slot.offset_bytes, slot.shape, getattr(torch, slot.held_as or dtype))
        held.copy_(cut_out(drawn, slot.cut))
    return _model(own, shape, dtype, how, whole, memory, weights)


def _memory_for(num_bytes: int) -> tuple[CpuMemory, WeightRange]:
    num_chunks = -(-num_bytes // CHUNK_BYTES)
    memory = CpuMemory(num_chunks, CHUNK_BYTES)
    weights = WeightRange(memory, num_bytes)
    weights.map(range(num_chunks))
    return memory, weights


def _model(
    own: Rank,
    shape: ModelShape,
    dtype: str,
    how: How,
    whole: bool,
    memory: CpuMemory,
    weights: WeightRange,
    quantize: str = "",
) -> AnyModel:
    own.kept["memory"] = memory
    if how.gpu:
        return _gpu_share(own, shape, dtype, weights, quantize, how)
    from tests.engine import rank_kernels

    ops = rank_kernels.compiled if how.compiled else rank_kernels.plain
    if quantize:
        ops.prepare(dtype, 1, FORMATS[quantize].kernels)
    spec = LoadModel(1, "m", "", dtype, "", weights.num_chunks, 0, 0, MAX_LEN, SLOTS, [1], quantize=quantize)
    ranks = stages = None
    if not whole:
        ranks, stages = _joins(own, ops, shape, dtype, how.division(own.size))
    recorded_rows, cpu_model.MAX_RECORDED_ROWS = cpu_model.MAX_RECORDED_ROWS, SLOTS if how.recorded else 0
    sizes, kv_memory = (BLOCK_TOKENS, 1), torch.zeros(KV_BYTES, dtype=torch.uint8)
    model = CpuModel(ops, spec, shape, weights, memory, Scratch(8 << 20), *sizes, ranks=ranks, kv_memory=kv_memory, stages=stages)
    cpu_model.MAX_RECORDED_ROWS = recorded_rows
    return model


def _gpu_share(own: Rank, shape: ModelShape, dtype: str, weights: WeightRange, quantize: str, how: How) -> CudaShare:
    assert shape.split is not None
    division, device = shape.split.division, torch.device("cpu")
    size, stage, ranks, stages = division.stage_size, division.stage_of(own.rank), None, None
    if size > 1:
        all_words, num_words = own.stages[-STAGE_BYTES // 2 :].view(np.int64), rendezvous_words(size)
        words, rank = all_words[stage * num_words : (stage + 1) * num_words], own.rank % size
        connects = Peers(Gloo(), SharedRegions, on_device=False) if how.maps else Gloo()
        ranks = connect(connects, Rendezvous(words, rank, own.broken), rank, size, own.broken, device)
        collectives: Any = ranks.collectives
        assert not how.maps or collectives.is_joined
    if division.num_stages > 1:
        taking, sending = (_link(own, shape, dtype, division) for _ in range(2))
        stages = DeviceStages(taking, sending, shape.hidden_size, getattr(torch, dtype), device)
    begins = None
    if division.num_stages == 1:
        begins = DeviceBegins(StepBegins(own.memory, own.rank, size), own.rank == 0, is_cuda=False)
    links = ShareLinks(ranks, stages, own.broken, begins)
    spec = LoadModel(1, "m", "", dtype, "", weights.num_chunks, 0, 0, MAX_LEN, SLOTS, [1], quantize=quantize)
    kv_memory = torch.full((KV_BYTES,), 0xFF, dtype=torch.uint8)  # NaN in every dtype
    if (before := own.kept.get("share")) is not None:
        before._links.close()
    sizes = (BLOCK_TOKENS, links, how.graph_rows, how.graph_tokens)
    own.kept["share"] = share = CudaShare(CudaOps(CACHE_DIR), spec, shape, weights, kv_memory, *sizes)
    return share


def _joins(
    own: Rank, ops: CpuOps, shape: ModelShape, dtype: str, division: Division
) -> tuple[SharedRanks | None, SharedStages | None]:
    """Returns what joins a rank's share with those of its stage, and with other stages."""
    size, stage = division.stage_size, division.stage_of(own.rank)
    ranks = stages = None
    if size > 1:
        num_bytes = rank_memory_bytes(size, BUFFER_BYTES)
        ranks = SharedRanks(ops, own.rank % size, size, own.broken, own.memory[stage * num_bytes : (stage + 1) * num_bytes])
    if division.num_stages > 1:
        stages = SharedStages(_link(own, shape, dtype, division), shape.hidden_size, getattr(torch, dtype))
    return ranks, stages


def _link(own: Rank, shape: ModelShape, dtype: str, division: Division) -> StageLink:
    """Returns a connection of a rank to the stages before and after its own."""
    handed = handed_bytes(shape, dtype, MAX_LEN)
    num_bytes = stage_memory_bytes(1, division.num_stages, handed)
    memory = own.stages[own.rank % division.stage_size * num_bytes :][:num_bytes]
    return StageLink(memory, division.stage_of(own.rank), division.num_stages, handed, own.broken)


def wait_for_leader(own: Rank, how: How, step: int) -> None:
    """Waits until rank 0 may have posted a step: at most as many are under way as there are stages."""
    while own.rank and how.num_stages > 1 and own.ended[0] <= step - how.num_stages:
        time.sleep(1e-4)


def _drawn_of(model: ModelShape, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns the weights of a model's tensor, drawn by its name. shape: the tensor's."""
    drawn = _drawn(name, shape, decoder_of(model).norms_around_one)
    if name.endswith("q_norm.weight") and model.query_scale == 1.0:  # which norms of queries make up for
        drawn *= 0.1
    return drawn


def _drawn(name: str, shape: tuple[int, ...], norms_around_one: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    if "norm" in name and name.endswith("weight"):
        return torch.rand(shape, generator=generator) + (-0.5 if norms_around_one and "linear_attn" not in name else 0.5)
    if name.endswith("A_log"):  # so small that states last
        return torch.rand(shape, generator=generator) * 4.0 - 4.0
    return torch.randn(shape, generator=generator) * (0.3 if name.endswith("bias") else 0.2)


def table_of(model: AnyModel) -> SequenceTable:
    table = make_table(SLOTS, 64, model.kv_groups)
    for slot, tokens in enumerate(TOKENS):
        put(table, slot, tokens)
    return table


def _decodes(slots: range, at: int) -> BatchPlan:
    return plan(*((slot, at, 1) for slot in slots))


def logits_of_steps(own: Rank, family: str, dtype: str, how: How, whole: bool = False) -> tuple[list[np.ndarray], int]:
    """Returns the logits of prompts, chunks of prompts, mixed batches, and decode steps whose rows are padded, and how many pieces
    the rank has exchanged."""
    model = load_share(own, family, dtype, how, whole)
    table = table_of(model)
    steps = [
        plan((0, 0, 1), (2, 0, 20), (3, 0, 9), samples=(True, True, False)),
        plan((2, 20, 1), (3, 9, 30)),
        plan((2, 21, 1), (3, 39, 1)),
        plan((2, 22, 1), (3, 40, 1)),
        plan(*((slot, 0, 5) for slot in range(4, 17))),
        *(_decodes(range(4, 16), at) for at in range(5, 8)),
        plan((4, 8, 1), (5, 8, 3), (16, 5, 17), samples=(False, True, False)),
    ]
    every_token = plan((20, 0, 33))
    if how.few_steps:
        steps = [
            plan((0, 0, 1), (2, 0, 12), (3, 0, 5), samples=(True, True, False)),
            plan((2, 12, 1), (3, 5, 9)),
            plan((0, 1, 1), (2, 13, 1), (3, 14, 1)),
        ]
        every_token = plan((20, 0, 9))
    found = []
    for number, step in enumerate([*steps, every_token]):
        wait_for_leader(own, how, number)
        if model._model.makes_logits:
            found.append(model.logits(step, table, every_token=number == len(steps)))
        else:
            model.follow(step, table)
        if own.rank == 0:
            own.ended[0] += 1
    return found, _pieces(model)


def _pieces(model: AnyModel) -> int:
    ranks = model._ranks
    if isinstance(ranks, DeviceRanks):
        collectives: Any = ranks.collectives
        return int(getattr(collectives, "others", collectives).num_exchanges)
    assert ranks is None or isinstance(ranks, SharedRanks)
    return 0 if ranks is None else int(ranks._own[0])


def results_of_steps(own: Rank, family: str, dtype: str, how: How, whole: bool = False) -> tuple[list[dict[str, Any]], list[int]]:
    """Runs steps as an engine does: rank 0 executes them and returns the results, the others follow. Returns them with how many
    pieces the rank had exchanged after each step."""
    model = load_share(own, family, dtype, how, whole)
    told: list[dict[str, Any]] = []
    table, pieces = table_of(model), []
    for slot, settings in enumerate(
        (
            {},
            {"temperature": 1.0, "seed": 3},
            {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 50},
            {"logprobs": 3},
            {"presence_penalty": 0.5, "logit_bias": {7: 2.0}},
            {"prompt_logprobs": 2},
            {"prompt_logprobs": 1, "prompt_ranks": True},
        )
    ):
        params = SamplingParams(**{"max_tokens": 20, "temperature": 0.0} | settings)
        write_sampling(table, slot, params, 40, MAX_LEN)
        table.num_prompt[slot] = 40
        table.prompt_logprobs[slot] = params.prompt_logprobs >= 0
        table.request_id[slot] = slot + 1
    steps = (
        (plan((0, 0, 20), (1, 0, 40), samples=(False, True)), False),
        (plan((1, 40, 1), (0, 20, 20)), False),
        (plan((0, 40, 1), (1, 41, 1)), False),
        (plan((0, 41, 1), (1, 42, 1)), False),
        (plan((0, 42, 1), (1, 43, 1)), False),
        (plan((0, 43, 1), (1, 44, 1)), True),
        (plan((2, 0, 40), (3, 0, 40), samples=(False, False)), False),
        (plan((2, 40, 1), (3, 40, 1)), False),
        (plan((4, 0, 40)), False),
        (plan((0, 44, 1), (4, 40, 1)), False),
        (plan((5, 0, 30), (6, 0, 10), samples=(False, False)), False),  # more owed rows than logits are computed for at a time
        (plan((0, 45, 1), (5, 30, 10), (6, 10, 30)), False),
        (plan((0, 46, 1), (0, 47, 1), (0, 48, 1), (1, 45, 1)), False),  # drafted rows
        *((plan((slot, 0, 30)), False) for slot in (7, 8, 9)),  # drawn from a recorded step with a chunk, once it is known
    )
    if how.few_steps:
        steps = steps[:-3]  # they matter where steps are recorded
    for number, (step, masked) in enumerate(steps):
        wait_for_leader(own, how, number)
        if how.recorded and own.rank == 0 and model.num_uncaptured:
            model.capture_next()
        if own.rank == 0:
            masks = RowMasks([1], np.array([0]), [_every_third()]) if masked else None
            told.append(_plain(model.execute(step, table, masks)))
            own.ended[0] += 1
        else:
            model.follow(step, table)
        table.prompt_logprobs[step.slots[step.samples]] = False
        pieces.append(_pieces(model))
    return told, pieces


def waits_of_steps(own: Rank, how: How, late_s: float) -> list[tuple[float, float]]:
    """Returns the seconds of a few decode steps and how much of them rank 0 waited, with a follower that begins each so late."""
    model = load_share(own, "llama", "float32", how)
    table, told = table_of(model), []
    params = SamplingParams(max_tokens=20, temperature=0.0)
    write_sampling(table, 0, params, 1, MAX_LEN)
    for at in range(4):
        while own.rank and own.ended[0] < at:  # as a step is posted once the one before has ended
            time.sleep(1e-4)
        if own.rank:
            time.sleep(late_s)
            model.follow(plan((0, at, 1)), table)
        else:
            result = model.execute(plan((0, at, 1)), table)
            own.ended[0] += 1
            told.append((result.seconds, result.waited_s))
    return told


def _every_third() -> Any:
    allowed = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    allowed[:VOCAB:3] = 1
    return np.packbits(allowed, bitorder="little").view(np.uint32)


def _plain(result: StepResult) -> dict[str, Any]:
    """Returns what a step has told: whole numbers as "ids", others as "floats"."""
    ids, floats = [*result.ids.tolist(), *result.bad.tolist()], []
    if (told := result.logprobs) is not None:
        ids += [*told.request_ids, *told.top_ids]
        floats += [*told.chosen, *told.top]
    for prompt in result.prompt_logprobs:
        ids += [prompt.request_id, prompt.first, *prompt.top_ids, *prompt.ranks]
        floats += [*prompt.chosen, *prompt.top]
    return {"ids": ids, "floats": floats}


def execute_alone(own: Rank, how: How) -> str:
    """Loads a share, and on rank 0 executes a step for which the other ranks never come. Returns the name of what is raised."""
    try:
        model = load_share(own, "llama", "float32", how)
        if own.rank:
            return ""
        model.execute(plan((0, 0, 20)), table_of(model))
    except GroupBroken as error:
        return type(error).__name__
    return ""
