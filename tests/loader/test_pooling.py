"""Which folders make embeddings, what they must hold for it, and what is not read of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.models.catalog import Checkpoint, scan_one
from loader.models.described_model import CONFIG, described_model
from loader.shapes.kv_layout import kv_bytes_per_token
from loader.shapes.model_shape import LAST_TOKEN, ModelShape
from loader.sizes import layout
from tests.e2e.checkpoints import write_weights
from tests.loader.checkpoints import CONFIG as LLAMA

QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tie_word_embeddings": False}
LAST = {"pooling_mode_cls_token": False, "pooling_mode_lasttoken": True, "include_prompt": True}
MODULES = [{"type": f"sentence_transformers.models.{kind}"} for kind in ("Transformer", "Pooling", "Normalize")]


def write(folder: Path, config: dict[str, Any], pooling: Any = LAST, modules: Any = MODULES, weights: str = "bare") -> Checkpoint:
    """Writes a folder and scans it. weights: "bare" names of a decoder alone; "headed": with a head."""
    from loader.configs.hf_config import parse_config

    (folder / "config.json").write_text(json.dumps(config))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    for name, content in (("1_Pooling/config.json", pooling), ("modules.json", modules)):
        (folder / name).unlink(missing_ok=True)
        if content is not None:
            (folder / name).write_text(json.dumps(content))
    if weights:
        names = {"architectures": ["Qwen3ForCausalLM"], "is_causal": True}
        shape = parse_config(json.dumps(config | names).encode())
        if weights == "bare":
            shape = replace(shape, pooling=LAST_TOKEN, bare_names=True)
        write_weights(folder / "model.safetensors", shape, 0)
    return scan_one(folder)


def shape_of(checkpoint: Checkpoint) -> ModelShape:
    assert checkpoint.complete, checkpoint.error or checkpoint.reason
    assert checkpoint.shape is not None
    return checkpoint.shape


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3Model"])
@pytest.mark.parametrize("pooling", [LAST, {"embedding_dimension": 32, "pooling_mode": "lasttoken"}])
def test_a_decoder_with_pooling_files_makes_embeddings(tmp_path: Path, architecture: str, pooling: dict[str, Any]) -> None:
    shape = shape_of(write(tmp_path, QWEN3 | {"architectures": [architecture]}, pooling))
    assert (shape.pooling, shape.architecture, shape.is_encoder) == (LAST_TOKEN, "Qwen3ForCausalLM", False)
    assert "embed_tokens.weight" in layout.parameter_shapes(shape)
    assert kv_bytes_per_token(shape, "float32") > 0


def test_its_head_is_not_read(tmp_path: Path) -> None:
    generator = write(tmp_path, QWEN3, None, None, "headed")
    head = int(np.prod(layout.parameter_shapes(shape_of(generator))["lm_head.weight"]))
    embedder = write(tmp_path, QWEN3, LAST, MODULES, "headed")
    assert "lm_head.weight" not in layout.parameter_shapes(shape_of(embedder))
    assert generator.weights_bytes["float32"] - embedder.weights_bytes["float32"] == 4 * head
    assert generator.fingerprint != embedder.fingerprint
    assert generator.signature != embedder.signature


@pytest.mark.parametrize(
    ("config", "pooling", "modules", "told"),
    [
        ({}, {"pooling_mode_mean_tokens": True}, MODULES, "1_Pooling/config.json: key pooling_mode_mean_tokens: is not supported"),
        ({}, {"pooling_mode": "weightedmean"}, MODULES, "key pooling_mode: 'weightedmean' is not supported; supported: lasttoken"),
        ({}, {}, MODULES, "key pooling_mode: 'mean' is not supported; supported: lasttoken"),
        ({}, LAST | {"pooling_mode_cls_token": True}, MODULES, "key pooling_mode_cls_token"),
        ({}, LAST, [*MODULES, {"type": "sentence_transformers.models.Dense"}], "modules.json: key type: "),
        ({"is_causal": False}, LAST, MODULES, "key is_causal: only causal attention is supported"),
        ({"matryoshka_dimensions": [64]}, LAST, MODULES, "key matryoshka_dimensions: [64] is not a list of sizes from 1 to"),
        ({"architectures": ["Qwen3Model"]}, None, None, "key architectures: names a decoder without a head"),
        ({}, None, None, "embed_tokens.weight"),
    ],
)
def test_refusals_name_the_key(tmp_path: Path, config: dict[str, Any], pooling: Any, modules: Any, told: str) -> None:
    checkpoint = write(tmp_path, QWEN3 | config, pooling, modules, "" if "matryoshka_dimensions" in config else "bare")
    assert not checkpoint.complete
    assert told in checkpoint.error


def test_pooling_that_has_not_arrived_yet_is_waited_for(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, QWEN3, None)
    assert (checkpoint.complete, checkpoint.error) == (False, "")
    assert checkpoint.reason == "1_Pooling/config.json is missing: modules.json asks for it"


@pytest.mark.parametrize(
    ("config", "sizes", "any_size"),
    [({}, (), False), ({"matryoshka_dimensions": [16, 8]}, (8, 16), False), ({"is_matryoshka": True}, (), True)],
)
def test_sizes_that_vectors_may_be_cut_to(tmp_path: Path, config: dict[str, Any], sizes: tuple[int, ...], any_size: bool) -> None:
    shape = shape_of(write(tmp_path, QWEN3 | config))
    assert (shape.cut_sizes, shape.any_cut_size) == (sizes, any_size)


def test_a_plan_by_the_configuration_alone_knows(tmp_path: Path) -> None:
    write(tmp_path, QWEN3, weights="")
    described = described_model(tmp_path)
    assert (described.source, described.shape.pooling) == (CONFIG, LAST_TOKEN)
    assert "lm_head.weight" not in layout.parameter_shapes(described.shape)
