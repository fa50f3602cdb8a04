"""Widths of models with experts that formats with groups of 32 inputs do not allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daemon.cli import main
from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from loader.models.catalog import scan_one
from tests.loader import int4, nvfp4
from tests.loader.checkpoints import CONFIG, write_checkpoint

EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 72,
    "moe_intermediate_size": 64,
    "num_experts": 2,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
    "num_hidden_layers": 2,
    "head_dim": 16,
    "dtype": "bfloat16",
}
FORMATS = {"INT4": (int4, int4.compressed()), "NVFP4": (nvfp4, nvfp4.modelopt())}
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize("name", FORMATS)
def test_the_key_of_an_experts_width_is_named(name: str) -> None:
    config = CONFIG | EXPERTS | {"moe_intermediate_size": 80, "quantization_config": FORMATS[name][1]}
    with pytest.raises(UnsupportedModel, match=f"key moe_intermediate_size: 80 is no multiple of 32, which {name} needs"):
        parse_config(json.dumps(config).encode())


@pytest.mark.parametrize("name", FORMATS)
def test_a_layer_without_experts_may_have_another_width_if_it_is_plain(tmp_path: Path, name: str) -> None:
    module, settings = FORMATS[name]
    write_checkpoint(tmp_path / "plain", CONFIG | EXPERTS, dtype="BF16", random_bytes=True)
    module.quantize(tmp_path / "plain", tmp_path / "served", settings, plain="layers.0.mlp")
    assert scan_one(tmp_path / "served").complete


@pytest.mark.parametrize("name", FORMATS)
def test_else_a_plan_by_configuration_alone_names_its_tensor(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | EXPERTS | {"quantization_config": FORMATS[name][1]}))
    for devices in ((), ("--devices", "cpu=1GiB")):
        assert main.run(["plan", "--config", str(tmp_path), *devices]) == 4
        assert f"tensor {DOWN}: has 72 inputs, no multiple of 32, which {name} needs" in capsys.readouterr().err
