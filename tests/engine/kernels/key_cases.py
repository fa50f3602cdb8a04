"""Models and steps whose kernels' keys are recorded (record_keys.py): the settings of which a key could depend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.cuda.model import CudaModel
from engine.cuda.share import CudaShare
from engine.grammar.row_masks import RowMasks
from engine.protocol import LoadModel, SamplingParams
from loader.architectures.registry import architecture_of
from loader.configs.hf_config import parse_config
from loader.shapes.model_shape import LAST_TOKEN, DeviceShare, Division, ModelShape
from loader.sizes import slices
from scheduler.batch.plan import BatchPlan, SequenceTable, make_sequence_table, write_sampling
from tests.loader.compressed import quantization_config
from tests.loader.fp8 import FINE_GRAINED
from tests.loader.gptq import gptq
from tests.loader.test_families import (
    GEMMA2_2B,
    GEMMA3_1B,
    GLM45_AIR,
    GPT_OSS_20B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    OLMO2_7B,
    PHI3_MINI_4K,
    QWEN15_MOE,
    QWEN25_7B,
)

BLOCK_TOKENS = 16
MAX_LEN, MAX_ROWS = 400, 260  # more rows than are sampled from at a time (256) and than one work list kernel takes (64)
SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_LEN,
}


@dataclass(frozen=True)
class KeyCase:
    """A model. config: a config.json, changed by SMALL and `more`. block_offset: where the first of each three groups of parameters
    begins, in bytes from a block's boundary, the others 8 and 16 bytes further; -1: all are aligned. max_len: the length of its
    sequences, in tokens. pooling: of ModelShape. adapters: whether rows of its steps have LoRA adapters. predicts: whether its
    predictor drafts behind each step. share: the part of a split model that it is; None: it is whole."""

    name: str
    config: dict[str, Any]
    dtype: str = "bfloat16"
    kv_cache_dtype: str = ""
    block_offset: int = -1
    max_len: int = MAX_LEN
    max_rows: int = MAX_ROWS
    more: dict[str, Any] = field(default_factory=dict)
    pooling: str = ""
    adapters: bool = False
    predicts: bool = False
    share: DeviceShare | None = None

    @property
    def shape(self) -> ModelShape:
        shape = parse_config(json.dumps(self.config | SMALL | self.more).encode())
        shape = replace(shape, pooling=self.pooling, predicts=self.predicts)
        if self.share is not None:
            shape = slices.split(shape, *self.share)
        if self.block_offset < 0:
            return shape
        num_groups = len(architecture_of(shape).tensor_groups(shape))
        return replace(shape, block_offsets=tuple(self.block_offset + 8 * (at % 3) for at in range(num_groups)))

    @property
    def spec(self) -> LoadModel:
        limits = (1 << 20, 0, 0, self.max_len, self.max_rows, [1])
        held = self.shape.stored_format
        return LoadModel(1, self.name, "", self.dtype, "", *limits, held, kv_cache_dtype=self.kv_cache_dtype)


PUBLISHED = Path(__file__).parents[2] / "published"
DEEPSEEK_V3, DEEPSEEK_V2_LITE, LLAMA4_SCOUT, QWEN3_NEXT, COMMAND_R7B, PHI_2 = (
    json.loads((PUBLISHED / f"{name}.json").read_text())
    for name in ("deepseek-v3", "deepseek-v2-lite", "llama-4-scout", "qwen3-next-80b-a3b", "command-r7b", "phi-2")
)
GEMMA4_26B = json.loads((PUBLISHED / "gemma-4-26b-a4b.json").read_text())["text_config"]
LLAMA4_TEXT = LLAMA4_SCOUT["text_config"] | {"architectures": ["Llama4ForCausalLM"]}
FP8_WEIGHTS = {"quantization_config": FINE_GRAINED}
GPTQ_WEIGHTS = {"quantization_config": gptq(sym=False, desc_act=True)}
INT8_WEIGHTS = {"quantization_config": quantization_config()}
TWO = Division(2)
QWEN3 = QWEN25_7B | {"architectures": ["Qwen3ForCausalLM"], "head_dim": 128}
CASES = [
    KeyCase("mistral", MISTRAL_7B, more={"sliding_window": None}),
    KeyCase(
        "mistral window float16 fp8",
        MISTRAL_7B | FP8_WEIGHTS,
        "float16",
        "fp8",
        more={"sliding_window": 96, "vocab_size": 4096},
        adapters=True,
    ),
    KeyCase("mistral float32 fp8", MISTRAL_7B, "float32", "fp8", more={"sliding_window": None, "vocab_size": 5003}, adapters=True),
    KeyCase("qwen2 biases, odd vocabulary", QWEN25_7B, block_offset=8, more={"vocab_size": 5003}),
    KeyCase("qwen2 odd block tables", QWEN25_7B, max_len=16 * 17, more={"vocab_size": 4100}),
    KeyCase("qwen3 norms at odd places", QWEN3, block_offset=24, more={"vocab_size": 151, "num_attention_heads": 6}),
    KeyCase("qwen3 fp8", QWEN3, kv_cache_dtype="fp8"),
    KeyCase("qwen3 embedder", QWEN3, pooling=LAST_TOKEN, max_rows=17, more={"vocab_size": 1000}),
    KeyCase("gemma2", GEMMA2_2B, block_offset=16, more={"vocab_size": 4096}),
    KeyCase("gemma3 fp8", GEMMA3_1B, kv_cache_dtype="fp8", more={"num_hidden_layers": 7, "vocab_size": 1000}),
    KeyCase(
        "gemma4 at odd places",
        GEMMA4_26B,
        block_offset=8,
        max_rows=17,
        more={
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "global_head_dim": 512,
            "num_global_key_value_heads": 1,
            "sliding_window": 96,
            "vocab_size": 1024,
            "num_experts": 8,
            "hidden_size_per_layer_input": 64,
            "vocab_size_per_layer_input": 1024,
            "num_kv_shared_layers": 2,
        },
    ),
    KeyCase("phi3", PHI3_MINI_4K, block_offset=8, more={"head_dim": 96, "sliding_window": 64}),
    KeyCase(
        "olmo2 float32 gptq",
        OLMO2_7B | GPTQ_WEIGHTS,
        "float32",
        more={"vocab_size": 1003, "num_attention_heads": 2, "num_key_value_heads": 2},
    ),
    KeyCase(
        "command r7b fp8",
        COMMAND_R7B,
        kv_cache_dtype="fp8",
        more={"head_dim": 64, "vocab_size": 1024, "sliding_window": 96, "sliding_window_pattern": 2},
    ),
    KeyCase("phi-2 at odd places", PHI_2, "float16", block_offset=8, max_rows=17, more={"head_dim": 80, "vocab_size": 1003}),
    KeyCase(
        "qwen2 moe",
        QWEN15_MOE,
        more={"vocab_size": 4096, "num_experts": 24, "mlp_only_layers": [1], "num_hidden_layers": 3},
        adapters=True,
    ),
    KeyCase("mixtral float32 at odd places", MIXTRAL_8X7B, "float32", block_offset=8, more={"num_experts": 8, "vocab_size": 4096}),
    KeyCase(
        "glm4 moe",
        GLM45_AIR,
        max_rows=5,
        more={"hidden_size": 384, "vocab_size": 1024, "n_routed_experts": 24, "n_group": 4, "topk_group": 2},
        predicts=True,
    ),
    KeyCase("gpt-oss", GPT_OSS_20B, max_rows=17, more={"vocab_size": 1024, "num_local_experts": 8, "layer_types": None}),
    KeyCase(
        "deepseek v3 fp8",
        DEEPSEEK_V3,
        kv_cache_dtype="fp8",
        max_rows=65,
        more={"vocab_size": 1024, "first_k_dense_replace": 1, "n_routed_experts": 16, "n_group": 4, "topk_group": 2},
        predicts=True,
    ),
    KeyCase(
        "deepseek v2 lite float16",
        DEEPSEEK_V2_LITE,
        "float16",
        block_offset=8,
        more={"vocab_size": 1024, "n_routed_experts": 12, "moe_intermediate_size": 352},
        adapters=True,
    ),
    KeyCase(
        "deepseek v2 lite int8",
        DEEPSEEK_V2_LITE | INT8_WEIGHTS,
        max_rows=17,
        more={"vocab_size": 1024, "n_routed_experts": 12, "moe_intermediate_size": 352},
    ),
    KeyCase(
        "llama 4",
        LLAMA4_TEXT,
        max_rows=17,
        more={
            "head_dim": 64,
            "vocab_size": 1024,
            "num_local_experts": 8,
            "attention_chunk_size": 96,
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 704,
            "interleave_moe_layer_step": 2,
        },
    ),
    KeyCase(
        "qwen3 next at odd places",
        QWEN3_NEXT,
        block_offset=8,
        max_rows=5,
        more={
            "head_dim": 64,
            "vocab_size": 1024,
            "num_experts": 12,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 6,
        },
        adapters=True,
    ),
    KeyCase("llama share that leads", MISTRAL_7B, more={"sliding_window": None, "vocab_size": 4096}, share=DeviceShare(0, TWO)),
    KeyCase(
        "qwen2 share that follows", QWEN25_7B, block_offset=8, max_rows=17, more={"vocab_size": 1006}, share=DeviceShare(1, TWO)
    ),
    KeyCase(
        "mixtral share of experts",
        MIXTRAL_8X7B,
        max_rows=17,
        more={"num_experts": 8, "vocab_size": 1006},
        share=DeviceShare(0, Division(2, expert_parts=2)),
    ),
    KeyCase(
        "mixtral share with copies",
        MIXTRAL_8X7B,
        max_rows=17,
        more={"num_experts": 8, "vocab_size": 1006, "num_hidden_layers": 1},
        share=DeviceShare(0, Division(2, expert_parts=2, copies=(((4,), (0,)),))),
    ),
    KeyCase(
        "llama first stage",
        MISTRAL_7B,
        max_rows=17,
        more={"sliding_window": None, "num_hidden_layers": 2},
        share=DeviceShare(1, Division(2, num_stages=2)),
    ),
    KeyCase(
        "qwen2 stage between two",
        QWEN25_7B,
        max_rows=17,
        more={"vocab_size": 1006, "num_hidden_layers": 3},
        share=DeviceShare(1, Division(3, num_stages=3)),
    ),
    KeyCase(
        "qwen2 last stage",
        QWEN25_7B,
        max_rows=17,
        more={"vocab_size": 1006, "num_hidden_layers": 2},
        share=DeviceShare(0, Division(2, num_stages=2)),
    ),
    KeyCase("one block a sequence", MISTRAL_7B, max_len=BLOCK_TOKENS, max_rows=1, more={"sliding_window": None}),
]
# Each stands for settings that the others do not have; the whole list takes many minutes.
COVERING = (
    "mistral window float16 fp8",
    "mistral float32 fp8",
    "qwen2 biases, odd vocabulary",
    "qwen3 norms at odd places",
    "qwen3 embedder",
    "gemma2",
    "gemma4 at odd places",
    "olmo2 float32 gptq",
    "command r7b fp8",
    "phi-2 at odd places",
    "qwen2 moe",
    "glm4 moe",
    "gpt-oss",
    "deepseek v2 lite float16",
    "llama 4",
    "qwen3 next at odd places",
    "llama share that leads",
    "qwen2 share that follows",
    "mixtral share with copies",
    "llama first stage",
    "qwen2 stage between two",
    "qwen2 last stage",
    "one block a sequence",
)

GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
BY_DEVICE = {
    "greedy": GREEDY,
    "temperature": SamplingParams(max_tokens=9, temperature=0.7, seed=1),
    "top_k": SamplingParams(max_tokens=9, top_k=1, seed=16),
    "top_p": SamplingParams(max_tokens=9, top_p=0.5, seed=1 << 40),
    "min_p": SamplingParams(max_tokens=9, min_p=0.1, top_k=16, seed=3),
}
BY_HOST = {
    "penalties": SamplingParams(max_tokens=9, presence_penalty=1.0, frequency_penalty=1.0, repetition_penalty=2.0, seed=1),
    "greedy penalties": SamplingParams(max_tokens=9, temperature=0.0, repetition_penalty=16.0),
    "bias": SamplingParams(max_tokens=9, logit_bias={7: 1.0}, top_k=5),
    "min_tokens": SamplingParams(max_tokens=9, min_tokens=64),
    "logprobs": SamplingParams(max_tokens=9, logprobs=0),
    "sixteen logprobs": SamplingParams(max_tokens=9, temperature=0.0, logprobs=16),
    "one logprob": SamplingParams(max_tokens=9, logprobs=1, frequency_penalty=0.5),
    "prompt logprobs": SamplingParams(max_tokens=9, prompt_logprobs=1, prompt_ranks=True, logprobs=2),
    "allowed": SamplingParams(max_tokens=9, allowed_token_ids=[5, 7]),
    "bad words": SamplingParams(max_tokens=9, bad_words=[[5, 7]], repetition_penalty=1.5),
    "grammar": SamplingParams(max_tokens=9, grammar="regex:a*", logprobs=3),
}
SETTINGS = BY_DEVICE | BY_HOST


@dataclass(frozen=True)
class KeyStep:
    """One step. rows: (number of positions before it, number of new tokens) of each row. settings: names of the rows' settings, in
    turn."""

    rows: tuple[tuple[int, int], ...]
    settings: tuple[str, ...] = ("greedy",)
    samples_last: bool = True

    def run(self, model: CudaModel, table: SequenceTable, max_len: int) -> None:
        columns = np.array(self.rows, np.int32)
        slots = np.arange(len(columns), dtype=np.int32)[::-1].copy()
        samples = np.ones(len(columns), np.bool_)
        samples[-1] = self.samples_last
        masks = []
        for at, slot in enumerate(slots.tolist()):
            params = SETTINGS[self.settings[at % len(self.settings)]]
            end = int(columns[at].sum())
            table.num_tokens[slot], table.num_prompt[slot] = end, max(1, end - 1)
            write_sampling(table, slot, params, int(table.num_prompt[slot]), max_len)
            table.prompt_logprobs[slot] = params.prompt_logprobs >= 0
            for block_table in table.block_tables:
                block_table[slot] += 1
            if samples[at] and (params.is_limited or params.grammar):
                masks.append(int(samples[:at].sum()))
        bits = np.ones((len(masks), -(-model.vocab_size // 32)), np.uint32)
        row_masks = RowMasks([1] * len(masks), np.array(masks, np.intp), list(bits)) if masks else None
        plan = BatchPlan(0, model.name, slots, columns[:, 0].copy(), columns[:, 1].copy(), samples)
        if model.shape.predicts:
            room = np.clip(max_len - columns.sum(axis=1), 0, 2).astype(np.int32)
            plan = replace(plan, to_propose=np.where(samples, room, np.int32(0)))
        split = model.shape.split
        if isinstance(model, CudaShare) and split is not None and (split.rank or not split.is_last_stage):
            model.follow(plan, table)
        else:
            model.launch(plan, table, row_masks).wait()


def make_table(case: KeyCase, model: CudaModel) -> SequenceTable:
    table = make_sequence_table(case.max_rows, case.max_len, -(-case.max_len // BLOCK_TOKENS), len(model.kv_groups))
    if case.adapters:
        model.adapter_memory.bound = 64
        table.adapter[:] = np.arange(case.max_rows) % 3
    return table


def steps(case: KeyCase, every: bool) -> Iterator[KeyStep]:
    """Yields the steps of a model; of one that makes vectors those that sample greedily, since it has no settings. every: all row
    counts, else those at which something changes."""
    yield from (step for step in _steps(case, every) if not case.pooling or step.settings == ("greedy",))


def _steps(case: KeyCase, every: bool) -> Iterator[KeyStep]:
    last, few = case.max_len - 1, (1, 2, 3, 4, 5, 16, 17, 64, 65, 256, 257)
    counts = [num for num in (range(1, case.max_rows + 1) if every else few) if num <= case.max_rows]
    for num in counts:
        for settings in ((name,) for name in BY_DEVICE) if num <= 3 or every else [tuple(BY_DEVICE)]:
            yield KeyStep(tuple((1 + at % last, 1) for at in range(num)), settings)
    for num in [num for num in counts if num <= 17 or num == 257]:
        for settings in [(name,) for name in BY_HOST] if num <= 2 or every else [tuple(SETTINGS)]:
            yield KeyStep(tuple((1 + at % last, 1) for at in range(num)), settings)
    chunks = [num for num in (range(1, 140) if every else (1, 2, 3, 4, 5, 16, 17, 33, 128, 129)) if num <= last]
    for num in chunks:
        for before in (0, 1, 15, 16, 100) if every else (0, 100):
            if before + num <= case.max_len:
                yield KeyStep(((before, num),), samples_last=num % 2 == 0)
                yield KeyStep(((before, num),), ("prompt logprobs",))
        if case.max_rows > 4:
            yield KeyStep(((0, num), (1, num)))
            yield KeyStep(((5, 1), (0, num)), tuple(SETTINGS))
            yield KeyStep(((5, 1), (16, 1), (7, 1), (0, num)), ("greedy", "top_p"), samples_last=False)
            yield KeyStep(((5, 1), (16, 1), (7, 1), (0, num), (3, num)), tuple(SETTINGS))
