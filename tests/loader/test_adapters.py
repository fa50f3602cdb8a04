from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader.adapters.layout import adapter_layout, misfit
from loader.adapters.open_adapter import open_adapter
from loader.configs.adapter_matrices import adapted_matrices, numbers_of
from loader.configs.hf_config import parse_config
from loader.errors import CheckpointChanged, CheckpointError, UnsupportedModel
from loader.files.safetensors import Header, parse_header
from loader.models import adapter as lora
from loader.models.adapter import Adapter, parse_adapter
from loader.models.catalog import scan, scan_one
from loader.sizes.layout import parameter_shapes
from tests.loader.adapters import ADAPTER_CONFIG, Tensors, adapter_tensors, modules_of, write_adapter
from tests.loader.checkpoints import CONFIG, safetensors_bytes, shape, write_checkpoint
from tests.loader.test_families import PUBLISHED

LAYER = "model.layers.0."
SOME = {f"{LAYER}self_attn.q_proj": (16, 16), f"{LAYER}mlp.down_proj": (16, 24)}


def header_of(tensors: Tensors) -> Header:
    data = safetensors_bytes(tensors)
    return parse_header(data[8 : 8 + int.from_bytes(data[:8], "little")], lora.WEIGHTS_NAME)


def parsed(tensors: Tensors | None = None, **changes: object) -> Adapter:
    text = json.dumps(ADAPTER_CONFIG | changes).encode()
    return parse_adapter(text, header_of(adapter_tensors(SOME) if tensors is None else tensors))


# ---- what the files say


def test_what_an_adapter_says() -> None:
    found = parsed()
    assert (found.base, found.rank, found.num_bytes) == ("org/base", 4, 4 * 4 * (16 + 16 + 16 + 24))
    assert [(one.name, one.rank, one.scale) for one in found.modules] == [(name, 4, 2.0) for name in SOME]
    assert found.modules[1].down.shape == (4, 24)
    assert found.modules[1].up.shape == (16, 4)


def test_rslora_divides_by_the_root() -> None:
    assert {one.scale for one in parsed(use_rslora=True).modules} == {4.0}


def test_patterns_override_rank_and_alpha() -> None:
    tensors = adapter_tensors({f"{LAYER}self_attn.q_proj": (16, 16)}) | adapter_tensors({f"{LAYER}mlp.down_proj": (16, 24)}, rank=2)
    found = parsed(tensors, rank_pattern={"down_proj": 2}, alpha_pattern={r"^model\.layers\.0\.mlp\.down_proj$": 3, "q_proj": 1})
    assert [(one.rank, one.scale) for one in found.modules] == [(4, 0.25), (2, 1.5)]


def test_without_rank_and_alpha_both_are_8() -> None:
    text = json.dumps({"peft_type": "LORA"}).encode()
    found = parse_adapter(text, header_of(adapter_tensors(SOME, rank=8)))
    assert [(one.rank, one.scale) for one in found.modules] == [(8, 1.0)] * 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "ADALORA"}, "key peft_type: 'ADALORA' is not supported; supported: 'LORA'"),
        ({"peft_type": None}, "key peft_type: missing"),
        ({"use_dora": True}, "key use_dora: DoRA: not supported"),
        ({"lora_bias": True}, "key lora_bias"),
        ({"bias": "lora_only"}, "key bias: 'lora_only' is not supported"),
        ({"modules_to_save": ["lm_head"]}, "key modules_to_save"),
        ({"fan_in_fan_out": True}, "key fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "key trainable_token_indices"),
        ({"layer_replication": [[0, 1]]}, "key layer_replication"),
        ({"target_parameters": ["x"]}, "key target_parameters"),
        ({"megatron_config": {"a": 1}}, "key megatron_config"),
        ({"alora_invocation_tokens": [1]}, "key alora_invocation_tokens: activated LoRA"),
        ({"use_qalora": True}, "key use_qalora"),
        ({"init_lora_weights": "pissa_niter_4"}, "key init_lora_weights: 'pissa_niter_4' is for a base with other weights"),
        ({"r": 10**9}, r"key r: 1000000000 is out of range \(from 1 to 256\)"),
        ({"r": 0}, "key r: 0 is out of range"),
        ({"r": "4"}, "key r: '4' is not a whole number"),
        ({"lora_alpha": "x"}, "key lora_alpha: 'x' is not a number"),
        ({"lora_alpha": -1}, "key lora_alpha: -1.0 is out of range"),
        ({"lora_alpha": 1e30}, r"key lora_alpha: 1e\+30 is out of range"),
        ({"lora_alpha": float("nan")}, "not valid JSON"),
        ({"lora_alpha": 10**400}, "key lora_alpha: is out of range"),
        ({"r": 10**400}, "key r: 1000"),
        ({"use_rslora": 1}, "key use_rslora: 1 is not true or false"),
        ({"base_model_name_or_path": 7}, "key base_model_name_or_path: 7 is not a text"),
        ({"rank_pattern": [1]}, r"key rank_pattern: \[1\] is not an object"),
        ({"rank_pattern": {"q_proj": 1000}}, r"key rank_pattern.q_proj: 1000 is out of range"),
        ({"rank_pattern": {"(a+)+b": 4}}, r"key rank_pattern: '\(a\+\)\+b' is an expression, and only names of modules are read"),
        ({"alpha_pattern": {"q_proj": None}}, "key alpha_pattern.q_proj: 8.0"),
        ({"r": 8}, r"lora_A.weight: has shape \[4, 16\] \[rank, inputs\], adapter_config.json asks for rank 8 \(r\)"),
    ],
)
def test_refused_configurations(changes: dict[str, Any], said: str) -> None:
    if said == "key alpha_pattern.q_proj: 8.0":
        assert parsed(**changes).modules[0].scale == 2.0  # null is as if it were not there
        return
    with pytest.raises(CheckpointError, match=said):
        parsed(**changes)


def test_a_config_nested_too_deeply_is_refused() -> None:
    text = b'{"peft_type": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    with pytest.raises(CheckpointError, match=r"adapter_config.json: not valid JSON"):
        parse_adapter(text, header_of(adapter_tensors(SOME)))


def changed(**changes: tuple[str, tuple[int, ...], bytes] | None) -> Tensors:
    """SOME's tensors with q_proj's lora_A (A), lora_B (B) or other names below q_proj replaced, or without them."""
    tensors = adapter_tensors(SOME)
    for key, tensor in changes.items():
        name = f"base_model.model.{LAYER}self_attn.q_proj.{ {'A': 'lora_A.weight', 'B': 'lora_B.weight'}.get(key, key) }"
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    return tensors


FLOATS = ("F32", (4, 16), bytes(256))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ({}, "adapter_model.safetensors: holds no tensors"),
        (changed(A=None), r"q_proj.lora_B.weight: there is no lora_A.weight beside it"),
        (changed(B=None), r"q_proj.lora_A.weight: there is no lora_B.weight beside it"),
        (changed(A=("F64", (4, 16), bytes(512))), "dtype F64 is not supported here; supported: F32, BF16, F16"),
        (changed(A=("F32", (4, 4, 4), bytes(256))), r"has shape \[4, 4, 4\], no \[rank, inputs\]"),
        (changed(A=("F32", (4, 0), b"")), r"has shape \[4, 0\], no \[rank, inputs\]"),
        (changed(B=("F32", (16, 2), bytes(128))), r"has shape \[16, 2\] \[outputs, rank\], adapter_config.json asks for rank 4"),
        (changed(**{"lora_magnitude_vector.weight": FLOATS}), "DoRA is not served"),
        (changed(**{"lora_embedding_A": FLOATS}), "adapters of embeddings are not served"),
        (changed(**{"lora_B.bias": FLOATS}), "a bias is not served"),
        (changed(**{"weight": FLOATS}), "matrices that are stored whole are not served"),
        ({"model.x.lora_A.weight": FLOATS}, "its name does not begin with base_model.model."),
    ],
)
def test_refused_tensors(tensors: Tensors, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        parsed(tensors)


# ---- patterns


@pytest.mark.parametrize(
    ("key", "fits"),
    [
        ("q_proj", True),
        ("proj", False),
        ("self_attn.q_proj", True),
        (r"layers\.0\.self_attn\.q_proj$", True),
        ("layers.1.self_attn.q_proj", False),
        ("^self_attn.q_proj", False),
        (f"^{LAYER}self_attn.q_proj$", True),
    ],
)
def test_names_in_patterns_are_the_end_of_a_modules_name(key: str, fits: bool) -> None:
    tensors = adapter_tensors({f"{LAYER}self_attn.q_proj": (16, 16)})
    assert (re.match(rf"(.*\.)?({key})$", f"{LAYER}self_attn.q_proj") is not None) == fits  # what PEFT asks
    (found,) = parsed(tensors, alpha_pattern={key: 20}).modules
    assert (found.scale == 5.0) == fits


def test_the_first_name_that_fits_counts() -> None:
    tensors = adapter_tensors({f"{LAYER}self_attn.q_proj": (16, 16)})
    (found,) = parsed(tensors, alpha_pattern={"k_proj": 1, "self_attn.q_proj": 20, "q_proj": 12}).modules
    assert found.scale == 5.0


@pytest.mark.parametrize("key", ["(a*)*", ".*", "a{9}", "q_proj|k_proj", "[qk]_proj", " ", "a$b", ""])
def test_expressions_in_patterns_are_refused(key: str) -> None:
    with pytest.raises(CheckpointError, match="only names of modules are read"):
        parsed(adapter_tensors(SOME), alpha_pattern={key: 4})


# ---- the base


def test_matrices_of_a_model() -> None:
    found = adapted_matrices(shape())
    assert [(one.prefix, one.names, one.outputs, one.inputs) for one in found[:4]] == [
        (LAYER, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), (16, 8, 8), 16),
        (LAYER, ("self_attn.o_proj",), (16,), 16),
        (LAYER, ("mlp.gate_proj", "mlp.up_proj"), (24, 24), 16),
        (LAYER, ("mlp.down_proj",), (16,), 24),
    ]
    assert len(found) == 8
    assert numbers_of(shape()).get(("model.layers.1.", ("self_attn.o_proj",))) == 5
    assert numbers_of(shape()).get(("model.layers.1.", ("self_attn.q_proj",))) is None


def test_an_adapter_of_all_modules_fits_and_is_laid_out() -> None:
    base = shape()
    found = parsed(adapter_tensors(modules_of(base)))
    assert misfit(found, base) == ""
    laid = adapter_layout(found, base, 2)
    assert [place.number for place in laid.places] == list(range(8))
    assert all(place.rank == 8 and place.offset * 2 % 64 == 0 for place in laid.places)
    for place, behind in pairwise(laid.places):
        assert 0 <= behind.offset - (place.offset + place.num_elements) < 32
    first = laid.places[0]
    assert (first.down_at(2), first.up_at(0), first.up_at(2)) == (2 * 8 * 16, 3 * 8 * 16, 3 * 8 * 16 + 8 * (16 + 8))
    assert first.num_elements == 8 * (3 * 16 + 16 + 8 + 8)
    last = laid.places[-1]
    assert laid.num_bytes % 64 == 0
    assert laid.num_bytes - 2 * (last.offset + last.num_elements) < 64


def test_parts_that_are_not_adapted_are_left_out() -> None:
    laid = adapter_layout(parsed(), shape(), 4)
    assert [place.number for place in laid.places] == [0, 3]
    assert [part is None for part in laid.places[0].parts] == [False, True, True]


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({f"{LAYER}self_attn.q_proj": (16, 8)}, r"lora_A.weight: has shape \[4, 8\], and the base's .*q_proj.weight is \[16, 16\]"),
        (
            {f"{LAYER}self_attn.k_proj": (16, 16)},
            r"lora_B.weight: has shape \[16, 4\], and the base's .*k_proj.weight is \[8, 16\]",
        ),
        ({"model.layers.2.self_attn.q_proj": (16, 16)}, "LlamaForCausalLM with 2 layers, has no module model.layers.2.self_attn"),
        ({f"{LAYER}self_attn.qkv_proj": (16, 16)}, "has no module"),
        ({"lm_head": (32, 16)}, "adapters of embeddings and of the head are not served"),
        ({"model.embed_tokens": (32, 16)}, "adapters of this matrix are not served"),
        ({f"{LAYER}mlp.experts.0.up_proj": (24, 16)}, "adapters of experts are not served"),
        ({f"{LAYER}self_attn.q_proj": (16, 16), "layers.0.self_attn.q_proj": (16, 16)}, "adapts the same matrix as"),
    ],
)
def test_misfits_name_the_tensor(modules: dict[str, tuple[int, int]], said: str) -> None:
    import re

    why = misfit(parsed(adapter_tensors(modules)), shape())
    assert why.startswith("adapter_model.safetensors: tensor base_model.model.")
    assert re.search(said, why), why


@pytest.mark.parametrize("body", ["model.", "", "model.language_model.", "language_model.model."])
def test_names_of_a_wrapper_or_a_bare_decoder_fit(body: str) -> None:
    found = parsed(adapter_tensors({f"{body}layers.1.self_attn.q_proj": (16, 16)}))
    assert [place.number for place in adapter_layout(found, shape(), 4).places] == [4]


def test_an_adapter_of_unserved_parts_alone_is_refused() -> None:
    """Refuses an adapter that changes an image encoder alone, which would change no answer. Beside others such modules are left
    out."""
    wrapped = shape(architectures=["Mistral3ForConditionalGeneration"], text_config=CONFIG | {"model_type": "mistral"})
    encoder = {"vision_tower.transformer.layers.0.attention.q_proj": (16, 16)}
    why = misfit(parsed(adapter_tensors(encoder)), wrapped)
    assert why.endswith("q_proj.lora_A.weight: like all modules of the adapter changes a part of the base that is not served")
    assert not misfit(parsed(adapter_tensors(encoder | {f"{LAYER}self_attn.q_proj": (16, 16)})), wrapped)


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_matrices_of_published_models_are_parameters(name: str) -> None:
    published = parse_config(json.dumps(PUBLISHED[name][0]).encode())
    dims, found = parameter_shapes(published), adapted_matrices(published)
    assert len(found) >= 2 * published.num_layers
    for number, one in enumerate(found):
        assert [dims[f"{one.prefix}{part}.weight"] for part in one.names] == [(rows, one.inputs) for rows in one.outputs]
        assert numbers_of(published)[one.prefix, one.names] == number


# ---- folders


def test_an_adapters_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "base")
    write_adapter(tmp_path / "org" / "lora", adapter_tensors(SOME))
    write_adapter(tmp_path / "base" / "inner", adapter_tensors(SOME))
    write_adapter(tmp_path / "base" / "deeper" / "still", adapter_tensors(SOME))  # one level only
    write_checkpoint(tmp_path / "base" / "model")  # a model is not searched for others
    found = scan(tmp_path)
    assert list(found) == ["base", "base/inner", "org/lora"]
    one = found["org/lora"]
    assert (one.complete, one.is_adapter, one.shape, one.reason, one.error) == (True, True, None, "", "")
    assert one.adapter is not None
    assert one.adapter.base == "org/base"
    assert one.created > 0
    assert [info.name for info in one.files] == ["adapter_model.safetensors"]
    assert found["base"].adapter is None
    assert not found["base"].is_adapter
    again = scan(tmp_path, found)
    assert all(again[name] is found[name] for name in found)


def test_an_adapter_in_a_hub_cache(tmp_path: Path) -> None:
    write_adapter(tmp_path / "models--org--lora" / "snapshots" / "abc", adapter_tensors(SOME))
    assert list(scan(tmp_path)) == ["org/lora"]


def test_an_adapter_may_come_with_its_bases_config(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "lora", adapter_tensors(SOME))
    (folder / "config.json").write_text("{}")
    assert scan(tmp_path)["lora"].adapter is not None


def test_incomplete_and_refused_adapters(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "lora", adapter_tensors(SOME))
    weights = folder / "adapter_model.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    assert "cut off" in scan_one(folder).reason
    weights.unlink()
    assert scan_one(folder).reason == "adapter_model.safetensors is missing"
    (folder / "adapter_model.bin").write_bytes(b"x")
    assert scan_one(folder).error == "adapter_model.bin: weights are read from safetensors alone: convert them"
    (folder / "adapter_model.bin").unlink()
    os.mkfifo(weights)
    assert "a named pipe" in scan_one(folder).reason
    weights.unlink()
    weights.write_bytes(data)
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    found = scan_one(folder)
    assert isinstance(found.failure, UnsupportedModel)
    assert found.adapter is None
    (folder / "adapter_config.json").write_bytes(b" " * (5 << 20))
    assert "too long for a configuration" in scan_one(folder).error


def test_the_fingerprint_follows_the_files(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "lora", adapter_tensors(SOME))
    before = scan_one(folder).fingerprint
    assert before == scan_one(folder).fingerprint
    write_adapter(folder, adapter_tensors(SOME), lora_alpha=9)
    assert before != scan_one(folder).fingerprint


def test_tensors_are_read_from_an_open_adapter(tmp_path: Path) -> None:
    tensors = adapter_tensors(SOME)
    folder = write_adapter(tmp_path / "lora", tensors)
    with open_adapter(folder, scan_one(folder).fingerprint) as opened:
        for module in opened.adapter.modules:
            for tensor in (module.down, module.up):
                assert opened.read(tensor).tobytes() == tensors[tensor.name][2]
        cut = replace(opened.adapter.modules[0].down, offset_bytes=opened.header.file_bytes)
        with pytest.raises(CheckpointChanged, match="cut off"):
            opened.read(cut)
        assert opened.read(opened.adapter.modules[0].up).dtype == np.uint8


def test_a_changed_adapter_is_not_opened(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "lora", adapter_tensors(SOME))
    before = scan_one(folder).fingerprint
    with pytest.raises(CheckpointChanged, match="files changed"):
        open_adapter(folder, "0" * 32)
    with pytest.raises(CheckpointChanged, match="is no adapter"):
        open_adapter(write_checkpoint(tmp_path / "model"), "")
    with pytest.raises(CheckpointChanged):
        open_adapter(tmp_path / "nothing", before)
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointChanged, match="incomplete"):
        open_adapter(folder, before)
    write_adapter(folder, adapter_tensors(SOME), use_dora=True)
    with pytest.raises(UnsupportedModel, match="key use_dora"):
        open_adapter(folder, before)
