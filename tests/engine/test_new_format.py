"""CONTRIBUTING.md's "A weight format", done: one file and one line serve checkpoints in a format that was never heard of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from loader.formats.int8_rows import quantize_rows
from tests.changed_package import changed_package, told_by
from tests.engine.model_bench import make_checkpoint

PROMPT = np.random.default_rng(22).integers(2, 211, 40).tolist()

# int8 as that of `quantize`, stored with float16 steps [N] under another name
FILE = """
from loader.formats import int8
from loader.formats.weight_format import StoredTensor, WeightFormat, WeightSlot


def _place(group, space):
    slots, end = int8.place(group, space)
    found = []
    for slot in slots:
        step = slot.name.removesuffix("weight") + "step"
        found.append(slot._replace(held_as="int8"))
        found.append(WeightSlot(step, slot.shape[:1], slot.scales_at_bytes, 4 * slot.shape[0], -1, slot.stage, "float32"))
    return found, end


def _stored(group):
    for name, dims in group.tensors:
        yield StoredTensor(name, dims, ("I8",))
        yield StoredTensor(name.removesuffix("weight") + "step", dims[:1], ("F16",))


STEPPED = WeightFormat(
    "stepped",
    (),
    _place,
    stored=_stored,
    recognises=lambda config: config.get("quant_method") == "stepped",
    title="stepped",
    kernels="int8",
    widened_bytes=int8.WIDENED_BYTES,
)
"""

# In a process of its own, whose `loader` is the changed copy.
PROGRAM = """
import json, sys
from pathlib import Path
import loader
from loader.models.catalog import scan_one
from tests.engine.model_bench import load, make_memory, make_runner, make_table, plan, put

folder, prompt = Path(sys.argv[1]), json.loads(sys.argv[2])
seen = scan_one(folder)
assert seen.complete, (seen.error, seen.reason)
runner = make_runner(make_memory())
runner._kernels.result()
model = load(runner, folder, quantize=seen.shape.stored_format)
table = make_table(groups=model.kv_groups)
put(table, 0, prompt)
logits = model.logits(plan((0, 0, len(prompt))), table, every_token=True).tolist()
print(json.dumps({"loader": loader.__file__, "logits": logits, "weights_bytes": seen.weights_bytes["float32"]}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of loader/ with the new file and the new line."""
    root, line = tmp_path_factory.mktemp("tree"), "from loader.formats.stepped import STEPPED"
    return changed_package(root, "loader", "formats/stepped.py", FILE, "formats/registry.py", line, "from loader.formats.plain ")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint in that format, and transformers' model with the rounded weights."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("stepped")
    reference = make_checkpoint(folder)
    tensors = load_file(folder / "model.safetensors")
    state = reference.state_dict()
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        values, scales = torch.empty(tensors[name].shape, dtype=torch.int8), torch.empty(len(tensors[name]))
        quantize_rows(tensors[name], values, scales)
        tensors[name], tensors[f"{name.removesuffix('weight')}step"] = values, scales.half()
        state[name] = values.float() * scales.half().float().unsqueeze(1)
    reference.load_state_dict(state)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "stepped"}}))
    return folder, reference


def test_one_file_and_one_line_add_a_weight_format(tree: Path, made: tuple[Path, Any]) -> None:
    pytest.importorskip("numba")
    folder, reference = made
    with pytest.raises(UnsupportedModel, match="'stepped' with these settings is not served"):
        parse_config((folder / "config.json").read_bytes())
    told = told_by(tree, PROGRAM, str(folder), json.dumps(PROMPT))
    with torch.inference_mode():
        wanted = reference(torch.tensor([PROMPT])).logits[0].numpy()
    assert np.abs(np.array(told["logits"]) - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert told["weights_bytes"] < 4 * sum(parameter.numel() for parameter in reference.parameters())
