"""Model folders that were made to hurt, drawn from a seed: configurations, headers, indexes, tokenizers, templates, LoRA adapters,
what says how weights are quantised and vectors pooled, links and special files."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.loader.adapters import ADAPTER_CONFIG, Tensors, write_adapter
from tests.loader.checkpoints import CONFIG, write_checkpoint

DEEP = "[" * 100_000
KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_theta",
    "rope_parameters",
    "rope_scaling",
    "sliding_window",
    "layer_types",
    "eos_token_id",
    "architectures",
    "dtype",
    "quantization_config",
    "tie_word_embeddings",
)
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENTS = {"kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4}
DELTAS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 2,
}
# keys of experts, of latent attention and of the delta rule, with values that belong together
SPARSE: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3MoeForCausalLM": {"num_experts": 4, "head_dim": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], **EXPERTS},
    "DeepseekV2ForCausalLM": {"q_lora_rank": None, "n_routed_experts": 4, "first_k_dense_replace": 1, **LATENTS, **EXPERTS},
    "DeepseekV3ForCausalLM": {
        **{
            "q_lora_rank": 12,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
        },
        **{"routed_scaling_factor": 2.5, "norm_topk_prob": True},
        **LATENTS,
        **EXPERTS,
    },
    "Qwen3NextForCausalLM": {"num_experts": 4, "head_dim": 8, "shared_expert_intermediate_size": 8, **DELTAS, **EXPERTS},
}
ADAPTER_KEYS = (*ADAPTER_CONFIG, "use_rslora", "rank_pattern", "alpha_pattern", "layers_to_transform", "exclude_modules")
ADAPTED = (
    *("model.layers.0.self_attn.q_proj",) * 3,
    "model.layers.999.mlp.up_proj",
    "lm_head",
    "x" * 50_000,
    "\u001b[2J",
)
POOLING_MODES = ("mean_tokens", "cls_token", "max_tokens", "lasttoken")
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "adapter_config.json",
    "adapter_model.safetensors",
    "hf_quant_config.json",
    "modules.json",
)


def _value(draw: random.Random) -> object:
    return draw.choice(
        [
            0,
            -1,
            1,
            10**9,
            1 << 62,
            10**30,
            1e308,
            True,
            None,
            "",
            "x" * 100_000,
            "\u0000\u001b[2J\n",
            [],
            [1] * 100_000,
            {},
            {"rope_type": "llama3", "factor": 1e300},
            {"full_attention": {}, "sliding_attention": []},
            ["full_attention"] * 10_000,
            ["GPT2LMHeadModel"],
            ["Gemma3ForCausalLM"],
            ["BertModel"],
        ]
    )


def _changed_config(folder: Path, draw: random.Random) -> None:
    changes = {draw.choice(KEYS): _value(draw) for _ in range(draw.randint(1, 3))}
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def _sparse(folder: Path, draw: random.Random) -> None:
    """A checkpoint with experts, latent attention or layers of the delta rule whose files fit, and keys of which one does not."""
    name = draw.choice(list(SPARSE))
    config = CONFIG | {"architectures": [name], "model_type": "absent", "tie_word_embeddings": False} | SPARSE[name]
    for path in folder.glob("*.safetensors"):
        path.unlink()
    write_checkpoint(folder, config)
    changes = {draw.choice(list(SPARSE[name])): _value(draw) for _ in range(draw.randint(0, 2))}
    (folder / "config.json").write_text(json.dumps(config | changes))


def _adapter(folder: Path, draw: random.Random) -> None:
    """A LoRA adapter, in a model's folder or in one of its own."""
    if draw.random() < 0.5:
        shutil.rmtree(folder)
    else:
        folder /= "adapter"
    rank = draw.choice([4, 4, 4, 0, 1 << 20])
    name = draw.choice(ADAPTED)
    stored = min(rank, 4)
    tensors: Tensors = {
        f"base_model.model.{name}.lora_A.weight": ("F32", (stored, 16), bytes(64 * stored)),
        f"base_model.model.{name}.lora_B.weight": ("F32", (16, stored), bytes(64 * stored)),
    }
    changes = {draw.choice(ADAPTER_KEYS): _value(draw) for _ in range(draw.randint(0, 2))}
    write_adapter(folder, tensors, **{"r": rank, **changes})
    damage = draw.choice([None, None, "adapter_config.json", "adapter_model.safetensors"])
    if damage is not None:
        _damaged(folder / damage, draw)


def _quantised(folder: Path, draw: random.Random) -> None:
    """What NVIDIA's ModelOpt says of weights, for weights that are not so."""
    said: dict[str, Any] = {"quant_algo": draw.choice(["FP8", "NVFP4", "W4A16_AWQ", "MIXED_PRECISION"]), "group_size": 16}
    said[draw.choice(["quant_algo", "kv_cache_quant_algo", "group_size", "exclude_modules", "quantized_layers"])] = _value(draw)
    path = folder / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": draw.choice([said, said, said, _value(draw)])}))
    if draw.random() < 0.3:
        _damaged(path, draw)


def _pooled(folder: Path, draw: random.Random) -> None:
    """What sentence-transformers says of vectors, of a model that makes texts or of an encoder."""
    if draw.random() < 0.5:
        names = ["BertModel", "XLMRobertaModel", "ModernBertModel", "Qwen3Model"]
        config = CONFIG | {
            "architectures": [draw.choice(names)],
            "model_type": "absent",
            "hidden_act": draw.choice(["gelu", "silu"]),
        }
        (folder / "config.json").write_text(json.dumps(config))
    kinds: list[Any] = draw.choice([["Transformer", "Pooling"], ["Dense"], ["x" * 50_000], [7] * 10_000])
    modules = [
        {"idx": at, "name": str(at), "path": "", "type": f"sentence_transformers.models.{each}"} for at, each in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(draw.choice([modules, modules, _value(draw)])))
    pooling = {f"pooling_mode_{mode}": draw.choice([True, False, _value(draw)]) for mode in POOLING_MODES}
    path = folder / "1_Pooling" / "config.json"
    match draw.randrange(5):
        case 0:
            path.parent.write_bytes(b"")
        case 1:
            path.parent.mkdir()
            os.mkfifo(path)
        case 2:
            path.parent.mkdir()
            path.write_text(json.dumps(pooling))
            _damaged(path, draw)
        case _:
            path.parent.mkdir()
            path.write_text(json.dumps(pooling))


def _rubbish(folder: Path, draw: random.Random) -> None:
    _new(folder, draw).write_bytes(_rubbish_bytes(draw))


def _rubbish_bytes(draw: random.Random) -> bytes:
    return draw.choice(
        [b"", b"{}", b"[]", b"null", DEEP.encode(), ('{"a":' * 50_000).encode(), draw.randbytes(draw.randint(1, 5000))]
    )


def _damaged(path: Path, draw: random.Random) -> None:
    if draw.random() < 0.5:
        os.truncate(path, draw.randint(0, path.stat().st_size))
    else:
        path.write_bytes(_rubbish_bytes(draw))


def _cut(folder: Path, draw: random.Random) -> None:
    path = folder / draw.choice(("config.json", "model.safetensors"))
    os.truncate(path, draw.randint(0, path.stat().st_size))


def _grown(folder: Path, draw: random.Random) -> None:
    """Long files without a byte on the drive."""
    path = _new(folder, draw)
    path.touch()
    os.truncate(path, draw.choice([1 << 20, 1 << 28, 1 << 40]))


def _header(folder: Path, draw: random.Random) -> None:
    data = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    name = draw.choice([name for name in header if name != "__metadata__"])
    change = draw.randrange(6)
    if change == 0:
        header[name]["shape"] = draw.choice([[1 << 62] * 1000, [-1], [0], [], [10**12, 10**12]])
    elif change == 1:
        header[name]["data_offsets"] = draw.choice([[0, 1 << 62], [5, 3], [0], [-4, 0]])
    elif change == 2:
        header[name]["dtype"] = draw.choice(["F4", "", None, "F64", 7])
    elif change == 3:
        header["\u001b]0;x" + "y" * 50_000] = header.pop(name)
    elif change == 4:
        header["__metadata__"] = {"hearthd.packed": draw.choice(["", "{}", '{"version": 9}', "[" * 50_000])}
    else:
        header |= {f"more.{n}": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for n in range(20_000)}
    text = json.dumps(header).encode()
    length = draw.choice([len(text), len(text), 1, 1 << 40, len(text) + 1])
    (folder / "model.safetensors").write_bytes(length.to_bytes(8, "little") + text + data[8 + len(data) :])


def _index(folder: Path, draw: random.Random) -> None:
    files: object = draw.choice(
        [{"a": "../../etc/passwd"}, {"a": "b.safetensors"}, {"": ""}, [], {"a": 7}, {"x" * 100_000: "m.safetensors"}]
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _special(folder: Path, draw: random.Random) -> None:
    path = _new(folder, draw)
    kind = draw.randrange(5)
    if kind == 0:
        os.mkfifo(path)
    elif kind == 1:
        path.symlink_to(draw.choice(["/dev/zero", "/dev/tty", "/proc/self/mem", "/proc/kmsg", "/", path.name, "/nowhere"]))
    elif kind == 2:
        path.mkdir()
    elif kind == 3:
        listening = socket.socket(socket.AF_UNIX)
        at = os.getcwd()
        os.chdir(folder)  # a socket's path may be no longer than some 100 bytes
        try:
            listening.bind(path.name)
        finally:
            os.chdir(at)
            listening.close()
    else:
        (folder / "packed").mkdir()
        os.mkfifo(folder / "packed" / "model.safetensors")


def _links(folder: Path, draw: random.Random) -> None:
    shutil.rmtree(folder)
    folder.symlink_to(draw.choice(["..", ".", "/", "/proc", folder.name, "/nowhere"]))


def _names(folder: Path, draw: random.Random) -> None:
    (folder / "config.json").unlink()
    (folder / "model.safetensors").unlink()
    inner = folder / draw.choice(["two\nlines", "\x1b[2J", "models--a", "models--a--b--c", "'\"<b>", "é" * 100])
    inner.mkdir()
    (inner / "config.json").write_text("{}")


def _new(folder: Path, draw: random.Random) -> Path:
    path = folder / draw.choice(FILES)
    path.unlink(missing_ok=True)
    return path


KINDS: tuple[Callable[[Path, random.Random], None], ...] = (
    _changed_config,
    _changed_config,
    _changed_config,
    _sparse,
    _sparse,
    _adapter,
    _adapter,
    _quantised,
    _pooled,
    _rubbish,
    _cut,
    _grown,
    _header,
    _header,
    _index,
    _special,
    _special,
    _links,
    _names,
)


def make_hostile(folder: Path, template: Path, seed: int) -> str:
    """Makes one, from a copy of a good checkpoint; returns its kind."""
    draw = random.Random(seed)
    shutil.copytree(template, folder)
    kind = draw.choice(KINDS)
    kind(folder, draw)
    return kind.__name__.removeprefix("_")


def is_to_be_listed(folder: Path) -> bool:
    """Returns whether the folder looks like a model, or holds one: a link that leads nowhere, round or to all of the machine does
    not, nor does a folder of a Hugging Face cache without an organisation's name."""
    return not folder.is_symlink() and not (folder / "models--a").exists()
