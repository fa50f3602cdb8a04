"""LoRA adapters as the daemon sees them: their bases and names, what is refused, and what clients and engines are told."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from config.load import ConfigError, load
from config.schema import DeviceBudget, ModelConfig, NodeConfig
from daemon.contracts import Generation
from daemon.errors import HearthError
from daemon.models import models_check
from daemon.models.entry import ServedAdapter
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from daemon.scanning.scanner import ModelScanner
from engine.protocol import AdapterSource, SamplingParams, Submit
from loader.models.catalog import scan
from scheduler.node import events
from tests.daemon.api.fakes import entry, serve
from tests.daemon.test_dispatcher import Harness, Sink
from tests.loader.adapters import adapter_tensors, modules_of, write_adapter
from tests.loader.checkpoints import CONFIG, shape, write_checkpoint

FITTING = adapter_tensors(modules_of(shape()))
WIDER = CONFIG | {"hidden_size": 32}


def adapter(folder: Path, base: str = "org/base", **changes: object) -> Path:
    return write_adapter(folder, FITTING, base_model_name_or_path=base, **changes)


def make_registry(folder: Path, names: dict[str, list[str]] | None = None, **models: ModelConfig) -> Registry:
    config = NodeConfig(models_dir=str(folder), models=models, chunk_bytes=2 << 20, names=names or {})
    return Registry(config, [DeviceBudget("cpu:0", 256 << 20)], NodeState(str(folder / "state")))


async def scanned(folder: Path, names: dict[str, list[str]] | None = None, **models: ModelConfig) -> Registry:
    registry = make_registry(folder, names, **models)
    await registry.rescan()
    return registry


class Tenant:
    name = "ann"

    def __init__(self, *models: str) -> None:
        self.models = models

    def may_use(self, model: str) -> bool:
        return model in self.models


def refusal(registry: Registry, name: str) -> tuple[str, str]:
    with pytest.raises(HearthError) as caught:
        registry.resolve(name)
    return caught.value.code, caught.value.message


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Two bases and an adapter of the first."""
    write_checkpoint(tmp_path / "org" / "base")
    write_checkpoint(tmp_path / "wide", WIDER)
    adapter(tmp_path / "me" / "sql")
    return tmp_path


# ---- bases


async def test_an_adapter_is_its_base_with_the_adapter(models: Path) -> None:
    registry = make_registry(models)
    changes = await registry.rescan()
    assert [change.facts.name for change in changes if isinstance(change, events.ModelRegistered)] == ["org/base", "wide"]
    found, base = registry.resolve("me/sql"), registry.resolve("org/base")
    assert base.adapter is None
    assert (found.name, found.own_name, found.path, found.max_model_len) == ("org/base", "me/sql", base.path, base.max_model_len)
    assert found.adapter is not None
    assert (found.adapter.path, found.adapter.rank) == (str(models / "me" / "sql"), 4)
    assert found.identity == ("me/sql", f"{base.fingerprint}+{found.adapter.fingerprint}")
    assert [one.own_name for one in registry.entries()] == ["me/sql", "org/base", "wide"]
    assert registry.resolve("me/sql") is found
    assert await registry.rescan() == []


async def test_a_folder_that_changes_or_goes(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry = await scanned(models)
    assert "me/sql: LoRA adapter of org/base, rank 4, 14 matrices" in caplog.text
    before = registry.resolve("me/sql")
    caplog.clear()
    await registry.rescan()
    assert "me/sql" not in caplog.text
    adapter(models / "me" / "sql", lora_alpha=16)
    await registry.rescan()
    assert registry.resolve("me/sql").identity != before.identity
    for file in (models / "me" / "sql").iterdir():
        file.unlink()
    await registry.rescan()
    assert refusal(registry, "me/sql")[0] == "model_not_found"
    assert "me/sql: the adapter's folder is gone" in caplog.text


@pytest.mark.parametrize(
    ("told", "settings", "base"),
    [
        ("org/base", {}, "org/base"),
        ("other/base", {}, "org/base"),
        ("/data/models/base/", {}, "org/base"),
        ("x", {"me/sql": ModelConfig(base="org/base")}, "org/base"),
        ("x", {"me/sql": ModelConfig(base="b"), "org/base": ModelConfig(aliases=["b"])}, "org/base"),
        ("b", {"org/base": ModelConfig(aliases=["b"])}, "org/base"),
    ],
)
async def test_how_a_base_is_found(models: Path, told: str, settings: dict[str, ModelConfig], base: str) -> None:
    adapter(models / "me" / "sql", told)
    registry = await scanned(models, **settings)
    assert registry.resolve("me/sql").name == base


@pytest.mark.parametrize(
    ("told", "settings", "code", "said"),
    [
        ("x/y", {}, "model_incomplete", "its base 'x/y' is not here; name it with models.\"me/sql\".base"),
        (None, {}, "model_incomplete", "its adapter_config.json names no base; name it with"),
        ("z/two", {}, "model_incomplete", "its base 'z/two' may be any of a/two, b/two; name it with"),
        ("x", {"me/sql": ModelConfig(base="nope")}, "model_incomplete", "models.\"me/sql\".base: there is no model 'nope' here"),
        ("x", {"me/sql": ModelConfig(base="you/sql")}, "model_incomplete", "'you/sql' is a LoRA adapter itself"),
        ("org/base", {"me/sql": ModelConfig(priority=2.0)}, "model_unusable", 'models."me/sql".priority: has no effect on a LoRA'),
        (
            "x",
            {"me/sql": ModelConfig(base="wide")},
            "model_unusable",
            "it does not fit wide: adapter_model.safetensors: tensor ",
        ),
        ("far", {"far": ModelConfig(upstream="http://gpu2:8000/v1")}, "model_unusable", "answered by another server (gpu2:8000)"),
    ],
)
async def test_adapters_without_a_base_that_fits(
    models: Path, told: str | None, settings: dict[str, ModelConfig], code: str, said: str
) -> None:
    adapter(models / "me" / "sql", told)  # type: ignore[arg-type]
    adapter(models / "you" / "sql")
    for name in ("a", "b"):
        write_checkpoint(models / name / "two")
    registry = await scanned(models, **settings)
    found, message = refusal(registry, "me/sql")
    assert found == code
    assert said in message
    assert [one.own_name for one in registry.entries() if one.adapter] == ["you/sql"]
    assert registry.adapters["me/sql"].lines()[0].endswith(registry.adapters["me/sql"].problem)


async def test_a_model_with_the_setting_of_adapters_is_refused(models: Path) -> None:
    registry = await scanned(models, wide=ModelConfig(base="org/base"))
    assert refusal(registry, "wide") == (
        "model_unusable",
        "The model 'wide' cannot be served: models.\"wide\".base: is for LoRA adapters, and wide is none",
    )


async def test_requests_get_the_error_of_a_base_that_cannot_be_served(models: Path) -> None:
    (models / "org" / "base" / "model.safetensors").unlink()
    registry = await scanned(models)
    assert refusal(registry, "me/sql") == refusal(registry, "org/base")
    assert refusal(registry, "me/sql")[0] == "model_incomplete"
    write_checkpoint(models / "org" / "base")
    await registry.rescan()
    assert registry.resolve("me/sql").name == "org/base"
    too_large = HearthError("model_too_large", "too large")
    registry.refused = lambda name: too_large if name == "org/base" else None
    assert refusal(registry, "me/sql") == ("model_too_large", "too large")


async def test_an_adapter_in_a_models_folder_is_of_that_model(models: Path) -> None:
    adapter(models / "wide" / "own", "x/y")
    adapter(models / "org" / "base" / "own", "x/y")
    adapter(models / "org" / "base" / "two", "z/base")
    write_checkpoint(models / "a" / "base")
    registry = await scanned(models)
    assert registry.resolve("org/base/own").name == "org/base"
    assert registry.resolve("org/base/two").name == "org/base"  # a/base is called so, too
    assert "it does not fit wide" in refusal(registry, "wide/own")[1]


# ---- names


async def test_names_of_an_adapter(models: Path) -> None:
    adapter(models / "you" / "sql")
    adapter(models / "org" / "base" / "inner")
    settings = {"me/sql": ModelConfig(aliases=["sql"]), "org/base": ModelConfig(aliases=["b:1"])}
    registry = await scanned(models, {"gpt": ["wide2", "org/base:inner"], "*": ["me/sql"]}, **settings)
    for name in ("me/sql", "sql", "org/base:me/sql", "b:1:me/sql", "what?"):
        assert registry.resolve(name).own_name == "me/sql"
    for name in ("org/base/inner", "org/base:inner", "b:1:inner", "gpt", "org/base:org/base/inner"):
        assert registry.resolve(name).own_name == "org/base/inner"
    assert registry.knows("org/base:inner")
    assert not registry.knows("org/base:sql")  # of two adapters
    assert not registry.knows("wide:inner")
    assert registry.canonical("b:1:inner") == "org/base"
    assert registry.further_names()["org/base/inner"] == ["gpt"]
    strict = await scanned(models)
    for name in ("org/base:sql", "org/base:", "wide:me/sql", "org/base:nope", ":me/sql", "org/base:" + "x" * 10_000):
        assert refusal(strict, name)[0] == "model_not_found"


async def test_one_whose_files_are_broken_tells_so_by_each_of_its_names(models: Path) -> None:
    """What base it is of stands in a file that is being copied, perhaps."""
    folder = models / "me" / "sql"
    for name, content, code in (
        ("adapter_config.json", b"[[[", "model_unusable"),
        ("adapter_model.safetensors", folder.joinpath("adapter_model.safetensors").read_bytes()[:-9], "model_incomplete"),
        ("adapter_model.safetensors", b"", "model_incomplete"),
    ):
        adapter(folder)
        (folder / name).write_bytes(content)
        registry = await scanned(models)
        for name in ("me/sql", "org/base:me/sql", "org/base:sql"):
            assert refusal(registry, name) == refusal(registry, "me/sql")
            assert refusal(registry, name)[0] == code
        assert refusal(registry, "nobody:sql")[0] == "model_not_found"
        adapter(models / "you" / "sql")
        registry = await scanned(models)
        assert registry.resolve("org/base:sql").own_name == "you/sql"
        shutil.rmtree(models / "you")


async def test_rights_are_those_of_the_adapters_name(models: Path) -> None:
    registry = await scanned(models)
    assert registry.resolve("org/base:sql", Tenant("me/sql")).own_name == "me/sql"
    for name, tenant in (("org/base", Tenant("me/sql")), ("me/sql", Tenant("org/base")), ("org/base:sql", Tenant("org/base"))):
        with pytest.raises(HearthError, match="model"):
            registry.resolve(name, tenant)


async def test_commands_take_the_base_alone(models: Path) -> None:
    registry = await scanned(models)
    with pytest.raises(HearthError) as caught:
        registry.names.local("org/base:sql")
    assert caught.value.code == "is_adapter"
    assert caught.value.message == "'me/sql' is a LoRA adapter of org/base, and org/base is loaded in its place."
    assert registry.names.local("org/base") == "org/base"
    assert registry.unknown_models() == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"r": 512}, "is refused: adapter_config.json: key r: 512 is out of range (from 1 to 256)"),
        ({"base_model_name_or_path": "x/gone"}, "is incomplete: its base 'x/gone' is not here"),
    ],
)
async def test_commands_tell_why_an_adapter_has_no_base(models: Path, changes: dict[str, Any], told: str) -> None:
    """Tells the fault of an adapter whose base is unknown, since the base may well be here."""
    write_adapter(models / "me" / "bad", FITTING, **changes)
    registry = await scanned(models)
    with pytest.raises(HearthError) as caught:
        registry.names.local("me/bad")
    assert caught.value.message.startswith(f"'me/bad' is a LoRA adapter and {told}")


# ---- the scan's process, the settings


async def test_adapters_that_say_the_same_are_held_once(models: Path) -> None:
    for number in range(3):
        shutil.copytree(models / "me" / "sql", models / "me" / f"copy-{number}")
    scanner = ModelScanner()
    try:
        found = await scanner.scan(str(models), {})
        (models / "me" / "copy-9").mkdir()
        for file in (models / "me" / "sql").iterdir():
            shutil.copy(file, models / "me" / "copy-9")
        again = await scanner.scan(str(models), found)
    finally:
        await scanner.close()
    same = [one.adapter for name, one in again.items() if name.startswith(("me/copy", "me/sql"))]
    assert len(same) == 5
    assert all(one is same[0] for one in same)


async def test_an_adapter_travels_from_the_scanning_process(models: Path) -> None:
    scanner = ModelScanner(5.0)
    try:
        found = await scanner.scan(str(models), {})
        direct = scan(models)
        assert found["me/sql"].adapter == direct["me/sql"].adapter is not None
        assert {name: one.is_adapter for name, one in found.items()} == {"me/sql": True, "org/base": False, "wide": False}
        again = await scanner.scan(str(models), found)
        assert again["me/sql"] is found["me/sql"]
    finally:
        await scanner.close()


def checked(models: Path, text: str) -> list[str]:
    path = models / "node.toml"
    path.write_text(f'models_dir = "{models}"\n{text}')
    return models_check.check(load(str(path)), str(path))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[models."me/sql"]\npinned = true', 'models."me/sql".pinned: has no effect on a LoRA adapter'),
        ('[models."me/sql"]\nbase = "org/base"\npinned = true', 'models."me/sql".pinned: has no effect beside base'),
        ('[models."me/sql"]\nbase = ""', "models.\"me/sql\".base: '' must be the name of the model"),
        ('[models."me/sql"]\nbase = "me/sql"', "models.\"me/sql\".base: 'me/sql' must be the name of the model"),
        ('[models."me/sql"]\nbase = "me/two"', "models.\"me/sql\".base: 'me/two' is a LoRA adapter itself"),
        ('[models.wide]\nbase = "org/base"', "models.\"wide\".base: is for LoRA adapters, and 'wide' is none"),
        ('[models."me/sql"]\nbase = "far"\n[models.far]\nupstream = "http://a:1/v1"', "another server answers for 'far'"),
    ],
)
def test_settings_that_can_never_work(models: Path, text: str, said: str) -> None:
    adapter(models / "me" / "two")
    with pytest.raises(ConfigError) as caught:
        checked(models, text)
    assert said in str(caught.value)


def test_settings_of_an_adapter(models: Path) -> None:
    assert checked(models, '[models."me/sql"]\nbase = "org/base"\naliases = ["sql"]') == []
    (warning,) = checked(models, '[models."me/sql"]\nbase = "org/bsae"')
    assert "models.\"me/sql\".base: there is no model 'org/bsae'" in warning
    assert 'did you mean "org/base"?' in warning


# ---- engines and clients

SERVED = ServedAdapter("me/sql", "/models/me/sql", "a" * 32, ("sql",), 1700000001, 8, 4096)


async def test_the_engine_is_told_the_adapter() -> None:
    node = Harness()
    base = node.entries["a"]
    both = entry("a", adapter=SERVED)
    for model in (base, both):
        node.dispatcher.submit(Generation(model, [1, 2], SamplingParams(max_tokens=4, seed=1), Sink()))
    node.loaded()
    sent = node.engine.take(Submit)
    assert [one.model for one in sent] == ["a", "a"]
    assert [one.adapter for one in sent] == [None, AdapterSource("me/sql", "/models/me/sql", "a" * 32)]


@pytest_asyncio.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with (
        serve(models=[entry(), entry(adapter=SERVED)]) as node,
        aiohttp.ClientSession(f"http://127.0.0.1:{node.port}") as session,
    ):
        yield session


async def test_clients_see_the_adapters_name(client: aiohttp.ClientSession, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "hearthd.request")

    async def post(path: str, body: dict[str, Any]) -> Any:
        async with client.post(path, json=body) as response:
            assert response.status == 200, await response.text()
            return json.loads((await response.text()).splitlines()[0])

    messages = [{"role": "user", "content": "hi"}]
    for path, body in (
        ("/v1/chat/completions", {"messages": messages}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": messages, "max_tokens": 4}),
        ("/api/chat", {"messages": messages, "stream": False}),
    ):
        assert (await post(path, {"model": "sql"} | body))["model"] == "me/sql", path
    told = [getattr(record, "fields", {}) for record in caplog.records if record.name == "hearthd.request"]
    assert {(one["model"], one["adapter"]) for one in told} == {("org/tiny", "me/sql")}
    assert (await post("/api/show", {"model": "sql"}))["details"]["parent_model"] == "org/tiny"


async def test_lists_name_the_base_as_parent(client: aiohttp.ClientSession) -> None:
    async with client.get("/v1/models") as response:
        data = {one["id"]: one for one in (await response.json())["data"]}
    assert data["me/sql"] | {"parent": "org/tiny", "root": "me/sql", "aliases": ["sql"], "created": 1700000001} == data["me/sql"]
    assert "parent" not in data["org/tiny"]
    async with client.get("/v1/models/me/sql") as response:
        assert await response.json() == data["me/sql"]
    async with client.get("/api/tags") as response:
        tags = {one["name"]: one for one in (await response.json())["models"]}
    assert (tags["me/sql"]["digest"], tags["me/sql"]["size"]) == ("a" * 32, 4096)
    assert tags["me/sql"]["details"]["parent_model"] == "org/tiny"
    async with client.get("/api/ps") as response:
        assert "me/sql" not in {one["name"] for one in (await response.json())["models"]}
