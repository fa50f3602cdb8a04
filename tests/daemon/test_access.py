"""Who comes in: keys, and without them only this machine and no other site's pages. Over a real server, with nothing behind it."""

from __future__ import annotations

import base64
import json
import logging
import socket
from pathlib import Path

import pytest
from aiohttp import ClientSession

from config.load import ConfigError
from config.schema import NodeConfig
from daemon.access import admission, keys, limit_headers
from daemon.access.admission import Access
from daemon.access.quotas import Quotas
from daemon.access.tenant import Key
from daemon.http import listeners, sockets
from daemon.process.version import VERSION
from tests.daemon.api.fakes import entry, serve

CHAT = {"model": "org/tiny", "messages": [{"role": "user", "content": "hi"}]}


class Settings:
    allowed_hosts = ("gpu1.example.org",)


def tenants(tmp_path: Path, admin: bool = False) -> keys.Keys:
    path = tmp_path / "keys.toml"
    path.write_text(
        f'[tenants.all]\nkeys = ["{keys.hash_key("key-of-all")}"]\nadmin = {str(admin).lower()}\n'
        f'[tenants.some]\nkeys = ["{keys.hash_key("key-of-some")}"]\nmodels = ["org/*"]\n'
    )
    return keys.load(str(path))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def basic(key: str) -> dict[str, str]:
    return {"Authorization": "Basic " + base64.b64encode(f"me:{key}".encode()).decode()}


async def status(http: ClientSession, method: str, path: str, headers: dict[str, str] | None = None) -> int:
    body = CHAT if method == "POST" else None
    async with http.request(method, path, headers=headers, json=body) as answer:
        await answer.read()
        return answer.status


PATHS = [("POST", "/v1/chat/completions"), ("GET", "/v1/models"), ("GET", "/v1/models/org/tiny"), ("GET", "/metrics"),
         ("GET", "/m/tiny/metrics"), ("GET", "/m/tiny/healthz"), ("GET", "/nothing/here")]  # fmt: skip


async def test_a_key_is_needed_for_all_but_health(tmp_path: Path) -> None:
    async with serve(access=Access(tenants(tmp_path))) as node, ClientSession(node.url) as http:
        for method, path in PATHS:
            good = 404 if path == "/nothing/here" else 200
            for headers, expected in (
                ({}, 401),
                (bearer("key-of-nobody"), 401),
                (bearer(""), 401),
                ({"Authorization": "key-of-all"}, 401),
                (bearer("key-of-all"), good),
                ({"Authorization": "bearer  key-of-all"}, good),
            ):
                assert await status(http, method, path, headers) == expected, (method, path, headers)
        for path in ("/healthz", "/readyz"):
            async with http.get(path) as answer:
                assert (answer.status, sorted(await answer.json())) == (200, ["status"])
        node.health.good = False
        assert await status(http, "GET", "/healthz") == 503
        assert not [generation for generation in node.requests.submitted if generation.tenant != "all"]


async def test_azures_and_anthropics_headers_hold_keys_too(tmp_path: Path) -> None:
    async with serve(access=Access(tenants(tmp_path))) as node, ClientSession(node.url) as http:
        for name in ("x-api-key", "api-key", "X-API-Key"):
            for method, path in (("POST", "/v1/chat/completions"), ("GET", "/v1/models")):
                assert await status(http, method, path, {name: "key-of-all"}) == 200, (name, path)
                assert await status(http, method, path, {name: "key-of-nobody"}) == 401, (name, path)
                assert await status(http, method, path, {name: ""}) == 401, (name, path)
        assert {generation.tenant for generation in node.requests.submitted} == {"all"}


async def test_keys_that_disagree_are_refused(tmp_path: Path) -> None:
    """Which one counts must not be a guess: what a proxy in front checks may not be what is used here."""
    counted: list[str] = []
    async with serve(access=Access(tenants(tmp_path), count=counted.append)) as node, ClientSession(node.url) as http:
        for headers, expected in (
            (bearer("key-of-all") | {"x-api-key": "key-of-all", "api-key": "key-of-all"}, 200),
            (bearer("key-of-all") | {"x-api-key": "key-of-some"}, 401),
            (bearer("key-of-all") | {"api-key": "key-of-nobody"}, 401),
            (bearer("key-of-nobody") | {"api-key": "key-of-all"}, 401),
            ({"x-api-key": "key-of-some", "api-key": "key-of-all"}, 401),
            (basic("key-of-all") | {"api-key": "key-of-some"}, 401),
            ({"Authorization": "Negotiate abc", "api-key": "key-of-all"}, 200),  # no key of ours is no other key
        ):
            async with http.get("/v1/models", headers=headers) as answer:
                assert answer.status == expected, headers
                if expected == 401:
                    error = (await answer.json())["error"]
                    assert error["code"] == "invalid_api_key"
                    assert "different API keys" in error["message"]
        for name, start in (("x-api-key", ""), ("Authorization", "Bearer ")):
            twice = [(name, f"{start}key-of-all"), (name, f"{start}key-of-some")]
            async with http.get("/v1/models", headers=twice) as answer:
                assert answer.status == 401
        async with http.get("/healthz", headers=bearer("key-of-all") | {"api-key": "key-of-some"}) as answer:
            assert (answer.status, await answer.json()) == (200, {"status": "ok"}), "as a stranger"
    assert counted == 7 * ["wrong_key"]


async def test_the_error_is_openais(tmp_path: Path) -> None:
    async with serve(access=Access(tenants(tmp_path))) as node, ClientSession(node.url) as http:
        async with http.post("/v1/chat/completions", json=CHAT) as answer:
            error = (await answer.json())["error"]
            assert (answer.status, error["type"], error["code"], error["param"]) == (
                401, "authentication_error", "invalid_api_key", None,
            )  # fmt: skip
            assert answer.headers.getall("WWW-Authenticate") == ['Bearer realm="hearthd"']
            assert answer.headers["X-Request-Id"]
        async with http.get("/metrics") as answer:
            assert len(answer.headers.getall("WWW-Authenticate")) == 2, "a browser may ask for the key"


async def test_a_tenant_sees_its_models_only(tmp_path: Path) -> None:
    models = [entry("org/tiny"), entry("secret/one", aliases=("one",))]
    async with serve(access=Access(tenants(tmp_path)), models=models) as node, ClientSession(node.url) as http:
        seen = {}
        for key in ("key-of-all", "key-of-some"):
            async with http.get("/v1/models", headers=bearer(key)) as answer:
                seen[key] = [each["id"] for each in (await answer.json())["data"]]
        assert seen == {"key-of-all": ["org/tiny", "secret/one"], "key-of-some": ["org/tiny"]}
        told = []
        for name in ("secret/one", "one", "no/such"):
            async with http.post("/v1/chat/completions", json=CHAT | {"model": name}, headers=bearer("key-of-some")) as answer:
                told.append((answer.status, (await answer.text()).replace(name, "NAME")))
            for path in (f"/v1/models/{name}", f"/m/{name}/v1/models", f"/m/{name}/metrics", f"/m/{name}/healthz"):
                assert await status(http, "GET", path, bearer("key-of-some")) == 404, path
        assert told[0][0] == 404
        assert told[0] == told[1], "an alias says no more than the name"
        async with http.post("/v1/chat/completions", json=CHAT | {"model": "secret/one"}, headers=bearer("key-of-all")) as answer:
            assert answer.status == 200
        assert [(each.tenant, each.model.name) for each in node.requests.submitted] == [("all", "secret/one")]


async def test_a_forbidden_model_reads_as_an_unknown_one(tmp_path: Path) -> None:
    """Word for word: the real registry and the scope speak through the same function."""
    from daemon.api.request_scope import RequestScope
    from daemon.errors import HearthError, no_model
    from tests.daemon.api.fakes import FakeModels, FakeRequests

    scope = RequestScope(
        Key(tenants(tmp_path).tenants["some"]), FakeModels(entry("secret/one")), FakeRequests(), Quotas(), {}, limit_headers.openai
    )
    for name in ("secret/one", "tiny", "no/such"):
        with pytest.raises(HearthError) as caught:
            scope.resolve(name)
        assert caught.value.body() == no_model(name).body()


async def test_admins_alone_watch_once_there_is_one(tmp_path: Path) -> None:
    async with serve(access=Access(tenants(tmp_path))) as node, ClientSession(node.url) as http:
        assert await status(http, "GET", "/metrics", bearer("key-of-some")) == 200
        assert await status(http, "GET", "/metrics", basic("key-of-some")) == 200
    async with serve(access=Access(tenants(tmp_path, admin=True))) as node, ClientSession(node.url) as http:
        assert await status(http, "GET", "/metrics", bearer("key-of-all")) == 200
        for path in ("/metrics", "/m/tiny/metrics"):
            assert await status(http, "GET", path, bearer("key-of-some")) == 403
        assert await status(http, "POST", "/v1/chat/completions", bearer("key-of-some")) == 200


async def test_a_remembered_password_is_for_reading_from_our_own_pages(tmp_path: Path) -> None:
    async with serve(access=Access(tenants(tmp_path))) as node, ClientSession(node.url) as http:
        assert await status(http, "GET", "/v1/models", basic("key-of-all")) == 200
        assert await status(http, "GET", "/v1/models", basic("key-of-nobody")) == 401
        assert await status(http, "GET", "/v1/models", {"Authorization": "Basic !!!"}) == 401
        assert await status(http, "POST", "/v1/chat/completions", basic("key-of-all")) == 401
        elsewhere = basic("key-of-all") | {"Origin": "https://evil.example"}
        assert await status(http, "GET", "/v1/models", elsewhere) == 403


HOSTS = [
    ("127.0.0.1:8000", 200), ("[::1]:8000", 200), ("10.0.0.7", 200), ("localhost", 200), ("LocalHost.:8000", 200),
    ("app.localhost", 200), (socket.gethostname(), 200), ("gpu1.example.org:8000", 200), ("named.example", 200),
    ("evil.example", 403), ("127.0.0.1.evil.example", 403), ("localhost.evil.example", 403), ("gpu1.example.org.evil", 403),
    ("evil.example:8000", 403), ("a@127.0.0.1", 403), ("[::1", 403), ("::1", 403),
]  # fmt: skip


async def test_without_keys_other_hosts_are_refused() -> None:
    rules = Access(settings=Settings(), listen="named.example:8000")
    async with serve(access=rules) as node, ClientSession(node.url) as http:
        for host, expected in HOSTS:
            for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/healthz")):
                assert await status(http, method, path, {"Host": host}) == expected, host
        async with http.get("/v1/models", headers={"Host": "evil.example"}) as answer:
            error = json.loads(await answer.text())["error"]
            assert (error["type"], error["code"]) == ("permission_error", "host_not_allowed")
            assert "allowed_hosts" in error["message"]
        assert all(generation.tenant == "" for generation in node.requests.submitted)


async def test_without_keys_other_origins_are_refused() -> None:
    async with serve() as node, ClientSession(node.url) as http:
        own = f"127.0.0.1:{node.port}"
        for origin, expected in (
            (f"http://{own}", 200),
            (f"http://localhost:{node.port}", 403),
            ("http://127.0.0.1", 403),
            ("https://evil.example", 403),
            ("null", 403),
            ("", 403),
        ):
            assert await status(http, "POST", "/v1/chat/completions", {"Origin": origin}) == expected, origin
        async with http.options("/v1/chat/completions", headers={"Origin": f"http://{own}"}) as answer:
            assert not [name for name in answer.headers if name.lower().startswith("access-control-")]


async def test_the_log_names_what_is_refused_and_the_setting(caplog: pytest.LogCaptureFixture) -> None:
    async with serve() as node, ClientSession(node.url) as http:
        await status(http, "GET", "/v1/models", {"Origin": "https://a.example"})
        await status(http, "GET", "/v1/models", {"Host": "b.example"})
    lines = [record.getMessage() for record in caplog.records if record.name == "hearthd.access"]
    assert lines == [
        "refused requests: 1 (other origin), the last from 127.0.0.1: origin 'https://a.example' is not in allowed_origins",
        "refused requests: 1 (other host), the last from 127.0.0.1: host 'b.example' is not in allowed_hosts",
    ]


async def test_with_keys_neither_matters(tmp_path: Path) -> None:
    async with serve(access=Access(tenants(tmp_path))) as node, ClientSession(node.url) as http:
        headers = bearer("key-of-all") | {"Host": "evil.example", "Origin": "https://evil.example"}
        assert await status(http, "POST", "/v1/chat/completions", headers) == 200


async def test_refusals_are_counted_and_do_not_fill_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    counted: list[str] = []
    rules = Access(tenants(tmp_path), count=counted.append)
    with caplog.at_level(logging.INFO, "hearthd.access"):
        async with serve(access=rules) as node, ClientSession(node.url) as http:
            for _ in range(20):
                await status(http, "GET", "/v1/models", bearer("key-that-is-wrong"))
            await status(http, "GET", "/v1/models")
    assert counted == ["wrong_key"] * 20 + ["no_key"]
    lines = [record.getMessage() for record in caplog.records if record.name == "hearthd.access"]
    assert len(lines) == 2
    assert "key-that-is-wrong" not in caplog.text


async def test_new_keys_apply_at_once(tmp_path: Path) -> None:
    rules = Access(tenants(tmp_path))
    async with serve(access=rules) as node, ClientSession(node.url) as http:
        assert await status(http, "GET", "/v1/models", bearer("key-of-all")) == 200
        (tmp_path / "new.toml").write_text(f'[tenants.new]\nkeys = ["{keys.hash_key("key-of-new")}"]\n')
        rules.keys = keys.load(str(tmp_path / "new.toml"))
        assert await status(http, "GET", "/v1/models", bearer("key-of-all")) == 401
        assert await status(http, "GET", "/v1/models", bearer("key-of-new")) == 200


@pytest.mark.parametrize(
    ("listen", "is_open"),
    [("127.0.0.1:0", False), ("localhost:0", False), ("127.8.9.1:0", False), ("[::1]:0", False), ("0.0.0.0:0", True), (":0", True)],
)
def test_beyond_this_machine_only_with_keys(listen: str, is_open: bool) -> None:
    for changes in ({"listen": listen}, {"admin_listen": listen}):
        config = NodeConfig(**({"listen": "127.0.0.1:0"} | changes))
        if is_open:
            with pytest.raises(ConfigError, match=r"--keys-file FILE, or --insecure") as caught:
                listeners.check(config, False, "flags")
            assert caught.value.key == next(iter(changes))
        else:
            listeners.check(config, False, "flags")
        listeners.check(config, True, "flags")
        listeners.check(NodeConfig(**({"insecure": True, "listen": "127.0.0.1:0"} | changes)), False, "flags")


def test_sockets_that_systemd_passed_are_looked_at_too() -> None:
    config = NodeConfig(listen="127.0.0.1:0")
    with (
        socket.create_server(("0.0.0.0", 0)) as passed,
        pytest.raises(sockets.SocketError, match=r"listen: 0\.0\.0\.0 can be reached from other machines"),
    ):
        listeners.bind(config, {sockets.HTTP: [passed]}, False)
    with socket.create_server(("0.0.0.0", 0)) as passed:
        assert listeners.bind(config, {sockets.HTTP: [passed]}, True).main == [passed]


def test_addresses() -> None:
    assert [admission.is_address(host) for host in ("1.2.3.4", "::1", "fe80::1%eth0", "a.b", "", "1.2.3")] == [True] * 3 + [
        False
    ] * 3


@pytest.mark.parametrize("is_passed", [True, False])
def test_connections_inherit_keepalive_from_the_listener(is_passed: bool) -> None:
    """The HTTP server sets it on none of them."""
    passed = sockets.bind_http("127.0.0.1:0") if is_passed else []
    bound = listeners.bind(NodeConfig(listen="127.0.0.1:0"), {sockets.HTTP: passed}, False)
    try:
        (listener,) = bound.main
        listener.setblocking(True)
        with socket.create_connection(listener.getsockname()), listener.accept()[0] as accepted:
            assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    finally:
        bound.close()


# ---- what probes ask, by vLLM's names


async def test_probes_need_no_key_and_learn_nothing_else(tmp_path: Path) -> None:
    async with serve(access=Access(tenants(tmp_path))) as node, ClientSession(node.url) as http:
        for method, path, told in (
            ("GET", "/health", {"status": "ok"}),
            ("GET", "/ping", {"status": "ok"}),
            ("POST", "/ping", {"status": "ok"}),
        ):
            async with http.request(method, path) as answer:
                assert (answer.status, await answer.json()) == (200, told), path
        for path in ("/version", "/load", "/m/tiny/health"):
            assert await status(http, "GET", path) == 401, path
        node.health.good = False
        assert [await status(http, "GET", path) for path in ("/health", "/healthz", "/ping")] == [503, 503, 200]
        assert await status(http, "GET", "/m/tiny/health", bearer("key-of-all")) == 503


async def test_version_and_load(tmp_path: Path) -> None:
    async with serve() as node, ClientSession(node.url) as http:
        async with http.get("/version") as answer:
            assert (answer.status, await answer.json()) == (200, {"version": VERSION})
        for node.health.open in (0, 3):
            async with http.get("/load") as answer:
                assert (answer.status, await answer.json()) == (200, {"server_load": node.health.open})
        for path in ("/version", "/load", "/health"):
            assert await status(http, "POST", path) == 405
        assert await status(http, "GET", "/m/tiny/load") == 404, "the node's, no model's"
    async with serve(access=Access(tenants(tmp_path, admin=True))) as node, ClientSession(node.url) as http:
        some, admins = bearer("key-of-some"), bearer("key-of-all")
        assert [await status(http, "GET", "/load", key) for key in (some, admins)] == [403, 200], "it tells of all tenants"
        assert await status(http, "GET", "/version", some) == 200


async def test_pings_leave_no_lines_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hearthd.request")
    async with serve() as node, ClientSession(node.url) as http:
        assert await status(http, "POST", "/ping") == 200
    assert not caplog.records
