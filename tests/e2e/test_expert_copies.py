"""A mixture whose experts are divided between two devices gets copies of its hottest experts when it loads again, if there is room:
the work of the devices becomes even, and what it says stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node, without_drafts

SIZES = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 1024, "shared_expert_intermediate_size": 32}
NUM_LAYERS, PAIRS = 2, 4
HOT = [97] * 100  # of one token, which passes through few experts; behind tokens that differ, so that no prefix is cached
PROMPTS = [list(range(97, 123)), list(range(65, 91)), [104, 118] * 12]


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """`mix` and `whole` are the same mixture. Beside `filler` there is room for a share of `mix`, but not for copies."""
    folder = tmp_path_factory.mktemp("copies")
    for name in ("mix", "whole"):
        mixture = {"architecture": "Qwen2MoeForCausalLM", "model_type": "qwen2_moe", **SIZES}
        make_model(folder / "models" / name, hidden_size=64, num_layers=NUM_LAYERS, max_position_embeddings=256, **mixture)
    make_model(folder / "models" / "filler", weights_bytes=18 << 20, max_position_embeddings=256)
    config = without_drafts("mix", "whole", "filler")
    settings = "parallel = { expert = 2 }\nexpert_copies = 2\nkv_floor_tokens = 1024\nmax_sequences = 16\n"
    config = config.replace('[models."mix"]\n', f'[models."mix"]\n{settings}')
    config = config.replace('[models."whole"]\n', '[models."whole"]\ndevices = ["cpu:0"]\nmax_sequences = 16\n')
    config = config.replace('[models."filler"]\n', '[models."filler"]\ndevices = ["cpu:1"]\n')
    flags = ["--dtype", "float32", "--threads", "1"]
    with Node(folder, devices=["cpu:0=80MiB", "cpu:1=62MiB"], runner="torch", config=config, flags=flags) as running:
        yield running


def ask(node: Node, model: str, prompt: list[int], num_tokens: int) -> str:
    with node.openai() as client:
        made = client.completions.create(
            model=model, prompt=prompt, max_tokens=num_tokens, temperature=0.0, extra_body={"ignore_eos": True}
        )
        return str(made.choices[0].text)


def copies(node: Node) -> int:
    return next(int(one.get("expert_copies", 0)) for one in node.ps() if one["name"] == "mix")


def busiest_share(node: Node) -> float:
    """Returns the share of the busier device in what two hot prompts make the experts compute."""
    node.cli("unload", "mix")  # so that all is told
    node.cli("load", "mix")
    before = node.json("experts", "mix")["devices"]
    for last in (98, 99):
        ask(node, "mix", [last, *HOT], 1)
    node.cli("unload", "mix")
    after = node.json("experts", "mix")["devices"]
    new = [after.get(device, 0) - before.get(device, 0) for device in ("cpu:0", "cpu:1")]
    assert sum(new) == 2 * (len(HOT) + 1) * PAIRS
    return max(new) / sum(new)


def test_hot_experts_have_copies_where_memory_is_free(node: Node) -> None:
    texts = [ask(node, "whole", prompt, 24) for prompt in PROMPTS]
    node.cli("unload", "whole")
    assert [ask(node, "mix", prompt, 24) for prompt in PROMPTS] == texts
    assert copies(node) == 0, "nothing was counted when it was loaded"
    for last in range(97, 113):
        ask(node, "mix", [last, *HOT], 1)
    before = next(one for one in node.ps() if one["name"] == "mix")["weights_bytes"]
    assert node.cli("unload", "mix").returncode == 0
    share = (node.json("experts", "mix")["devices"]["cpu:0"]) / node.json("experts", "mix")["tokens"]
    assert share > 0.7, "a skewed load"
    assert "further expert" in node.cli("plan", "mix").stdout

    node.cli("load", "filler")
    assert "cpu:1 has" in (said := node.cli("plan", "mix").stdout)
    assert "without copies of experts" in said
    assert [ask(node, "mix", prompt, 24) for prompt in PROMPTS] == texts
    assert copies(node) == 0
    assert node.state("filler") == "ready", "no model leaves for copies"
    assert "loads without copies of experts: cpu:1 has" in node.cli("why", "mix").stdout
    skewed = busiest_share(node)
    node.cli("unload", "filler")

    assert [ask(node, "mix", prompt, 24) for prompt in PROMPTS] == texts
    assert copies(node) in (1, 2)
    assert next(one for one in node.ps() if one["name"] == "mix")["weights_bytes"] > before
    assert "loads with up to" in node.cli("why", "mix").stdout
    even = busiest_share(node)
    assert skewed > 0.7
    assert even < 0.6
