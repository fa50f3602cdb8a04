"""Tiny EAGLE-3 heads in the ways they are published, and what they draft, computed with transformers' parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.engine.model_bench import COMMON

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "num_hidden_layers": 1,
    "vocab_size": COMMON["vocab_size"],
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "float32",
}
# published forms: of SpecForge, narrower than the model; of `speculators`; with the norms of EAGLE-3.1
FORMS: dict[str, dict[str, Any]] = {
    "specforge": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **SIZES,
        "hidden_size": 40,
        "target_hidden_size": 48,
        "draft_vocab_size": 90,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
    },
    "speculators": {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 211,
        "norm_before_residual": True,
        "norm_before_fc": True,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 3],
        "transformer_layer_config": {"model_type": "qwen3", **SIZES},
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "org/tiny"}},
    },
    "3.1": {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **SIZES,
        "attention_bias": True,
        "draft_vocab_size": 120,
        "fc_norm": True,
        "norm_output": True,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    },
}


class EagleReference:
    """A head of transformers' parts beside its model. read: of the model's layers, those before which states are read."""

    def __init__(self, model: Any, form: dict[str, Any], tensors: dict[str, Tensor], layer: Any, read: Sequence[int]) -> None:
        self.model, self._form, self._tensors, self._layer, self._read = model, form, tensors, layer, read
        self._eps = SIZES["rms_norm_eps"]

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], num: int) -> tuple[list[int], Tensor]:
        """Returns num tokens that the head expects after `tokens`, whose last one the model has not read yet, and the logits [num,
        draft vocabulary] of each."""
        states = self._states(torch.tensor([list(tokens[:-1])]))
        table = self._tensors.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        drafted: list[int] = []
        logits: list[Tensor] = []
        for _ in range(num):
            follow = torch.tensor([[*tokens, *drafted]])[:, 1:]
            own = self._step(table[follow], states)
            normed = self._normed(own, "norm.weight")
            logits.append((normed @ self._tensors["lm_head.weight"].T)[0, -1])
            best = int(logits[-1].argmax())
            drafted.append(best + int(self._tensors["d2t"][best]) if "d2t" in self._tensors else best)
            feed = normed if self._form.get("norm_output") else own
            states = torch.cat((states, feed[:, -1:]), dim=1)
        return drafted, torch.stack(logits)

    def _states(self, text: Tensor) -> Tensor:
        seen: dict[int, Tensor] = {}
        layers = self.model.model.layers
        hooks = [
            layer.register_forward_pre_hook(lambda module, args, number=number: seen.__setitem__(number, args[0].clone()))
            for number, layer in enumerate(layers)
        ]
        hooks.append(layers[-1].register_forward_hook(lambda module, args, out: seen.__setitem__(len(layers), _first(out).clone())))
        self.model.model(text)
        for hook in hooks:
            hook.remove()
        read = [seen[layer] for layer in self._read]
        if self._form.get("fc_norm"):
            read = [self._normed(one, f"fc_norm.{number}.weight") for number, one in enumerate(read)]
        states = torch.cat(read, dim=-1)
        if self._form.get("norm_before_fc"):
            states = self._normed(states, "input_norm.weight")
        return states @ self._tensors["fc.weight"].T

    def _step(self, embedded: Tensor, states: Tensor) -> Tensor:
        layer, prefix = self._layer, self._form["prefix"]
        normed = self._normed(states, f"{prefix}hidden_norm.weight")
        residual = normed if self._form.get("norm_before_residual") else states
        read = torch.cat((self._normed(embedded, f"{prefix}input_layernorm.weight"), normed), dim=-1)
        num = read.shape[1]
        mask = torch.full((num, num), torch.finfo(torch.float32).min).triu(1)[None, None]
        turns = layer.rotary(states, torch.arange(num)[None])
        attended = layer.self_attn(hidden_states=read, position_embeddings=turns, attention_mask=mask)[0]
        residual = residual + attended
        return residual + layer.mlp(self._normed(residual, f"{prefix}post_attention_layernorm.weight"))

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._tensors[name], self._eps)


def _first(out: Any) -> Any:
    return out[0] if isinstance(out, tuple) else out


def make_head(folder: Path, form_name: str, model: Any, seed: int = 7) -> EagleReference:
    """Saves a seeded random head of this form for transformers' model, and returns it computed by transformers' parts."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer

    form = dict(FORMS[form_name])
    sizes = form.get("transformer_layer_config", form)
    prefix = "layers.0." if form_name == "speculators" else "midlayer."
    torch.manual_seed(seed)
    of_qwen = sizes["model_type"] == "qwen3"
    config_class, layer_class = (
        (transformers.Qwen3Config, Qwen3DecoderLayer) if of_qwen else (transformers.LlamaConfig, LlamaDecoderLayer)
    )
    settings = {key: value for key, value in sizes.items() if key not in ("architectures", "eagle_config", "model_type")}
    config = config_class(**settings)
    config._attn_implementation = "eager"
    layer: Any = layer_class(config, 0)
    hidden, target, bias = config.hidden_size, model.config.hidden_size, config.attention_bias
    for name in ("q_proj", "k_proj", "v_proj"):
        setattr(layer.self_attn, name, torch.nn.Linear(2 * hidden, getattr(layer.self_attn, name).out_features, bias=bias))
    layer.rotary = LlamaRotaryEmbedding(config)
    own = form.get("eagle_config", form)["eagle_aux_hidden_state_layer_ids"]
    read = [one + 1 for one in own] if "eagle_config" in form else own
    tensors: dict[str, Tensor] = {}
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.2)
            tensors[prefix + name] = parameter.detach().clone()
    tensors[f"{prefix}hidden_norm.weight"] = torch.rand(hidden) + 0.5
    tensors["norm.weight"] = torch.rand(hidden) + 0.5
    tensors["fc.weight"] = torch.randn(hidden, len(read) * target) * 0.2
    tensors["lm_head.weight"] = torch.randn(form["draft_vocab_size"], hidden) * 0.2
    if form.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": torch.rand(target) + 0.5 for number in range(len(read))}
    if form.get("norm_before_fc"):
        tensors["input_norm.weight"] = torch.rand(len(read) * target) + 0.5
    if hidden != target:
        tensors["embed_tokens.weight"] = torch.randn(config.vocab_size, hidden) * 0.5
    if form["draft_vocab_size"] < config.vocab_size:
        known = torch.randperm(config.vocab_size)[: form["draft_vocab_size"]].sort().values
        tensors["d2t"] = known - torch.arange(len(known))
        tensors["t2d"] = torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, known, True)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(form))
    return EagleReference(model, form | {"prefix": prefix}, tensors, layer, read)
