"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter: who may, what they read and answer, and what the audit log gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from daemon.access import admission
from daemon.access.admission import Access
from daemon.contracts import LoadedAdapter
from daemon.errors import BadRequest, HearthError, ServerFault
from daemon.record.audit_log import AuditLog
from tests.daemon.api.fakes import serve
from tests.daemon.test_access import bearer, tenants

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
BODY = {"lora_name": "sql", "lora_path": "/adapters/sql"}


class FakeAdapters:
    """Notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.error: HearthError | None = None
        self.not_saved: HearthError | None = None

    async def load(self, name: str, path: str, in_place: bool) -> LoadedAdapter:
        return self._done(name, path, in_place)

    async def unload(self, name: str) -> LoadedAdapter:
        return self._done(name)

    def _done(self, *asked: Any) -> LoadedAdapter:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error
        return LoadedAdapter(asked[0], "org/tiny", self.not_saved)


async def post(http: ClientSession, path: str, body: dict[str, Any], headers: dict[str, str] | None = None) -> tuple[int, str, str]:
    async with http.post(path, json=body, headers=headers) as answer:
        return answer.status, answer.content_type, await answer.text()


def code(answer: tuple[int, str, str]) -> tuple[int, str, str | None]:
    error = json.loads(answer[2])["error"]
    return answer[0], error["code"], error["param"]


async def test_bodies_are_vllms_and_answers_are_text() -> None:
    adapters = FakeAdapters()
    async with serve(adapters=adapters) as node, ClientSession(node.url) as http:
        told = await post(http, LOAD, BODY)
        assert told == (200, "text/plain", "Success: LoRA adapter 'sql' of org/tiny is loaded.")
        assert (await post(http, LOAD, BODY | {"load_inplace": True, "is_3d_lora_weight": False}))[0] == 200
        told = await post(http, UNLOAD, {"lora_name": "sql", "lora_int_id": 3})
        assert told == (200, "text/plain", "Success: LoRA adapter 'sql' is unloaded.")
        assert adapters.asked == [("sql", "/adapters/sql", False), ("sql", "/adapters/sql", True), ("sql",)]
        for path, body, field in (
            (LOAD, {"lora_name": "sql"}, "lora_path"),
            (LOAD, {"lora_path": "/a"}, "lora_name"),
            (LOAD, BODY | {"load_inplace": "yes"}, "load_inplace"),
            (UNLOAD, {}, "lora_name"),
        ):
            assert code(await post(http, path, body)) == (400, "invalid_request", field)
        refused = code(await post(http, LOAD, BODY | {"is_3d_lora_weight": True}))
        assert refused == (400, "unsupported_parameter", "is_3d_lora_weight")
        assert len(adapters.asked) == 3
        assert (await post(http, "/m/tiny" + LOAD, BODY))[0] == 404
        async with http.get(LOAD) as answer:
            assert answer.status == 405


async def test_errors_are_the_node_s() -> None:
    adapters = FakeAdapters()
    async with serve(adapters=adapters) as node, ClientSession(node.url) as http:
        adapters.error = BadRequest("adapter_not_found", "/adapters/sql: No such file", param="lora_path", status=404)
        assert code(await post(http, LOAD, BODY)) == (404, "adapter_not_found", "lora_path")
        adapters.error, adapters.not_saved = None, ServerFault("state_not_saved", "load sql: done, but not saved", status=507)
        for path, body in ((LOAD, BODY), (UNLOAD, {"lora_name": "sql"})):
            assert code(await post(http, path, body)) == (507, "state_not_saved", None)
    async with serve() as node, ClientSession(node.url) as http:
        assert code(await post(http, LOAD, BODY)) == (404, "not_found", None)


@pytest.mark.parametrize("has_admin", [False, True])
async def test_with_keys_an_admin_s_is_needed(tmp_path: Path, has_admin: bool) -> None:
    adapters = FakeAdapters()
    async with (
        serve(adapters=adapters, access=Access(tenants(tmp_path, admin=has_admin))) as node,
        ClientSession(node.url) as http,
    ):
        for path in (LOAD, UNLOAD):
            assert (await post(http, path, BODY))[0] == 401
            assert code(await post(http, path, BODY, bearer("key-of-some"))) == (403, "not_admin", None)
        assert adapters.asked == []
        assert (await post(http, LOAD, BODY, bearer("key-of-all")))[0] == (200 if has_admin else 403)


async def test_without_keys_only_this_machine_may(monkeypatch: pytest.MonkeyPatch) -> None:
    adapters = FakeAdapters()
    async with serve(adapters=adapters) as node, ClientSession(node.url) as http:
        other_site = {"Origin": "https://evil.example"}
        assert code(await post(http, LOAD, BODY, other_site))[1] == "origin_not_allowed"
        monkeypatch.setattr(admission, "_is_of_this_machine", lambda remote: False)
        assert code(await post(http, LOAD, BODY)) == (403, "not_admin", None)
        assert adapters.asked == []


@pytest.mark.parametrize(
    ("remote", "is_own"),
    [("127.0.0.1", True), ("127.3.2.1", True), ("::1", True), ("::ffff:127.0.0.1", True), ("", True), (None, True),
     ("10.0.0.7", False), ("fe80::1%eth0", False), ("::ffff:10.0.0.7", False), ("nonsense", False)],
)  # fmt: skip
def test_connections_of_this_machine(remote: str | None, is_own: bool) -> None:
    assert admission._is_of_this_machine(remote) is is_own


async def test_the_audit_log_says_who_loaded_what(tmp_path: Path) -> None:
    adapters, audit = FakeAdapters(), AuditLog()
    audit.use(str(tmp_path / "audit.log"), False)
    async with (
        serve(adapters=adapters, access=Access(tenants(tmp_path, admin=True)), audit=audit) as node,
        ClientSession(node.url) as http,
    ):
        await post(http, LOAD, BODY, bearer("key-of-all"))
        adapters.error = BadRequest("model_not_found", "There is no adapter 'sql'.", status=404)
        await post(http, UNLOAD, {"lora_name": "sql"}, bearer("key-of-all"))
        await post(http, UNLOAD, {"lora_name": "sql"}, bearer("key-of-some"))
    await audit.close()
    acts = [json.loads(line) for line in (tmp_path / "audit.log").read_text().splitlines()]
    wanted = ("act", "tenant", "command", "model", "options", "result")
    assert [{key: act[key] for key in wanted if key in act} for act in acts] == [
        {
            "act": "command",
            "tenant": "all",
            "command": "load",
            "model": "sql",
            "options": {"adapter": "/adapters/sql"},
            "result": "ok",
        },
        {"act": "command", "tenant": "all", "command": "unload", "model": "sql", "result": "model_not_found"},
        {"act": "key_refused", "tenant": "some", "result": "not_admin"},
    ]
    assert len(acts[0]["key"]) == 8
    assert acts[0]["address"] == "127.0.0.1"
