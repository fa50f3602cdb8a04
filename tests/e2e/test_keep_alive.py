"""Models leave a real node when they had no request for as long as their keep_alive says, and what shows it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import ollama
import pytest

from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

CONFIG = """
[models."oak"]
keep_alive = 0
[models."elm"]
keep_alive = "1h"
"""


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("keep_alive")
    for at, name in enumerate(("oak", "elm", "fir")):
        make_model(folder / "models" / name, seed=at)
    with Node(folder, devices=["cpu=64MiB"], null_step_ms=0.2, config=CONFIG) as running:
        yield running


def ask(node: Node, model: str) -> None:
    with node.openai() as client:
        client.completions.create(model=model, prompt="hi", max_tokens=4)


def row_of(node: Node, model: str) -> Any:
    return next(row for row in node.json("models") if row["name"] == model)


def gone(node: Node, model: str) -> None:
    node.wait_for(lambda: node.state(model) == "cold", f"{model} leaves")


def test_ollamas_clients_set_it(node: Node) -> None:
    with ollama.Client(node.url) as client:
        client.generate("fir", "hi", options={"num_predict": 4}, keep_alive="30m")
        (fir,) = client.ps().models
        assert fir.expires_at is not None
        assert timedelta(minutes=29) < fir.expires_at - datetime.now(UTC) <= timedelta(minutes=30)
        client.chat("fir", [{"role": "user", "content": "hi"}], options={"num_predict": 4}, keep_alive=-1)
        (fir,) = client.ps().models
        assert fir.expires_at is not None
        assert fir.expires_at.year == 2300
        assert client.generate("fir", keep_alive=0).done_reason == "unload"
        gone(node, "fir")
        assert client.generate("oak", keep_alive="10m").done_reason == "load"
        assert [model.model for model in client.ps().models] == ["oak"], "the request's word counts, not the setting's 0"
        client.generate("oak", "hi", options={"num_predict": 4}, keep_alive=0)
        gone(node, "oak")


def test_idle_models_leave(node: Node) -> None:
    """The last test, because other settings and a pin stay behind."""
    assert node.cli("load", "oak").returncode == 0
    assert node.state("oak") == "ready", "loaded by command: it stays until it is requested"
    assert "counts from its first request on" in node.cli("why", "oak").stdout
    ask(node, "oak")
    gone(node, "oak")
    assert "no request for 0 s, as long as its keep_alive says" in node.cli("why", "oak").stdout

    before = time.time()
    ask(node, "elm")
    ask(node, "fir")
    node.wait_for(lambda: row_of(node, "elm")["leaves"], "elm is idle")
    row = row_of(node, "elm")
    assert row["keep_alive_s"] == 3600
    assert before + 3600 <= row["leaves"] <= time.time() + 3601
    assert (row_of(node, "fir")["keep_alive_s"], row_of(node, "fir")["leaves"]) == (None, None)
    shown = node.cli("ps").stdout
    assert "LEAVES" in shown
    assert "unless a request comes: keep_alive 3600 s" in node.cli("why", "elm").stdout

    node.config.write_text(CONFIG.replace('"1h"', "0") + '[models."fir"]\nkeep_alive = "1d"\n')
    assert 'models."elm".keep_alive' in node.json("reload")["applied"] or node.state("elm") == "cold"
    gone(node, "elm")
    node.wait_for(lambda: row_of(node, "fir")["leaves"], "fir has a time, too")
    assert node.cli("pin", "fir").returncode == 0
    assert row_of(node, "fir")["leaves"] is None
    node.config.write_text('[models."fir"]\nkeep_alive = "ten minutes"\n')
    refused = node.cli("reload")
    assert refused.returncode == 2
    assert "keep_alive: 'ten minutes' must be a number of seconds, a duration such as" in refused.stderr
