"""`hearth rm` and `hearth cp` beside a running daemon."""

from __future__ import annotations

from pathlib import Path

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node


def test_names_come_and_go(tmp_path: Path) -> None:
    make_model(tmp_path / "n" / "models" / "org" / "a")
    with Node(tmp_path / "n") as node:
        assert node.json("cp", "org/a", "second")["link_to"] == "org/a"
        node.wait_for(lambda: {row["name"] for row in node.json("models")} == {"org/a", "second"}, "the second name")
        with node.openai() as client:
            assert client.completions.create(model="second", prompt="x", max_tokens=1).model == "second"
        refused = node.cli("rm", "second", "--yes")
        assert (refused.returncode, "second is ready; --evict has it leave first" in refused.stderr) == (5, True)
        assert node.cli("rm", "second", "--yes", "--evict").returncode == 0
        node.wait_for(lambda: [row["name"] for row in node.json("models")] == ["org/a"], "the name to be gone")
        assert node.cli("pin", "org/a").returncode == 0
        refused = node.cli("rm", "org/a", "--yes", "--evict")
        assert (refused.returncode, "is pinned; unpin it first" in refused.stderr) == (5, True)
        assert (node.models / "org" / "a" / "config.json").exists()
        assert node.cli("unpin", "org/a").returncode == 0
        assert node.cli("rm", "org/a", "--yes", "--evict").returncode == 0
        node.wait_for(lambda: node.json("models") == [], "the model to be gone")
        assert list(node.models.iterdir()) == []
