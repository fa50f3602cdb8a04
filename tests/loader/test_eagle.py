"""Heads that draft tokens: what is read of their files, and how they become a part of a model."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.architectures.eagle import PREFIX, parse_head
from loader.errors import CheckpointChanged, CheckpointError, UnsupportedModel
from loader.models.catalog import scan, scan_one
from loader.models.drafters import joined
from loader.reading.weight_stream import open_checkpoint
from loader.shapes.config_fields import Fields
from loader.shapes.kv_layout import kv_groups
from loader.sizes.layout import parameter_shapes, weight_layout, weights_bytes
from tests.e2e.checkpoints import make_head, make_model
from tests.loader.checkpoints import shape

LLAMA_8B = {  # as SpecForge's configs/llama3-8B-eagle3.json has it
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 1,
    "rms_norm_eps": 1e-05,
    "torch_dtype": "float16",
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
}


class Named:
    """Stands for a tensor of which only the name matters."""

    def __init__(self, name: str) -> None:
        self.name = name


def parse(config: dict[str, Any], *names: str) -> Any:
    tensors: Any = [Named(name) for name in ("d2t", *names)]
    return parse_head(Fields(config, "config.json"), tensors)


def test_published_forms() -> None:
    model = shape(num_hidden_layers=32, vocab_size=128256, hidden_size=4096)
    head = parse(LLAMA_8B).fitted(model, "config.json")
    assert (head.read_layers, head.target_size, head.draft_vocab_size, head.has_embedding) == ((2, 16, 29), 4096, 32000, False)
    assert (head.layer_prefix, head.outer_prefix, head.norm_output) == ("midlayer.", "", False)
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 15, 28]}
    assert parse(LLAMA_8B | {"eagle_config": ids}).fitted(model, "").read_layers == (2, 16, 29), "those whose output is read"
    nested = {key: value for key, value in LLAMA_8B.items() if key not in ("architectures", "draft_vocab_size")}
    red_hat = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 32000}
    red_hat |= {"transformer_layer_config": nested, **ids, "norm_before_residual": True}
    red_hat["speculators_config"] = {"verifier": {"name_or_path": "meta-llama/Llama-3.1-8B-Instruct"}}
    found = parse(red_hat, "layers.0.self_attn.q_proj.weight")
    assert found.verifier == "meta-llama/Llama-3.1-8B-Instruct"
    assert found.fitted(model, "").read_layers == (1, 15, 28), "those whose input is read"
    assert found.shape == replace(head, layer_prefix="layers.0.", norm_before_residual=True, read_layers=(), target_size=0)
    assert parse(LLAMA_8B, "model.midlayer.self_attn.q_proj.weight").shape.outer_prefix == "model."


def test_what_is_not_served_is_told_by_key() -> None:
    windows = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0, "model_type": "qwen3"}
    for changes, words in (
        ({"model_type": "phi3"}, "key model_type: 'phi3' is not supported; supported: llama, qwen3"),
        ({"num_hidden_layers": 2}, "key num_hidden_layers: 2 is not supported"),
        (windows, "key sliding_window"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "key eagle_config.use_aux_hidden_state: false is not supported"),
    ):
        with pytest.raises(UnsupportedModel, match=words):
            parse(LLAMA_8B | changes)
    for listed in ([3, 1], [1, 1], ["2"], [-2], [], list(range(9)), 5):
        with pytest.raises(CheckpointError, match="is not a list of up to 8 layers"):
            parse(LLAMA_8B | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": listed}})
    with pytest.raises(CheckpointError, match="draft_vocab_size: 32000 tokens, and no tensor d2t says which"):
        parse_head(Fields(LLAMA_8B, "config.json"), [])


def test_a_head_lies_behind_its_models_tensors(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    make_head(tmp_path / "m" / "head", tmp_path / "m")
    found = scan(tmp_path)
    assert sorted(found) == ["m", "m/head"]
    model, head = found["m"], found["m/head"]
    assert model.shape is not None
    assert head.complete
    assert head.shape is None
    both = joined(model, head)
    own, whole = (weight_layout(one, "float32") for one in (model.shape, both.shape))
    assert whole[: len(own)] == own
    assert all(slot.name.startswith(PREFIX) for slot in whole[len(own) :])
    assert len(both.shape.block_offsets) > len(model.shape.block_offsets)
    assert weights_bytes(both.shape, "float32") > weights_bytes(model.shape, "float32")
    assert f"{PREFIX}lm_head.weight" in parameter_shapes(both.shape)
    before, behind = kv_groups(model.shape, "float32", 16), kv_groups(both.shape, "float32", 16)
    assert behind[:-1] == before
    assert behind[-1].layers == (model.shape.num_layers,)
    assert [info.name for info in both.files] == ["head/model.safetensors"]


def test_both_folders_are_checked_again_before_they_are_read(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    make_head(tmp_path / "h", tmp_path / "m")
    fingerprint = joined(scan_one(tmp_path / "m"), scan_one(tmp_path / "h")).fingerprint

    def opened() -> set[str]:
        with ExitStack() as stack:
            source = open_checkpoint(tmp_path / "m", fingerprint, stack, predicts=True, head=str(tmp_path / "h"))
            return {tensor.name for header in source.headers.values() for tensor in header.tensors}

    assert {"model.norm.weight", f"{PREFIX}fc.weight", f"{PREFIX}midlayer.hidden_norm.weight"} <= opened()
    make_head(tmp_path / "h", tmp_path / "m", seed=3)
    with pytest.raises(CheckpointChanged, match="or those of its head"):
        opened()
    shutil.rmtree(tmp_path / "h")
    with pytest.raises(CheckpointChanged, match="h: No such file"):
        opened()


def test_other_folders_in_a_models_folder_are_none_of_its_heads(tmp_path: Path) -> None:
    make_model(tmp_path / "m")
    for name, text in (("onnx", "{}"), ("broken", "{"), ("original", json.dumps({"architectures": ["LlamaForCausalLM"]}))):
        (tmp_path / "m" / name).mkdir()
        (tmp_path / "m" / name / "config.json").write_text(text)
    assert sorted(scan(tmp_path)) == ["m"]


def test_a_damaged_head_in_a_model_s_folder_is_listed(tmp_path: Path) -> None:
    """And a folder that is none is not: its config.json is that of something else, or nothing lies beside a damaged one."""
    model = make_model(tmp_path / "m")
    for name in ("good", "cut", "no-json", "not-a-file", "no-weights", "other"):
        make_head(model / name, model)
    weights = model / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    (model / "no-json" / "config.json").write_text("{")
    (model / "not-a-file" / "config.json").unlink()
    (model / "not-a-file" / "config.json").mkdir()
    (model / "no-weights" / "config.json").write_text("{")
    (model / "no-weights" / "model.safetensors").unlink()
    (model / "other" / "config.json").write_text('{"architectures": ["SiglipVisionModel"]}')
    found = scan(tmp_path)
    assert {name: one.fault.split(": ")[:2] for name, one in found.items() if name not in ("m", "m/good")} == {
        "m/cut": ["model.safetensors", "tensor norm.weight"],
        "m/no-json": ["config.json", "not valid JSON"],
        "m/not-a-file": ["config.json is missing"],
    }
    assert (found["m"].complete, found["m/good"].complete) == (True, True)
