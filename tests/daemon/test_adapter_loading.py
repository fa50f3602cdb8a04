"""LoRA adapters that an operator loads from a folder by a name: what is refused, what a scan and a restart make of them."""

from __future__ import annotations

import errno
import logging
import shutil
from pathlib import Path

import pytest

from config.schema import ModelConfig
from daemon.errors import HearthError
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from daemon.scanning.scanner import ModelScanner
from loader.models.catalog import named_adapters, scan
from tests.daemon.test_adapters import Tenant, adapter, make_registry, refusal
from tests.loader.checkpoints import write_checkpoint


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """A base and an adapter in the models folder; an adapter elsewhere."""
    write_checkpoint(tmp_path / "models" / "org" / "base")
    adapter(tmp_path / "models" / "me" / "sql")
    adapter(tmp_path / "elsewhere")
    return tmp_path / "models"


async def made(models: Path, **settings: ModelConfig) -> Registry:
    registry = make_registry(models, {"gpt": ["org/base"]}, **settings)
    await registry.rescan()
    return registry


async def error(registry: Registry, name: str, path: Path | str, in_place: bool = False) -> tuple[str, str, str | None]:
    before = dict(registry.adapters), dict(registry._state.adapters), registry.names
    with pytest.raises(HearthError) as caught:
        await registry.load_adapter(name, str(path), in_place)
    assert (registry.adapters, registry._state.adapters, registry.names) == before, "nothing has changed"
    return caught.value.code, caught.value.message, caught.value.param


async def test_it_is_a_model_of_its_name_from_then_on(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    registry = await made(models)
    record = await registry.load_adapter("team/lora", str(models.parent / "elsewhere"))
    assert (record.base, record.row()["loaded_from"]) == ("org/base", str(models.parent / "elsewhere"))
    assert "team/lora: LoRA adapter of org/base, rank 4" in caplog.text
    for name in ("team/lora", "org/base:lora"):
        found = registry.resolve(name)
        assert (found.name, found.own_name) == ("org/base", "team/lora")
    assert [one.own_name for one in registry.entries()] == ["me/sql", "org/base", "team/lora"]
    assert registry.num_adapters == {"org/base": 2}
    assert "`hearth unload team/lora` ends that" in registry.adapters["team/lora"].lines()[-1]
    with pytest.raises(HearthError):
        registry.resolve("team/lora", Tenant("org/base"))
    assert await registry.rescan() == []
    assert registry.resolve("team/lora") == found
    (models.parent / "elsewhere" / "adapter_config.json").unlink()
    await registry.rescan()
    assert refusal(registry, "team/lora")[0] == "model_unusable"
    shutil.rmtree(models.parent / "elsewhere")
    await registry.rescan()
    assert refusal(registry, "team/lora")[0] == "model_incomplete"
    adapter(models.parent / "elsewhere")
    await registry.rescan()
    assert registry.resolve("team/lora").own_name == "team/lora"
    assert await registry.unload_adapter("team/lora") is not None
    assert refusal(registry, "team/lora")[0] == "model_not_found"
    assert "team/lora: the adapter is unloaded" in caplog.text
    await registry.rescan()
    assert [one.own_name for one in registry.entries()] == ["me/sql", "org/base"]
    assert registry._state.adapters == {}


async def test_a_restart_finds_it_again(models: Path) -> None:
    registry = await made(models)
    await registry.load_adapter("lora", str(models.parent / "elsewhere"))
    registry._state.path.parent.mkdir(exist_ok=True)
    registry._state.write(registry._state.snapshot())
    again = make_registry(models)
    again._state.load()
    await again.rescan()
    assert again.resolve("lora").own_name == "lora"
    assert again.was_loaded("lora")


def test_state_files_without_adapters_are_read_and_bad_ones_are_not(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = NodeState(str(tmp_path))
    state.path.write_text('{"version": 1, "pinned": {"a": true}, "enabled": {}}')
    state.load()
    assert (state.pinned, state.adapters) == ({"a": True}, {})
    for bad in ('{"a": 1}', "[]", '"x"'):
        state.path.write_text(f'{{"version": 1, "pinned": {{}}, "enabled": {{}}, "adapters": {bad}}}')
        state.load()
        assert f"{state.path} cannot be used: key adapters" in caplog.text
        caplog.clear()


@pytest.mark.parametrize(
    "name", ["", "/", "/a", "a/", "a//b", "..", "a/../b", ".a", "a b", "oak:a", "a*", "a?", "a\n", "ä", "a" * 257]
)
async def test_names_that_are_none(models: Path, name: str) -> None:
    code, message, param = await error(await made(models), name, models.parent / "elsewhere")
    assert (code, param) == ("invalid_request", "lora_name")
    assert "is no name for an adapter" in message


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("me/sql", "'me/sql' is the name of an adapter in the models folder"),
        ("org/base", "'org/base' is the name of a model in the models folder"),
        ("far", "a model that another server answers"),
        ("b", "an alias of a model, or an entry of [names]"),
        ("gpt", "an alias of a model, or an entry of [names]"),
    ],
)
async def test_names_that_are_taken(models: Path, name: str, said: str) -> None:
    settings = {"far": ModelConfig(upstream="http://gpu2:8000/v1"), "org/base": ModelConfig(aliases=["b"])}
    for in_place in (False, True):
        code, message, param = await error(await made(models, **settings), name, models.parent / "elsewhere", in_place)
        assert (code, param) == ("name_taken", "lora_name")
        assert said in message


async def test_folders_that_are_no_adapters(models: Path) -> None:
    registry, other = await made(models), models.parent / "other"
    assert (await error(registry, "a", "elsewhere"))[::2] == ("invalid_request", "lora_path")
    assert (await error(registry, "a", "/a\0b"))[::2] == ("invalid_request", "lora_path")
    assert await error(registry, "a", other) == ("adapter_not_found", f"{other}: No such file or directory", "lora_path")
    other.write_text("")
    assert await error(registry, "a", other) == ("adapter_not_found", f"{other}: Not a directory", "lora_path")
    other.unlink()
    other.mkdir()
    told = await error(registry, "a", other)
    assert told == ("adapter_unusable", f"{other} cannot be served: {other} holds no adapter_config.json", "lora_path")
    assert "holds no adapter_config.json" in (await error(registry, "a", models / "org" / "base"))[1]
    adapter(models / "org" / "base", "org/base")  # a model's folder with one thing more
    assert "is a model's folder" in (await error(registry, "a", models / "org" / "base"))[1]
    adapter(other, bias="all")
    code, message, _ = await error(registry, "a", other)
    assert code == "adapter_unusable"
    assert "bias" in message
    adapter(other)
    (other / "adapter_model.safetensors").unlink()
    assert (await error(registry, "a", other))[0] == "adapter_unavailable"


async def test_bases(models: Path) -> None:
    registry, other = await made(models), adapter(models.parent / "other", "x/y")
    code, message, param = await error(registry, "a", other)
    assert (code, param) == ("adapter_without_base", "lora_path")
    assert message == f"{other}: its base 'x/y' is not here; name it with models.\"a\".base"
    named = await made(models, a=ModelConfig(base="org/base"))
    assert (await named.load_adapter("a", str(other))).base == "org/base"
    wide = await made(models, a=ModelConfig(priority=2.0))
    assert (await error(wide, "a", models.parent / "elsewhere"))[0] == "adapter_unusable"
    (models / "org" / "base" / "model.safetensors").unlink()
    await registry.rescan()
    assert (await error(registry, "a", models.parent / "elsewhere"))[0] == "model_incomplete"


async def test_the_same_name_again_is_an_error_unless_in_place(models: Path) -> None:
    registry = await made(models)
    first = await registry.load_adapter("a", str(models.parent / "elsewhere"))
    assert (await error(registry, "a", models.parent / "elsewhere"))[::2] == ("adapter_loaded", "lora_name")
    adapter(models.parent / "second", lora_alpha=16)
    assert (await error(registry, "a", models.parent / "none", in_place=True))[0] == "adapter_not_found"
    assert registry.resolve("a").adapter is first.served
    second = await registry.load_adapter("a", str(models.parent / "second"), in_place=True)
    assert second.served is not None
    assert first.served is not None
    assert second.served.fingerprint != first.served.fingerprint
    assert registry._state.adapters == {"a": str(models.parent / "second")}
    assert (await registry.load_adapter("b", str(models.parent / "second"), in_place=True)).name == "b"


async def test_what_is_not_loaded_is_not_unloaded(models: Path) -> None:
    registry = await made(models)
    for name, code, said in (
        ("me/sql", "adapter_in_folder", "lies in the models folder and is served as long as it is there"),
        ("org/base", "model_not_found", "There is no adapter 'org/base'."),
        ("x", "model_not_found", "There is no adapter 'x'."),
    ):
        with pytest.raises(HearthError, match=said) as caught:
            await registry.unload_adapter(name)
        assert caught.value.code == code


async def test_a_folder_that_comes_later_is_hidden_until_it_is_unloaded(models: Path, caplog: pytest.LogCaptureFixture) -> None:
    registry = await made(models)
    await registry.load_adapter("late", str(models.parent / "elsewhere"))
    adapter(models / "late", lora_alpha=16)
    await registry.rescan()
    assert registry.adapters["late"].checkpoint.path == str(models.parent / "elsewhere")
    assert f"late: its folder {models / 'late'} is hidden by the adapter that was loaded under this name" in caplog.text
    await registry.unload_adapter("late")
    await registry.rescan()
    assert registry.adapters["late"].checkpoint.path == str(models / "late")
    assert not registry.adapters["late"].loaded_from


async def test_the_scanning_process_looks_at_them(models: Path) -> None:
    scanner, elsewhere = ModelScanner(5.0), str(models.parent / "elsewhere")
    folders: list[list[str]] = []
    scanner.looked_into = folders.append
    try:
        found = await scanner.scan(str(models), {}, {"a": elsewhere, "none": "/nowhere/at/all"})
        direct = scan(models, {}, {"a": elsewhere, "none": "/nowhere/at/all"})
        assert {name: one.path for name, one in found.items()} == {name: one.path for name, one in direct.items()}
        assert found["a"].adapter is not None
        assert (found["none"].is_adapter, found["none"].reason) == (True, "/nowhere/at/all: No such file or directory")
        assert elsewhere in folders[0]
        again = await scanner.scan(str(models), found, {"a": elsewhere})
        assert again["a"] is found["a"]
        assert "none" not in again
        assert [*await scanner.scan("", again, {"a": elsewhere})] == ["a"]
        assert len(folders) == 2, "what is watched is not replaced by a look at one folder"
    finally:
        await scanner.close()


def test_one_that_does_not_answer_is_not_looked_at() -> None:
    looked: list[str] = []
    (seen,) = named_adapters({"a": "/hung"}, {}, looked.append, {"/hung": "does not answer"})
    assert (seen.checkpoint.reason, seen.checkpoint.is_adapter, looked) == ("does not answer", True, [])


async def test_a_scan_that_fails_loads_nothing(models: Path) -> None:
    registry = await made(models)

    async def scan(*_: object) -> dict[str, object]:
        raise OSError(errno.ETIMEDOUT, "does not answer")

    registry._scan = scan  # type: ignore[assignment]
    assert (await error(registry, "a", "/hung"))[:2] == ("adapter_unavailable", "/hung: does not answer")
