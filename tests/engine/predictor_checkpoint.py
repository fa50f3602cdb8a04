"""Tiny checkpoints with a layer that predicts one token further, and that layer as transformers' parts compute it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.model_bench import CASES, make_checkpoint


class Reference:
    """transformers' model, and a predictor of its parts: a model of one layer, and norms and a projection of their own."""

    def __init__(self, model: Any, layer: Any, own: dict[str, Tensor], eps: float) -> None:
        self.model, self._layer, self._own, self._eps = model, layer, own, eps

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], num: int) -> tuple[list[int], Tensor]:
        """Returns num tokens that the predictor expects after `tokens`, whose last one the model has not read yet, and the logits
        [num, V] of each."""
        text = torch.tensor([list(tokens)])
        hidden = self.model.model(text[:, :-1]).last_hidden_state
        drafted: list[int] = []
        logits: list[Tensor] = []
        for _ in range(num):
            follow = torch.tensor([[*tokens, *drafted]])[:, 1:]
            embedded = self.model.get_input_embeddings()(follow)
            read = torch.cat((self._normed(embedded, "enorm"), self._normed(hidden, "hnorm")), dim=2)
            own = self._layer.model(inputs_embeds=read @ self._own["eh_proj"].T).last_hidden_state
            logits.append(self.model.lm_head(self._normed(own, "shared_head.norm"))[0, -1])
            drafted.append(int(logits[-1].argmax()))
            hidden = torch.cat((hidden, own[:, -1:]), dim=1)  # of the drafted token, its own
        return drafted, torch.stack(logits)

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], self._own[name], self._eps)


def make_predicting_checkpoint(folder: Path, case: str, **changes: Any) -> Reference:
    """Saves a checkpoint of this case (model_bench.CASES) with a predictor, which holds copies of the embedding and the head, too,
    as published ones do."""
    config = CASES[case] | changes
    model = make_checkpoint(folder, **config)
    alone = folder / "alone"
    with_experts = {"mlp_layer_types": ["sparse"]} if case == "glm4-moe-lite" else {"first_k_dense_replace": 0}
    layer = make_checkpoint(alone, **config | with_experts | {"num_hidden_layers": 1}, seed=4)
    layer.model.norm = torch.nn.Identity()
    size, num_layers = model.config.hidden_size, model.config.num_hidden_layers
    generator = torch.Generator().manual_seed(5)
    own = {
        "enorm": torch.rand(size, generator=generator) + 0.5,
        "hnorm": torch.rand(size, generator=generator) + 0.5,
        "eh_proj": torch.randn(size, 2 * size, generator=generator) * 0.2,
        "shared_head.norm": torch.rand(size, generator=generator) + 0.5,
    }
    prefix = f"model.layers.{num_layers}."
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors |= {
        prefix + name.removeprefix("model.layers.0."): tensor
        for name, tensor in load_file(alone / "model.safetensors").items()
        if name.startswith("model.layers.0.")
    }
    tensors |= {f"{prefix}{name}.weight": tensor for name, tensor in own.items()}
    tensors |= {f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone()}
    tensors |= {f"{prefix}shared_head.head.weight": model.lm_head.weight.detach().clone()}
    save_file(tensors, file, metadata={"format": "pt"})
    settings = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(settings))
    for path in alone.iterdir():
        path.unlink()
    alone.rmdir()
    return Reference(model, layer, own, model.config.rms_norm_eps)
