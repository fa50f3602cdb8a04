"""An adapter's matrices lie in host memory as the kernels read them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from engine.loading.adapter_files import read_adapter
from engine.protocol import AdapterSource
from loader.adapters.open_adapter import OpenAdapter
from loader.configs.hf_config import parse_config
from loader.errors import CheckpointChanged, CheckpointError
from loader.files.safetensors import TensorRef

HIDDEN, KV, RANK = 64, 32, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "vocab_size": 128,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
}
LAYER = "base_model.model.model.layers.0."


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], alpha: float = 6.0) -> AdapterSource:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK, "lora_alpha": alpha}))
    save_file(
        {f"{LAYER}{name}.weight": tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors"
    )
    return AdapterSource("a", str(folder), "")


def drawn(*dims: int) -> torch.Tensor:
    return torch.randn(*dims, generator=torch.Generator().manual_seed(sum(dims)))


def tensors() -> dict[str, torch.Tensor]:
    return {
        "self_attn.q_proj.lora_A": drawn(RANK, HIDDEN),
        "self_attn.q_proj.lora_B": drawn(HIDDEN, RANK),
        "self_attn.v_proj.lora_A": drawn(RANK, HIDDEN) + 1,
        "self_attn.v_proj.lora_B": drawn(KV, RANK) + 1,
        "mlp.down_proj.lora_A": drawn(RANK, 96),
        "mlp.down_proj.lora_B": drawn(HIDDEN, RANK) - 1,
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_lie_one_behind_the_other_with_zeros_where_nothing_is_adapted(tmp_path: Path, dtype: str) -> None:
    held = tensors()
    source = write_adapter(tmp_path / "a", held)
    read = read_adapter(source, parse_config(json.dumps(CONFIG).encode()), dtype)
    elements = torch.from_numpy(read.data).view(getattr(torch, dtype))
    assert read.data.nbytes == read.layout.num_bytes
    assert [place.number for place in read.layout.places] == [0, 3], "q, k, v; down"
    scale, rank = 1.5, 8  # ranks are rounded up
    qkv, down = read.layout.places
    of_qkv = elements[qkv.offset : qkv.offset + 3 * rank * HIDDEN].view(3, rank, HIDDEN)
    for part, name in enumerate(("q", "", "v")):
        wanted = torch.zeros(rank, HIDDEN)
        if name:
            wanted[:RANK] = held[f"self_attn.{name}_proj.lora_A"]
        assert torch.equal(of_qkv[part], wanted.to(elements.dtype))
    at = qkv.offset + 3 * rank * HIDDEN
    for name, outputs in (("q", HIDDEN), ("", KV), ("v", KV)):
        wanted = torch.zeros(rank, outputs)
        if name:
            wanted[:RANK] = scale * held[f"self_attn.{name}_proj.lora_B"].t()
        assert torch.equal(elements[at : at + rank * outputs].view(rank, outputs), wanted.to(elements.dtype))
        at += rank * outputs
    assert at <= down.offset
    assert torch.equal(elements[down.offset :][: RANK * 96].view(RANK, 96), held["mlp.down_proj.lora_A"].to(elements.dtype))


def test_values_that_are_not_finite_are_refused_by_tensor(tmp_path: Path) -> None:
    held = tensors()
    held["mlp.down_proj.lora_B"][3, 1] = float("nan")
    source = write_adapter(tmp_path / "a", held)
    with pytest.raises(CheckpointError, match=r"down_proj\.lora_B\.weight.*not finite"):
        read_adapter(source, parse_config(json.dumps(CONFIG).encode()), "float32")


def test_finite_values_are_read_whatever_their_sum(tmp_path: Path) -> None:
    held = tensors()
    held["mlp.down_proj.lora_B"].fill_(3e38)
    read = read_adapter(write_adapter(tmp_path / "a", held), parse_config(json.dumps(CONFIG).encode()), "float32")
    assert read.data.nbytes == read.layout.num_bytes


def test_files_that_have_changed_are_not_read(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "a", tensors())
    with pytest.raises(CheckpointChanged, match="changed"):
        read_adapter(AdapterSource("a", source.path, "of other files"), parse_config(json.dumps(CONFIG).encode()), "float32")


def test_files_that_change_in_place_while_they_are_read_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter of the old version's first half and of the new one's second would be served under the old one's name."""
    source = write_adapter(tmp_path / "a", tensors())
    read, file = OpenAdapter.read, tmp_path / "a" / "adapter_model.safetensors"

    def read_and_write(opened: OpenAdapter, tensor: TensorRef) -> NDArray[np.uint8]:
        values = read(opened, tensor)
        file.write_bytes(file.read_bytes())
        return values

    monkeypatch.setattr(OpenAdapter, "read", read_and_write)
    with pytest.raises(CheckpointChanged, match="changed"):
        read_adapter(source, parse_config(json.dumps(CONFIG).encode()), "float32")
