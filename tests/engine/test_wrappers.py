"""Text models inside checkpoints that also hold an encoder of images: every logit equals transformers', whichever way the
checkpoint names its tensors, and stores experts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from loader.models.catalog import scan_one
from tests.engine.model_bench import COMMON, load, make_memory, make_runner, make_table, plan, put

PROMPT = np.random.default_rng(11).integers(0, 211, 40).tolist()
TINY_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
LLAMA4_TEXT: dict[str, Any] = {
    "num_hidden_layers": 2,
    "interleave_moe_layer_step": 2,
    "moe_layers": [1],
    "intermediate_size_mlp": 80,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "no_rope_layers": [1, 0],
    "attention_chunk_size": 12,
    "floor_scale": 5,
    "pad_token_id": 0,
}
QWEN35_TEXT: dict[str, Any] = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "tie_word_embeddings": True,
}
QWEN35_EXPERTS: dict[str, Any] = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QWEN35_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": COMMON["hidden_size"],
}
GEMMA4_TEXT: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "sliding_window": 6,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "attention_bias": True,
    "use_bidirectional_attention": "vision",
}
LLAMA4_VISION: dict[str, Any] = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
NAMES = {"language_model.model.": "model.language_model.", "language_model.lm_head.": "lm_head.", "": "model."}


def make_wrapper(folder: Path, kind: str) -> Any:
    """Saves a seeded random wrapper and returns transformers' own copy of it."""
    import transformers

    if kind == "gemma3":
        text = COMMON | {"num_hidden_layers": 7, "sliding_window": 6, "query_pre_attn_scalar": 24}
        config: Any = transformers.Gemma3Config(text_config=text, vision_config=TINY_VISION, mm_tokens_per_image=1)
        model: Any = transformers.Gemma3ForConditionalGeneration(config)
    elif kind == "gemma4":
        text = COMMON | GEMMA4_TEXT | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": False}
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 8}
        config = transformers.Gemma4Config(text_config=text, vision_config=vision | {"num_key_value_heads": 2})
        model = transformers.Gemma4ForConditionalGeneration(config)
    elif kind == "gemma4_unified":
        vision = {"patch_size": 4, "mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16}
        config = transformers.Gemma4UnifiedConfig(text_config=COMMON | GEMMA4_TEXT, vision_config=vision)
        model = transformers.Gemma4UnifiedForConditionalGeneration(config)
    elif kind == "llama4":
        vision = {key: value for key, value in TINY_VISION.items() if key != "intermediate_size"}
        config = transformers.Llama4Config(
            text_config=COMMON | LLAMA4_TEXT, vision_config=vision | LLAMA4_VISION | {"intermediate_size": 64}
        )
        config.tie_word_embeddings = False
        model = transformers.Llama4ForConditionalGeneration(config)
    elif kind == "qwen3_5_moe":
        text = COMMON | QWEN35_TEXT | QWEN35_EXPERTS | {"tie_word_embeddings": False}
        config = transformers.Qwen3_5MoeConfig(text_config=text, vision_config=QWEN35_VISION)
        model = transformers.Qwen3_5MoeForConditionalGeneration(config)
    elif kind == "qwen3_5":
        config = transformers.Qwen3_5Config(text_config=COMMON | QWEN35_TEXT, vision_config=QWEN35_VISION, tie_word_embeddings=True)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    else:
        text = COMMON | {"model_type": "mistral", "sliding_window": None}
        config = transformers.Mistral3Config(text_config=text, vision_config=TINY_VISION | {"model_type": "pixtral"})
        config.tie_word_embeddings = False
        model = transformers.Mistral3ForConditionalGeneration(config)
    torch.manual_seed(3)
    with torch.no_grad():
        text_model = model.language_model if kind == "llama4" else model.model.language_model
        for name, parameter in text_model.named_parameters():
            parameter.normal_(0.0, 0.2)
            if "norm" in name and kind not in ("gemma3", "qwen3_5", "qwen3_5_moe"):  # whose factors are 1 + weight
                parameter += 1.0
        for name, buffer in text_model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
        if kind == "mistral3":
            model.lm_head.weight.normal_(0.0, 0.2)
    model.eval().save_pretrained(folder)
    return model


def rename(source: Path, folder: Path) -> Path:
    """Copies the checkpoint with the names that its tensors have within transformers 5."""
    shutil.copytree(source, folder)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        old = next(old for old in NAMES if name.startswith(old))
        tensors[NAMES[old] + name.removeprefix(old)] = tensor.clone()
    assert sum(name.startswith("model.language_model.layers.") for name in tensors) > 20
    save_file(tensors, folder / "model.safetensors")
    return folder


def part_experts(source: Path, folder: Path) -> Path:
    """Copies a checkpoint with the matrices of each expert apart, as quantised ones have them."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    for stacked in [name for name in tensors if name.endswith(".experts.gate_up_proj")]:
        prefix = stacked.removesuffix("gate_up_proj")
        both, down = (tensors.pop(f"{prefix}{name}_proj") for name in ("gate_up", "down"))
        if "feed_forward" in prefix:  # Llama 4's have the inputs before the outputs
            both, down = both.transpose(1, 2), down.transpose(1, 2)
        for expert, (gate_up, own_down) in enumerate(zip(both, down, strict=True)):
            gate, up = gate_up.chunk(2)
            for name, matrix in (("gate", gate), ("up", up), ("down", own_down)):
                tensors[f"{prefix}{expert}.{name}_proj.weight"] = matrix.contiguous()
    assert any(".experts.0.gate_proj.weight" in name for name in tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["gemma3", "gemma4", "gemma4_unified", "mistral3", "llama4", "qwen3_5", "qwen3_5_moe"])
def test_logits(tmp_path: Path, kind: str) -> None:
    theirs = make_wrapper(tmp_path / "first", kind)
    if kind == "llama4":  # transformers' wrapper fails without images
        theirs = theirs.language_model
    with torch.inference_mode():
        wanted = theirs(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(wanted).max() > 1.0
    folders = [tmp_path / "first"]
    if kind not in ("qwen3_5", "gemma4", "gemma4_unified"):  # whose tensors have one name
        folders.append((part_experts if kind in ("llama4", "qwen3_5_moe") else rename)(folders[0], tmp_path / "second"))
    runner = make_runner(make_memory())
    for folder in folders:
        model = load(runner, folder)
        table = make_table(groups=model.kv_groups)
        put(table, 1, PROMPT)
        first = model.logits(plan((1, 0, 32)), table, every_token=True)
        steps = [model.logits(plan((1, at, 1)), table)[0] for at in range(32, len(PROMPT))]
        assert np.abs(np.concatenate((first, np.stack(steps))) - wanted).max() < 2e-4
        model.release()


def test_what_is_refused(tmp_path: Path) -> None:
    make_wrapper(tmp_path / "whole", "mistral3")

    def error(change: Any) -> str:
        folder = tmp_path / "changed"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(tmp_path / "whole", folder)
        config = json.loads((folder / "config.json").read_text())
        change(config)
        (folder / "config.json").write_text(json.dumps(config))
        return scan_one(folder).error

    assert not error(lambda config: None)
    assert "key text_config: missing" in error(lambda config: config.pop("text_config"))
    assert "key text_config.model_type: 'ministral3' is not supported in Mistral3ForConditionalGeneration" in error(
        lambda config: config["text_config"].update(model_type="ministral3")
    )
    assert "key text_config.hidden_size: 'wide' is not a whole number" in error(
        lambda config: config["text_config"].update(hidden_size="wide")
    )
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    save_file(tensors | {"audio_tower.x": torch.zeros(1)}, tmp_path / "whole" / "model.safetensors")
    assert "tensor audio_tower.x: Mistral3ForConditionalGeneration with this config.json has no such" in error(lambda config: None)
