"""The layer behind the last one that predicts one token further: where a checkpoint holds it, what it takes, and that a damaged one
keeps no model from being served."""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loader.configs.hf_config import parse_config
from loader.errors import CheckpointChanged
from loader.formats.registry import FORMATS, stored_format
from loader.models.catalog import Checkpoint, scan_one
from loader.reading.sinks import HostSink
from loader.reading.staging import StagingRing
from loader.reading.weight_stream import open_checkpoint, stream_weights
from loader.shapes.kv_layout import kv_bytes_per_token, kv_groups
from loader.shapes.model_shape import ModelShape
from loader.sizes.layout import (
    layout_id,
    num_parameters,
    parameter_shapes,
    predicting,
    stored_tensors,
    weight_layout,
    weights_bytes,
)
from loader.sizes.work_space import work_space_bytes
from tests.loader import fp8, int4
from tests.loader.checkpoints import CONFIG, safetensors_bytes
from tests.loader.packed_checkpoints import pack_checkpoint

PUBLISHED = Path(__file__).parents[1] / "published"
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 40, "max_position_embeddings": 64}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1}
LATENTS = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
ROUTING = {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1, "tie_word_embeddings": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "glm4-moe": {"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe"} | HEADS,
    "deepseek-v3": {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_key_value_heads": 4} | LATENTS,
    "glm-4.7-flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "num_key_value_heads": 4,
        "mlp_layer_types": ["dense", "sparse"],
    }
    | LATENTS,
}
Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
PREFIX = "model.layers.2."


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    return CONFIG | SIZES | {"num_attention_heads": 4} | EXPERTS | ROUTING | FAMILIES[family] | changes


def tensors_of(config: dict[str, Any]) -> Tensors:
    """Those of the model and its predictor, small numbers, with the copies of embedding and head that published predictors have."""
    shape = replace(parse_config(json.dumps(config).encode()), predicts=True)
    shapes = parameter_shapes(shape)
    shapes[f"{PREFIX}embed_tokens.weight"] = shapes[f"{PREFIX}shared_head.head.weight"] = (40, 64)
    return {
        name: ("F32", dims, (b"\0\0\x80" + bytes([0x3C + at % 3])) * math.prod(dims))
        for at, (name, dims) in enumerate(shapes.items())
    }


def write(folder: Path, config: dict[str, Any], tensors: Tensors) -> Checkpoint:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return scan_one(folder)


def both(found: Checkpoint) -> tuple[ModelShape, ModelShape]:
    """The shapes without and with the predictor."""
    assert found.complete, found.error or found.reason
    assert found.shape is not None
    assert found.predicting is not None, found.predictor_error
    return found.shape, found.predicting


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_found_where_its_tensors_are(family: str, tmp_path: Path) -> None:
    config = config_of(family)
    tensors = tensors_of(config)
    plain, whole = both(write(tmp_path / "m", config, tensors))
    assert whole == replace(plain, predicts=True, block_offsets=whole.block_offsets)
    own = {name for name in tensors if name.startswith(PREFIX)}
    assert set(parameter_shapes(whole)) - set(parameter_shapes(plain)) == {
        name for name in own if not name.endswith(("embed_tokens.weight", "shared_head.head.weight"))
    }
    assert f"{PREFIX}mlp.experts.2.down_proj.weight" in own, "its layer is of the last one's kind, with experts"
    for names, nextn in ((tensors.keys() - {f"{PREFIX}eh_proj.weight"}, 1), (tensors.keys() - own, 1), (tensors.keys() - own, 0)):
        changed = config | {"num_nextn_predict_layers": nextn}
        found = write(tmp_path / "m", changed, {name: tensors[name] for name in tensors if name in names})
        assert (found.complete, found.predicting, found.predictor_error) == (True, None, "")
        assert found.weights_bytes["float32"] == weights_bytes(plain, "float32")


@pytest.mark.parametrize(("name", "published"), [("deepseek-v3", 684.5e9), ("glm-4.7-flash", 31.2e9)])
def test_what_published_ones_take(name: str, published: float) -> None:
    """Published: the parameters in all files, the predictor's copies of embedding and head among them."""
    shape = parse_config((PUBLISHED / f"{name}.json").read_bytes())
    whole = predicting(shape, {f"model.layers.{shape.num_layers}.eh_proj.weight"})
    assert whole is not None
    copies = 2 * shape.vocab_size * shape.hidden_size
    assert num_parameters(whole) + copies == pytest.approx(published, rel=0.002)
    of_a_layer = num_parameters(shape) - num_parameters(replace(shape, num_layers=shape.num_layers - 1))
    hidden = shape.hidden_size
    assert num_parameters(whole) - num_parameters(shape) == of_a_layer + 2 * hidden * hidden + 3 * hidden
    assert kv_bytes_per_token(whole, "bfloat16") - kv_bytes_per_token(shape, "bfloat16") == 2 * (512 + 64)
    assert whole.num_layers == shape.num_layers


def missing_expert(tensors: Tensors) -> None:
    del tensors[f"{PREFIX}mlp.experts.1.up_proj.weight"]


def wrong_shape(tensors: Tensors) -> None:
    tensors[f"{PREFIX}eh_proj.weight"] = ("F32", (64, 64), bytes(4 * 64 * 64))


def missing_norm(tensors: Tensors) -> None:
    del tensors[f"{PREFIX}shared_head.norm.weight"]


def wrong_dtype(tensors: Tensors) -> None:
    tensors[f"{PREFIX}hnorm.weight"] = ("I32", (64,), bytes(4 * 64))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (missing_expert, "mlp.experts.1.up_proj.weight"),
        (wrong_shape, "eh_proj.weight"),
        (missing_norm, "shared_head.norm.weight"),
        (wrong_dtype, "hnorm.weight"),
    ],
)
def test_a_damaged_one_is_named_and_keeps_no_model_from_being_served(
    damage: Callable[[Tensors], None], said: str, tmp_path: Path
) -> None:
    config = config_of("glm4-moe")
    tensors = tensors_of(config)
    damage(tensors)
    found = write(tmp_path / "m", config, tensors)
    assert found.complete
    assert found.error == ""
    assert found.predicting is None
    assert PREFIX + said in found.predictor_error
    with ExitStack() as stack, pytest.raises(CheckpointChanged, match="no model that predicts further tokens"):
        open_checkpoint(tmp_path / "m", "", stack, predicts=True)


@pytest.mark.parametrize("kind", ["fine-grained", "compressed-channel", "int4"])
def test_its_layer_may_be_quantised_and_its_projection_is_plain(kind: str, tmp_path: Path) -> None:
    """Published predictors are stored so. One that is plain beside a quantised model is read, too."""
    config = config_of("glm4-moe")
    source = tmp_path / "plain"
    write(source, config, tensors_of(config))
    for plain_part in ("eh_proj", "layers.2."):
        target = tmp_path / f"{kind}-{plain_part}"
        if kind == "int4":
            int4.quantize(source, target, int4.compressed(), plain=plain_part)
        else:
            fp8.quantize(source, target, fp8.KINDS[kind], plain=plain_part)
        plain, whole = both(scan_one(target))
        own = stored_format(whole)
        assert own == stored_format(plain)
        slots = {slot.name: slot for slot in weight_layout(whole, "bfloat16", own)}
        assert not slots[f"{PREFIX}eh_proj.weight"].group_inputs
        quantised = {name for name, slot in slots.items() if slot.group_inputs}
        assert any(name.startswith("model.layers.1.mlp.experts.") for name in quantised)
        assert any(name.startswith(f"{PREFIX}mlp.experts.") for name in quantised) == (plain_part == "eh_proj")
        assert plain.plain_groups <= whole.plain_groups
        assert weights_bytes(whole, "bfloat16", own) > weights_bytes(plain, "bfloat16", own)
        assert slots.keys() <= {tensor.name for tensor in stored_tensors(whole)}


def test_a_quantised_projection_is_named(tmp_path: Path) -> None:
    config = config_of("glm4-moe")
    write(tmp_path / "plain", config, tensors_of(config))
    fp8.quantize(tmp_path / "plain", tmp_path / "m", fp8.KINDS["fine-grained"])
    found = scan_one(tmp_path / "m")
    assert found.complete
    assert found.predicting is None
    assert f"{PREFIX}eh_proj.weight" in found.predictor_error


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_count_it(family: str, tmp_path: Path) -> None:
    plain, whole = both(write(tmp_path / "m", config_of(family), tensors_of(config_of(family))))
    own = sum(math.prod(dims) for name, dims in parameter_shapes(whole).items() if name not in parameter_shapes(plain))
    for dtype, size in (("float32", 4), ("bfloat16", 2)):
        more = weights_bytes(whole, dtype) - weights_bytes(plain, dtype)
        assert size * own <= more < 1.2 * size * own + 4096
    layers = [group.layers for group in kv_groups(whole, "float32", 16)]
    assert layers == [(0, 1, 2)]
    assert kv_bytes_per_token(whole, "float32") * 2 == kv_bytes_per_token(plain, "float32") * 3
    sizes = ("float32", 64, 8, 64)
    assert work_space_bytes(whole, *sizes, FORMATS[""]) >= work_space_bytes(plain, *sizes, FORMATS[""]) + 64 * 6 * 64 * 4


def test_weights_with_and_without_it_are_never_taken_for_one_another(tmp_path: Path) -> None:
    plain, whole = both(write(tmp_path / "m", config_of("glm4-moe"), tensors_of(config_of("glm4-moe"))))
    assert layout_id(plain, "float32") != layout_id(whole, "float32")


def loaded(folder: Path, packed: bool, predicts: bool) -> bytes:
    """The whole weight range, laid out alike whichever files are read."""
    with ExitStack() as stack:
        source = open_checkpoint(folder, "", stack, wants_packed=lambda checkpoint: packed, predicts=predicts)
        source.shape = replace(source.shape, block_offsets=())
        memory = mmap.mmap(-1, weights_bytes(source.shape, "bfloat16"))
        sink, ring = HostSink(memoryview(memory)), StagingRing(3, 64 << 10)
        stream_weights(source, "bfloat16", sink, ring, lambda *_: None, lambda: False)
        return memory[:]


def test_packed_files_keep_it(tmp_path: Path) -> None:
    config = config_of("glm4-moe", dtype="bfloat16")
    tensors = {
        name: ("BF16", dims, b"".join(bytes([at % 251, 0x3D]) for at in range(math.prod(dims))))
        for name, (_, dims, _) in tensors_of(config).items()
    }
    write(tmp_path / "m", config, tensors)
    pack_checkpoint(tmp_path / "m")
    found = scan_one(tmp_path / "m")
    assert found.packed_files
    both(found)
    wanted = loaded(tmp_path / "m", packed=False, predicts=True)
    assert loaded(tmp_path / "m", packed=True, predicts=True) == wanted
    assert len(loaded(tmp_path / "m", packed=True, predicts=False)) < len(wanted)
    (tmp_path / "m" / "model.safetensors").unlink()
    both(scan_one(tmp_path / "m"))
    assert loaded(tmp_path / "m", packed=True, predicts=True) == wanted


def test_models_of_other_families_and_in_wrappers_have_none(tmp_path: Path) -> None:
    """Kimi K2.5's checkpoints hold none: their text model's configuration says num_nextn_predict_layers 0."""
    shape = parse_config((PUBLISHED / "kimi-k2.5.json").read_bytes())
    assert predicting(shape, {f"language_model.model.layers.{shape.num_layers}.eh_proj.weight"}) is None
    llama = parse_config(json.dumps(CONFIG).encode())
    assert predicting(llama, {"model.layers.2.eh_proj.weight"}) is None
    delta = parse_config((PUBLISHED / "qwen3-next-80b-a3b.json").read_bytes())
    assert predicting(delta, {"mtp.fc.weight"}) is None
