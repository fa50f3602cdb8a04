"""`warm = "start"` on a real node: loaded without a request, in nobody's place, and told where it could not be."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

SETTINGS = """
chunk_bytes = "64KiB"
[models.a]
warm = "start"
keep_alive = 0
[models.b]
warm = ["start", "04:00"]
[models.nobody]
warm = "start"
"""


def test_at_the_start(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_model(tmp_path / "n" / "models" / name)
    with Node(tmp_path / "n", config=SETTINGS, devices=["cpu=8MiB"]) as node:  # room for one
        node.wait_for(lambda: "ready" in (node.state("a"), node.state("b")), "one of them to be loaded")
        there, other = ("a", "b") if node.state("a") == "ready" else ("b", "a")
        reason = f"it would take the place of {there}, loaded ahead as well"  # at first: that one's load goes first
        node.wait_for(lambda: reason in node.cli("why", other).stdout, "the other one's refusal")
        assert f"{other} was not loaded ahead at the start so far: " in node.cli("ps").stdout
        assert "is loaded ahead at the start, 04:00 (warm), next in " in node.cli("why", "b").stdout
        assert "nobody was not loaded ahead at the start: no model 'nobody' on this node" in node.log_text()
        assert node.state(there) == "ready", "a keep_alive of 0 counts from the first request on"
        with node.openai() as client:
            assert client.completions.create(model=other, prompt="x", max_tokens=1).model == other, "requests may"
        node.wait_for(lambda: f"{other} was not loaded" not in node.cli("ps").stdout, "the end of the refusal")
