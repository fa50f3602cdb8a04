from __future__ import annotations

import errno
import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from loader.models.catalog import Checkpoint, scan, scan_one
from tests.loader.checkpoints import CONFIG, safetensors_bytes, tensors_for, write_checkpoint


def test_names_are_paths_below_the_folder(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "plain")
    write_checkpoint(tmp_path / "org" / "name", shards=3)
    write_checkpoint(tmp_path / "plain" / "inner")  # a model is not searched for others
    (tmp_path / ".hidden").mkdir()
    write_checkpoint(tmp_path / ".hidden" / "x")
    (tmp_path / "empty" / "deeper").mkdir(parents=True)
    found = scan(tmp_path)
    assert list(found) == ["org/name", "plain"]
    assert all(c.complete and not c.reason and not c.error for c in found.values())
    assert len(found["org/name"].files) == 3
    assert found["plain"].path == str(tmp_path / "plain")
    assert found["plain"].created == int((tmp_path / "plain" / "config.json").stat().st_mtime)


def test_incomplete_until_everything_is_there(tmp_path: Path) -> None:
    """As a copy would write it: index and weights first, one file after the other, the last one growing."""
    whole = write_checkpoint(tmp_path / "src", shards=2)
    target = tmp_path / "dst" / "m"
    target.mkdir(parents=True)

    def state() -> Checkpoint:
        return scan(tmp_path / "dst")["m"]

    (target / "model.safetensors.index.json").write_bytes((whole / "model.safetensors.index.json").read_bytes())
    assert state().reason == "config.json is missing"
    (target / "config.json").write_bytes((whole / "config.json").read_bytes())
    assert "model-00001-of-00002.safetensors is missing (it holds tensor " in state().reason
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    (target / first).write_bytes((whole / first).read_bytes())
    assert state().reason.startswith(f"{second} is missing")
    data = (whole / second).read_bytes()
    for length in (0, 4, 100, len(data) // 2, len(data) - 1):
        (target / second).write_bytes(data[:length])
        assert state().reason.startswith(f"{second}: "), length
        assert not state().complete
        assert not state().error
    assert f"{second}: tensor model.norm.weight: cut off" in state().reason
    (target / second).write_bytes(data)
    assert state().complete


def test_only_config(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.json").write_text(json.dumps(CONFIG))
    nothing = "neither model.safetensors nor model.safetensors.index.json is there"
    assert scan(tmp_path)["m"].reason == nothing
    (tmp_path / "m" / "pytorch_model.bin").write_bytes(b"pickle")
    assert scan(tmp_path)["m"].reason.startswith(f"{nothing}; pytorch_model.bin is, but weights are read from safetensors alone")


def test_mis_indexed_tensors_name_file_and_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", shards=2)
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    one, two = sorted(set(weight_map.values()))
    name = "model.norm.weight"

    def error_with(changed: dict[str, str]) -> str:
        index.write_text(json.dumps({"weight_map": changed}))
        return scan_one(folder).error

    wrong = {one: two, two: one}[weight_map[name]]
    assert error_with(weight_map | {name: wrong}) == (
        f"{wrong}: tensor {name}: model.safetensors.index.json names this file, but the tensor is in {weight_map[name]}"
    )
    assert "tensor extra: named by model.safetensors.index.json but not in the file" in error_with(weight_map | {"extra": one})
    without = {tensor: file for tensor, file in weight_map.items() if tensor != name}
    assert f"tensor {name}: in the file but not in" in error_with(without)
    assert "tensor model.norm.weight: file name '../x.safetensors'" in error_with(weight_map | {name: "../x.safetensors"})
    index.write_text('{"weight_map": [')
    assert scan_one(folder).error.startswith("model.safetensors.index.json: not a valid index")


def test_missing_unexpected_and_misshapen_tensors(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    tensors = tensors_for(CONFIG)

    def error_with(changed: dict[str, tuple[str, tuple[int, ...], bytes]]) -> str:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(changed))
        return scan_one(folder).error

    name = "model.layers.1.mlp.up_proj.weight"
    missing = {key: value for key, value in tensors.items() if key != name}
    assert error_with(missing) == f"model.safetensors: tensor {name}: missing: config.json asks for it"
    assert "tensor model.layers.0.self_attn.q_proj.bias: " in error_with(
        tensors | {"model.layers.0.self_attn.q_proj.bias": ("F32", (16,), bytes(64))}
    )
    assert f"tensor {name}: has shape [16, 24], config.json asks for [24, 16]" in error_with(
        tensors | {name: ("F32", (16, 24), bytes(16 * 24 * 4))}
    )
    assert f"tensor {name}: dtype I32" in error_with(tensors | {name: ("I32", (24, 16), bytes(16 * 24 * 4))})
    # a tied model may carry its head, and old exports carry rotary frequencies
    extra = {
        "lm_head.weight": ("F32", (32, 16), bytes(2048)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": ("F32", (2,), bytes(8)),
    }
    assert error_with(tensors | extra) == ""


def test_unsupported_architecture_is_listed_with_its_error(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["GPT2LMHeadModel"]}))
    found = scan(tmp_path)["m"]
    assert not found.complete
    assert "'GPT2LMHeadModel' is not supported; supported: LlamaForCausalLM, Mistral" in found.error


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("Qwen4ForCausalLM", "Qwen3ForCausalLM"),
        ("DeepseekV4ForCausalLM", "DeepseekV3ForCausalLM"),
        ("Glm5MoeForCausalLM", "Glm4MoeForCausalLM"),
        ("Gemma5ForConditionalGeneration", "Gemma4ForConditionalGeneration"),
    ],
)
def test_an_unknown_architecture_is_told_the_nearest_that_is_served(tmp_path: Path, name: str, nearest: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"architectures": [name]}))
    assert f"'{name}' is not supported (the nearest that is: {nearest}); supported: Llama" in scan(tmp_path)["m"].error


@pytest.mark.parametrize("method", ["bitsandbytes", "aqlm", "hqq", "torchao", "gguf"])
def test_a_quantisation_that_is_not_served_is_named_with_those_that_are(tmp_path: Path, method: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps(CONFIG | {"quantization_config": {"quant_method": method}}))
    found = scan(tmp_path)["m"]
    assert not found.complete
    assert re.search(rf"key quantization_config.*{method}.* is not served; served: .*FP8", found.error), found.error


def test_fingerprint_follows_files_and_config(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    seen = {scan_one(folder).fingerprint}
    assert {scan_one(folder).fingerprint} == seen
    weights = folder / "model.safetensors"
    os.utime(weights, ns=(1, 1))
    seen.add(scan_one(folder).fingerprint)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    changed = scan_one(folder)
    seen.add(changed.fingerprint)
    assert changed.generation.eos_token_ids == (3, 4)
    (folder / "config.json").write_text(json.dumps(CONFIG | {"rms_norm_eps": 1e-6}))
    seen.add(scan_one(folder).fingerprint)
    assert len(seen) == 4


def test_rescan_opens_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for i in range(5):
        write_checkpoint(tmp_path / f"m{i}")
    before = scan(tmp_path)
    os.utime(tmp_path / "m3" / "model.safetensors", ns=(5, 5))
    opened: list[str] = []
    real_open = os.open

    def counting_open(path: Path, *args: int) -> int:
        opened.append(str(path))
        return real_open(path, *args)

    monkeypatch.setattr(os, "open", counting_open)
    after = scan(tmp_path, before)
    assert opened == [str(tmp_path / "m3" / name) for name in ("config.json", "model.safetensors")]
    assert [name for name in after if after[name] is not before[name]] == ["m3"]


def test_a_thousand_folders_rescan_quickly(tmp_path: Path) -> None:
    for i in range(1000):
        (tmp_path / f"m{i}").mkdir()
        (tmp_path / f"m{i}" / "config.json").write_text(json.dumps(CONFIG))
    before = scan(tmp_path)
    begin = time.perf_counter()
    assert len(scan(tmp_path, before)) == 1000
    assert time.perf_counter() - begin < 5.0  # about 0.03 s; the limit only catches a change of order


@pytest.mark.parametrize("call", ["scandir", "open"])
def test_a_model_is_not_gone_because_no_more_files_can_be_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    write_checkpoint(tmp_path / "a")
    assert scan(tmp_path)["a"].complete
    real = getattr(os, call)

    def used_up(path: Any, *args: Any, **options: Any) -> Any:
        if str(path).startswith(str(tmp_path / "a")):
            raise OSError(errno.EMFILE, "Too many open files", str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, call, used_up)
    with pytest.raises(OSError, match="Too many open files"):
        scan(tmp_path)


def test_missing_models_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        scan(tmp_path / "none")
