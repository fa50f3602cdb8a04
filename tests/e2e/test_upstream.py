"""Two nodes, one of which answers for a name of the other: clients, keys, fallbacks, operators, reloads, the end of the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import openai
import pytest

from daemon.access.keys import hash_key
from tests.daemon.test_main import hearthd
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

THERE, ANN, BOB = "sk-there-0123456789abcdefgh", "sk-ann-0123456789abcdefghij", "sk-bob-0123456789abcdefghij"
MESSAGES = [{"role": "user", "content": "hi"}]


class Two(NamedTuple):
    front: Node
    back: Node
    settings: str


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder = tmp_path_factory.mktemp("two")
    make_model(folder / "back" / "models" / "org" / "there")
    make_model(folder / "front" / "models" / "small")
    (folder / "there.toml").write_text(f'[tenants.front]\nkeys = ["{hash_key(THERE)}"]\n')
    (folder / "here.toml").write_text(
        f'[tenants.ann]\nkeys = ["{hash_key(ANN)}"]\nadmin = true\n[tenants.bob]\nkeys = ["{hash_key(BOB)}"]\nmodels = ["small"]\n'
    )
    (folder / "there.key").write_text(THERE + "\n")
    audit = folder / "audit.log"
    with Node(folder / "back", flags=["--keys-file", str(folder / "there.toml")]) as back:
        settings = (
            f'audit_log = "{audit}"\naudit_requests = true\n'
            '[names]\n"gpt-*" = ["small", "big"]\nmine = ["big", "small"]\n'
            f'[models.big]\nupstream = "{back.url}/v1"\nupstream_model = "org/there"\naliases = ["huge"]\n'
            f'upstream_key_file = "{folder / "there.key"}"\n'
        )
        with Node(folder / "front", config=settings, flags=["--keys-file", str(folder / "here.toml")]) as front:
            front.wait_for(lambda: row(front)["state"] == "up", "the first look at the other node")
            yield Two(front, back, settings)


def row(node: Node) -> dict[str, object]:
    return next(each for each in node.json("models") if each["name"] == "big")


def answered_by(node: Node, name: str, key: str = ANN) -> str:
    with node.openai(key) as client:
        return client.completions.create(model=name, prompt="x", max_tokens=1).model


def test_the_official_client(two: Two) -> None:
    with two.front.openai(ANN) as client:
        whole = client.chat.completions.create(model="huge", messages=MESSAGES, max_tokens=5)
        assert (whole.model, whole.usage.completion_tokens) == ("big", 5)
        chunks = list(client.chat.completions.create(model="big", messages=MESSAGES, max_tokens=5, stream=True))
        assert {each.model for each in chunks} == {"big"}
        assert chunks[-1].choices[0].finish_reason == "length"
        told = list(
            client.completions.create(model="big", prompt="hi", max_tokens=3, stream=True, stream_options={"include_usage": True})
        )
        assert told[-1].usage.completion_tokens == 3
        assert client.models.retrieve("huge").id == "big"
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(model="big", messages=MESSAGES, temperature=7)
        assert caught.value.param == "temperature", "the other node's refusal, as it is"
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="big", input="x")
        assert caught.value.code == "wrong_task"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(model="big", input="x")
        assert caught.value.code == "not_forwarded"


def test_keys_and_what_is_counted(two: Two) -> None:
    with pytest.raises(openai.NotFoundError):
        answered_by(two.front, "big", BOB)
    assert answered_by(two.front, "mine", BOB) == "small"
    listed = two.front.get("/v1/models", {"Authorization": f"Bearer {BOB}"})[1]["data"]
    assert [each["id"] for each in listed] == ["small"]
    text = '{"model": "big", "prompt": "hello", "max_tokens": 4, "stream": true}'
    lines = _audited(two)
    with two.front.openai(ANN) as client:
        client.post("/completions", body=json.loads(text), cast_to=object, stream=True, stream_cls=openai.Stream[object]).close()
        client.completions.create(model="big", prompt="hello", max_tokens=4)
    two.front.wait_for(lambda: len(_audited(two)) >= len(lines) + 2, "the requests in the audit log")
    last = _audited(two)[-1]
    assert (last["tenant"], last["model"], last["prompt_tokens"], last["output_tokens"]) == ("ann", "big", 5, 4)
    page = two.front.get("/metrics", {"Authorization": f"Bearer {ANN}"})[1]
    assert 'hearth_upstream_up{model="big"} 1.0' in page
    assert 'hearth_requests_total{model="big",outcome="length"}' in page
    assert 'hearth_tenant_generated_tokens_total{tenant="ann"}' in page
    assert THERE not in two.front.log_text() + page


def _audited(two: Two) -> list[dict[str, object]]:
    path = two.front.folder.parent / "audit.log"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [line for line in lines if line["act"] == "request" and line.get("model") == "big"]


def test_what_operators_see_and_may_not_do(two: Two) -> None:
    shown = row(two.front)
    assert (shown["kind"], shown["state"]) == ("upstream", "up")
    assert shown["upstream"] == two.back.url.removeprefix("http://")
    assert "upstream up" in two.front.cli("ps").stdout
    assert f"big is answered by {two.back.url}/v1 as 'org/there'" in two.front.cli("why", "huge").stdout
    for command in ("load", "pin", "plan"):
        refused = two.front.cli(command, "big")
        assert refused.returncode == 2, command
        assert "answers for 'big' (upstream)" in refused.stderr


def test_fallbacks_lead_there_and_back(two: Two) -> None:
    assert answered_by(two.front, "gpt-4") == "small"
    assert two.front.cli("disable", "small").returncode == 0
    assert answered_by(two.front, "gpt-4") == "big"
    assert two.front.cli("enable", "small").returncode == 0
    assert answered_by(two.front, "mine") == "big"


def test_a_drained_node_takes_no_request_for_it(two: Two) -> None:
    assert two.front.cli("drain").returncode == 0
    with pytest.raises(openai.InternalServerError) as caught:
        answered_by(two.front, "big")
    assert caught.value.code == "node_draining"
    assert two.front.cli("resume").returncode == 0


def test_reloads(two: Two) -> None:
    front = two.front
    front.config.write_text(two.settings + f'[models.new]\nupstream = "{two.back.url}/v1"\nupstream_model = "org/there"\n')
    front.json("reload")
    with pytest.raises(openai.InternalServerError) as caught:
        answered_by(front, "new")
    assert caught.value.code == "upstream_denied", "without a key"
    front.config.write_text(two.settings + f'[models.new]\nupstream = "{two.back.url}/v1"\nupstream_key_file = "nowhere"\n')
    refused = front.cli("reload")
    assert refused.returncode == 2
    assert 'models."new".upstream_key_file: ' in refused.stderr
    assert "No such file" in refused.stderr
    front.config.write_text(two.settings)
    front.json("reload")
    with pytest.raises(openai.NotFoundError):
        answered_by(front, "new")
    assert answered_by(front, "big") == "big"


def test_the_end_of_the_other_node(two: Two) -> None:
    two.back.stop()
    with pytest.raises(openai.InternalServerError) as caught:
        answered_by(two.front, "big")
    assert (caught.value.status_code, caught.value.code, caught.value.response.headers["Retry-After"]) == (
        *(503, "upstream_unavailable", "5"),
    )
    assert two.back.url.removeprefix("http://") in str(caught.value)
    assert answered_by(two.front, "mine") == "small", "the fallback, now that it is known to be down"
    assert row(two.front)["state"] == "down"
    assert "big is down: the connection failed: Connection refused" in two.front.cli("models").stdout


def test_what_check_config_says(tmp_path: Path) -> None:
    make_model(tmp_path / "models" / "hidden")
    path = tmp_path / "node.toml"
    flags = ("--check-config", "--models", str(tmp_path / "models"), "--config", str(path))
    path.write_text('[models.far]\nupstream = "http://gpu2/v1"\n[names]\nx = "far"\n')
    accepted = hearthd(*flags)
    assert (accepted.returncode, accepted.stderr) == (0, "")
    path.write_text('[models.hidden]\nupstream = "http://gpu2/v1"\n')
    refused = hearthd(*flags)
    assert refused.returncode == 2
    assert f'{path}:2: models."hidden".upstream: ' in refused.stderr
    (tmp_path / "key").write_text("two words\n")
    path.write_text('[models.far]\nupstream = "http://gpu2/v1"\nupstream_key_file = "key"\n')
    refused = hearthd(*flags)
    assert refused.returncode == 2
    assert f'{path}:3: models."far".upstream_key_file: {tmp_path / "key"} must hold a key and nothing else' in refused.stderr
    assert "two words" not in refused.stderr
