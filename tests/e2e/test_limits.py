"""Limits of tenants on a real node: they hold, they change with a reload, and a day's count outlives the daemon."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from daemon.access.keys import hash_key
from tests.e2e.checkpoints import make_model
from tests.e2e.node import Node

KEY, OLD_KEY = "sk-ann-0123456789abcdefghij", "sk-old-0123456789abcdefghij"


def keys_text(limits: str) -> str:
    old = f'{{ key = "{hash_key(OLD_KEY)}", expires = 2020-01-01, name = "old" }}'
    return f'[tenants.ann]\nkeys = ["{hash_key(KEY)}", {old}]\n{limits}\n'


def ask(node: Node, key: str = KEY, **more: Any) -> tuple[int, dict[str, str], dict[str, Any]]:
    """The status, the headers that concern limits, and the body. The prompt has three tokens or four."""
    body = {"model": "m", "prompt": "abc", "max_tokens": 5, "ignore_eos": True} | more
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(node.url + "/v1/completions", json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            status, told, text = answer.status, answer.headers, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            status, told, text = error.code, error.headers, error.read()
    found = {name.lower(): value for name, value in told.items() if "ratelimit" in name.lower() or name == "Retry-After"}
    return status, found, json.loads(text)


def test_limits_hold_and_change_with_a_reload(tmp_path: Path) -> None:
    if time.time() % 86400 > 86400 - 300:
        pytest.skip("the day of UTC is about to end, and its count with it")
    make_model(tmp_path / "n" / "models" / "m")
    file = tmp_path / "keys.toml"
    file.write_text(keys_text("requests_per_minute = 1\ntokens_per_minute = 6000\ntokens_per_day = 100_000"))
    with Node(tmp_path / "n", flags=["--keys-file", str(file)]) as node:
        status, headers, body = ask(node)
        assert status == 200
        used = body["usage"]["total_tokens"]
        assert int(headers["x-ratelimit-remaining-tokens-day"]) == 100_000 - used
        status, headers, body = ask(node)
        assert (status, body["error"]["code"], headers["x-ratelimit-remaining-requests"]) == (429, "rate_limit_exceeded", "0")
        assert 1 <= int(headers["retry-after"]) <= 60
        status, _, body = ask(node, key=OLD_KEY)
        assert (status, body["error"]["code"]) == (401, "key_expired")
        assert "key 'old' of tenant 'ann' expired at 2020-01-01T00:00:00Z" in node.log_text()
        assert "keys: key 'old' of tenant 'ann' expired at 2020-01-01T00:00:00Z" in node.cli("status").stdout

        (row,) = node.json("keys")
        assert (row["tenant"], row["keys"], row["expired_keys"], row["next_expiry"]) == ("ann", 1, 1, None)
        assert row["tokens_today"] == used
        assert row["limits"]["tokens_per_day"]["remaining"] == 100_000 - used
        table = node.cli("keys").stdout
        assert f"{100_000 - used} of 100000" in table
        assert "1 (+1 expired)" in table

        _, page = node.get("/metrics", {"Authorization": f"Bearer {KEY}"})
        assert 'hearth_tenant_limit_refused_total{limit="requests_per_minute",tenant="ann"} 1.0' in page
        assert f'hearth_tenant_tokens_today{{tenant="ann"}} {used}.0' in page
        assert 'hearth_access_refused_total{reason="expired_key"} 1.0' in page

        file.write_text(keys_text(f"tokens_per_day = {used + 8}\ntokens_per_minute = 0"))
        wrong = node.cli("reload")
        assert (wrong.returncode, "tenants.ann.tokens_per_minute: 0 must be" in wrong.stderr) == (2, True)
        (row,) = node.json("keys")
        assert row["limits"]["tokens_per_day"]["limit"] == 100_000, "the last good file counts"
        file.write_text(keys_text(f"tokens_per_day = {used + 8}"))
        assert node.json("reload")["applied"] == ["the content of keys_file"]
        status, headers, _ = ask(node, stream=False, max_tokens=20)
        assert (status, headers["x-ratelimit-remaining-tokens-day"]) == (200, "0")
        status, headers, body = ask(node)
        assert (status, "tokens a day" in body["error"]["message"]) == (429, True)
        assert int(headers["retry-after"]) <= 86400
        assert node.stop() == 0

        node.start()
        status, _, body = ask(node)
        assert (status, "tokens a day" in body["error"]["message"]) == (429, True), "a restart gives nothing back"


def test_limits_bind_the_official_client(tmp_path: Path) -> None:
    """It takes a 429 with the header Retry-After for what it is."""
    import openai

    make_model(tmp_path / "n" / "models" / "m")
    file = tmp_path / "keys.toml"
    file.write_text(keys_text("requests_per_minute = 1"))
    with Node(tmp_path / "n", flags=["--keys-file", str(file)]) as node, node.openai(KEY) as client:
        stream = client.completions.with_raw_response.create(model="m", prompt="abc", max_tokens=2, stream=True)
        assert stream.headers["x-ratelimit-remaining-requests"] == "0"
        assert len(list(stream.parse())) >= 1
        with pytest.raises(openai.RateLimitError, match="the next one fits in"):
            client.completions.create(model="m", prompt="abc", max_tokens=2)
