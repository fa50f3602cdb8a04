"""CONTRIBUTING.md's "Adding an architecture", done: one file and one line make a decoder that was never heard of served."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader.configs.hf_config import parse_config
from loader.errors import UnsupportedModel
from tests.changed_package import changed_package, told_by
from tests.engine.model_bench import make_checkpoint

PROMPT = np.random.default_rng(21).integers(2, 211, 40).tolist()
NUM_OUTPUT = 6

# Llama with norms of each head's queries and keys, one matrix for gate and up, and names of its own throughout.
FILE = """
from loader.architectures.decoder import Decoder, TensorNames

ARCHITECTURE = Decoder(
    "NornForCausalLM",
    "norn",
    names=TensorNames(
        embedding="trunk.tokens",
        layer="trunk.block.{}.",
        attention_norm="norm_1",
        queries_keys_values=("mix.query", "mix.key", "mix.value"),
        query_norm="mix.norm_query",
        key_norm="mix.norm_key",
        attention_output="mix.out",
        mlp_norm="norm_2",
        gate_up=("inner.gate_up",),
        down="inner.down",
        final_norm="trunk.norm_3",
        head="readout",
    ),
)
"""
NEW_NAMES = {
    "model.embed_tokens": "trunk.tokens",
    "model.norm": "trunk.norm_3",
    "model.layers": "trunk.block",
    "lm_head": "readout",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.q_proj": "mix.query",
    "self_attn.k_proj": "mix.key",
    "self_attn.v_proj": "mix.value",
    "self_attn.o_proj": "mix.out",
    "self_attn.q_norm": "mix.norm_query",
    "self_attn.k_norm": "mix.norm_key",
    "mlp.gate_up": "inner.gate_up",
    "mlp.down_proj": "inner.down",
}

# In a process of its own, whose `loader` is the changed copy: what is scanned, loaded and computed, as one line of JSON.
PROGRAM = """
import json, sys
from pathlib import Path
import loader
from loader.sizes import layout
from loader.models.catalog import scan_one
from loader.formats.registry import FORMATS
from tests.engine.model_bench import load, make_memory, make_runner, make_table, plan, put

folder, prompt, num_output = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
seen = scan_one(folder)
assert seen.complete, (seen.error, seen.reason)
runner = make_runner(make_memory())
runner._kernels.result()
model = load(runner, folder)
table = make_table(groups=model.kv_groups)
put(table, 0, prompt)
half = len(prompt) // 2
logits = [model.logits(plan((0, at, half)), table, every_token=True).tolist() for at in (0, half)]
put(table, 1, prompt)
token = int(model.execute(plan((1, 0, len(prompt))), table).ids[0])
output = [token]
while len(output) < num_output:
    put(table, 1, prompt + output)
    output.append(int(model.execute(plan((1, len(prompt) + len(output) - 1, 1)), table).ids[0]))
recorded = bool(model._steps.decodes)
model.release()
small = load(runner, folder, quantize="int8")
put(table, 2, prompt)
rounded = small.logits(plan((2, 0, len(prompt))), table, every_token=True).tolist()
stages = {slot.name: slot.stage for slot in layout.weight_layout(seen.shape, "float32")}
print(json.dumps({
    "loader": loader.__file__,
    "logits": logits[0] + logits[1],
    "output": output,
    "recorded": recorded,
    "rounded": rounded,
    "weights_bytes": [layout.weights_bytes(seen.shape, "float32", one) for one in (FORMATS[""], FORMATS["int8"])],
    "stages": stages,
}))
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of loader/ with the new file and the new line."""
    root = tmp_path_factory.mktemp("tree")
    return changed_package(root, "loader", "architectures/norn.py", FILE, "architectures/registry.py", '    "norn",', '    "bert",')


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint of that family, and transformers' Qwen3 with the same weights under its own names."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("norn")
    reference = make_checkpoint(folder, kind="qwen3", tie_word_embeddings=False)
    stored = load_file(folder / "model.safetensors")
    for layer in range(3):
        prefix = f"model.layers.{layer}.mlp."
        parts = [stored.pop(f"{prefix}{name}_proj.weight") for name in ("gate", "up")]
        stored[f"{prefix}gate_up.weight"] = torch.cat(parts)
    renamed = {re.sub("|".join(map(re.escape, NEW_NAMES)), lambda m: NEW_NAMES[m[0]], name): x for name, x in stored.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["NornForCausalLM"], "model_type": "norn"}))
    return folder, reference


def test_one_file_and_one_line_add_a_dense_architecture(tree: Path, made: tuple[Path, Any]) -> None:
    pytest.importorskip("numba")
    folder, reference = made
    with pytest.raises(UnsupportedModel, match="'NornForCausalLM' is not supported"):
        parse_config((folder / "config.json").read_bytes())
    told = told_by(tree, PROGRAM, str(folder), json.dumps(PROMPT), str(NUM_OUTPUT))

    with torch.inference_mode():
        wanted = reference(torch.tensor([PROMPT])).logits[0].numpy()
        output = reference.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_OUTPUT, do_sample=False)[0, len(PROMPT) :].tolist()
    assert np.abs(wanted).max() > 1.0
    assert np.abs(np.array(told["logits"]) - wanted).max() < 2e-4
    assert told["output"][: len(output)] == output
    assert len(output) == NUM_OUTPUT or output[-1] == 1, "generate ends early at the end id only"
    assert told["recorded"]

    # what else the description says: which tensors may be quantised, and in which order a forward pass needs them
    plain, rounded = told["weights_bytes"]
    num_parameters = sum(parameter.numel() for parameter in reference.parameters())
    assert 0 <= plain - 4 * num_parameters < 64 * len(told["stages"])
    assert rounded < 0.6 * plain
    off = np.abs(np.array(told["rounded"]) - wanted).mean()
    assert 0 < off < 0.1 * np.abs(wanted).mean()
    assert told["stages"]["trunk.tokens.weight"] == 0
    assert told["stages"]["trunk.block.2.inner.down.weight"] == 3
    assert told["stages"]["trunk.norm_3.weight"] == told["stages"]["readout.weight"] == 4
