"""The table of names on a real node: where requests go, what the operator sees, reloads and --check-config."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from daemon.access.keys import hash_key
from tests.daemon.test_main import hearthd
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

TABLE = '[names]\n"gpt-4*" = "org/a"\nfast = ["org/a", "b"]\n"*" = "b"\n[models."org/a"]\naliases = ["short"]\n'


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    folder = tmp_path_factory.mktemp("names")
    for name in ("org/a", "b"):
        make_model(folder / "models" / name)
    with Node(folder, config=TABLE) as node:
        yield node


@pytest.fixture
def node(running: Node) -> Iterator[Node]:
    """The module's node. What a test changes of it is undone."""
    yield running
    running.config.write_text(TABLE)
    shutil.rmtree(running.models / "new", ignore_errors=True)
    for command in (("reload",), ("enable", "org/a"), ("enable", "b")):
        assert running.cli(*command).returncode == 0


def answered_by(node: Node, name: str, key: str = "unused") -> str:
    with node.openai(key) as client:
        return client.completions.create(model=name, prompt="x", max_tokens=1).model


def test_where_requests_go(node: Node) -> None:
    asked = ("org/a", "short", "gpt-4o-mini", "fast", "b", "anything")
    assert [answered_by(node, each) for each in asked] == ["org/a", "org/a", "org/a", "org/a", "b", "b"]
    node.wait_for(lambda: "model=org/a asked=gpt-4o-mini" in node.log_text(), "the request's line in the log")
    listed = {each["id"]: each["aliases"] for each in node.get("/v1/models")[1]["data"]}
    assert listed == {"org/a": ["short", "fast"], "b": []}
    assert node.get("/v1/models/gpt-4o")[1]["id"] == "org/a"
    assert node.get("/m/fast/v1/models")[1]["data"][0]["id"] == "org/a"


def test_ollamas_tag_comes_off_before_unknown_names_get_the_default(node: Node) -> None:
    with node.openai() as client:
        found = [client.post("/../api/generate", body={"model": each, "stream": False}, cast_to=object) for each in TAGGED]
    assert [each["model"] for each in found] == ["org/a", "org/a", "b"]  # type: ignore[index]


TAGGED = ("org/a:latest", "fast:latest", "nobody:latest")


def test_a_fallback_is_taken_and_told(node: Node) -> None:
    assert node.cli("disable", "org/a").returncode == 0
    assert answered_by(node, "fast") == "b"
    with pytest.raises(openai.InternalServerError) as caught:
        answered_by(node, "gpt-4")
    assert "org/a is disabled by the operator" in str(caught.value)
    why = node.cli("why", "fast").stdout
    assert "fast is an entry of the table [names], which leads to org/a, b\n" in why
    assert "org/a is skipped: org/a is disabled by the operator\nrequests go to b\n" in why
    assert "now " in why, "the story of the model that they go to follows"
    assert "gpt-4 meets 'gpt-4*' of the table [names]" in node.cli("why", "gpt-4").stdout
    rows = {row["name"]: row for row in node.json("status")["names"]}
    assert (rows["fast"]["leads_to"], rows["gpt-4*"]["leads_to"], rows["*"]["leads_to"]) == ("b", "", "b")
    shown = node.cli("models").stdout
    assert "FURTHER NAME" in shown
    assert "none can serve" in shown
    assert [row["name"] for row in node.json("models")] == ["b", "org/a"]
    assert node.cli("disable", "b").returncode == 0
    with pytest.raises(openai.InternalServerError) as caught:
        answered_by(node, "fast")
    assert caught.value.code == "model_disabled"
    assert "org/a is disabled by the operator; b is disabled by the operator" in str(caught.value)
    refused = node.cli("load", "fast")
    assert (refused.returncode, "leads requests for it to org/a, b" in refused.stderr) == (3, True)


def test_a_reload_applies_the_table(node: Node) -> None:
    node.config.write_text('[names]\nnew = ["nowhere", "b"]\n')
    told = node.json("reload")
    assert "names" in told["applied"]
    assert told["unknown_models"] == ["nowhere"]
    assert answered_by(node, "new") == "b"
    with pytest.raises(openai.NotFoundError):
        answered_by(node, "anything")
    assert 'names."new" leads to what is no model (yet): nowhere' in node.log_text()
    node.config.write_text("[names]\nnew = 5\n")
    assert f'{node.config}:2: names."new": 5 must be a model\'s name' in node.cli("reload").stderr
    assert answered_by(node, "new") == "b"
    make_model(node.models / "new")
    node.wait_for(lambda: node.state("new") == "cold", "the model")
    assert answered_by(node, "new") == "new", "a model is never hidden by an entry"
    assert "the entry 'new' of [names] is hidden by the model of that name" in node.log_text()


def test_rights_are_the_models(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_model(tmp_path / "n" / "models" / name)
    key = "sk-ann-0123456789abcdefghij"
    (tmp_path / "keys.toml").write_text(f'[tenants.ann]\nkeys = ["{hash_key(key)}"]\nmodels = ["b"]\n')
    with Node(
        tmp_path / "n", config='[names]\nfast = ["a", "b"]\nbig = "a"\n', flags=["--keys-file", str(tmp_path / "keys.toml")]
    ) as node:
        assert answered_by(node, "fast", key) == "b"
        for name in ("a", "big"):
            with pytest.raises(openai.NotFoundError):
                answered_by(node, name, key)
        listed = node.get("/v1/models", {"Authorization": f"Bearer {key}"})[1]["data"]
        assert [(each["id"], each["aliases"]) for each in listed] == [("b", ["fast"])]


def test_check_config_looks_at_names(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "org" / "real")
    path = tmp_path / "node.toml"
    flags = ("--check-config", "--models", str(tmp_path / "models"), "--config", str(path))
    path.write_text('[names]\nfast = "org/reel"\n')
    warned = hearthd(*flags)
    assert warned.returncode == 0
    said = f"hearthd: warning: {path}:2: names.\"fast\": there is no model 'org/reel' in {tmp_path / 'models'} (yet)"
    assert warned.stderr == f'{said}; did you mean "org/real"?\n'
    make_model(tmp_path / "models" / "b")
    path.write_text('[names]\n"org/real" = "b"\n')
    refused = hearthd(*flags)
    assert refused.returncode == 2
    assert refused.stderr.startswith(f"hearthd: {path}:2: names.\"org/real\": 'org/real' is the name of a model in ")
