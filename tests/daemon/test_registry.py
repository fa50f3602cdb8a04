"""What the scheduler and the API are told of a models folder."""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from config.schema import DeviceBudget, ModelConfig, NodeConfig, SamplingDefaults
from daemon.errors import HearthError
from daemon.models import models_check
from daemon.models.registry import Registry
from daemon.record.state import NodeState
from loader.formats.int8 import INT8
from loader.formats.registry import FORMATS
from loader.formats.stored_int8 import STORED_INT8
from loader.models.catalog import scan_one
from scheduler.node import events
from scheduler.node.ledger import size_of
from tests.e2e.checkpoints import END_ID, make_model
from tests.e2e.test_embeddings import make_encoder
from tests.engine.eagle_checkpoint import make_head
from tests.engine.model_bench import CASES, make_checkpoint
from tests.loader import fp8
from tests.loader.checkpoints import write_checkpoint
from tests.loader.compressed import compress
from tests.loader.test_experts import MIXTRAL
from tests.loader.test_llama4 import SMALL as STACKED
from tests.loader.test_mxfp4 import tensors as mxfp4_tensors
from tests.loader.test_mxfp4 import write as write_mxfp4
from tests.loader.test_predictor import config_of, tensors_of
from tests.loader.test_predictor import write as write_predicting

MIB = 1 << 20


def make_registry(folder: Path, budget_bytes: int = 256 * MIB, chunk_bytes: int = 2 * MIB, **models: ModelConfig) -> Registry:
    config = NodeConfig(models_dir=str(folder), models=models, chunk_bytes=chunk_bytes)
    return Registry(config, [DeviceBudget("cpu:0", budget_bytes)], NodeState(str(folder / "state")))


def registered(changes: list[events.Event]) -> dict[str, events.ModelFacts]:
    return {change.facts.name: change.facts for change in changes if isinstance(change, events.ModelRegistered)}


async def test_facts_and_entry(tmp_path: Path) -> None:
    make_model(tmp_path / "org" / "a")
    settings = ModelConfig(
        aliases=["gpt"],
        max_model_len=128,
        pinned=True,
        priority=2.0,
        sampling=SamplingDefaults(temperature=0.3, repetition_penalty=1.2),
    )
    registry = make_registry(tmp_path, **{"org/a": settings})
    facts = registered(await registry.rescan())["org/a"]
    assert (facts.max_model_len, facts.pinned, facts.priority, facts.enabled, facts.incomplete) == (128, True, 2.0, True, "")
    assert facts.weights_bytes > 100_000
    entry = registry.resolve("gpt")
    assert entry is registry.resolve("org/a")
    assert (entry.eos_token_ids, entry.generation_defaults) == ((END_ID,), {"temperature": 0.3, "repetition_penalty": 1.2})
    assert [one.name for one in registry.entries()] == ["org/a"]
    assert await registry.rescan() == []


async def test_state_wins_over_config(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    registry = make_registry(tmp_path, a=ModelConfig(pinned=True))
    registry._state.pinned["a"] = False
    registry._state.enabled["a"] = False
    facts = registered(await registry.rescan())["a"]
    assert (facts.pinned, facts.enabled) == (False, False)


async def test_folders_come_change_and_go(tmp_path: Path) -> None:
    registry = make_registry(tmp_path)
    assert await registry.rescan() == []
    make_model(tmp_path / "a", seed=1)
    first = registered(await registry.rescan())["a"]
    make_model(tmp_path / "a", seed=2)
    second = registered(await registry.rescan())["a"]
    assert first.fingerprint != second.fingerprint
    shutil.rmtree(tmp_path / "a")
    (gone,) = await registry.rescan()
    assert isinstance(gone, events.ModelRemoved)
    with pytest.raises(HearthError) as caught:
        registry.resolve("a")
    assert (caught.value.code, caught.value.status, caught.value.param) == ("model_not_found", 404, "model")


async def test_an_edited_tokenizer_or_template_gives_requests_another_text_id(tmp_path: Path) -> None:
    """The weights stay, so the scheduler is told of no change."""
    folder, named = make_model(tmp_path / "models" / "a"), tmp_path / "own.jinja"
    make_model(tmp_path / "models" / "b")
    named.write_text("{{ 1 }}")
    registry = make_registry(tmp_path / "models", a=ModelConfig(chat_template=str(named)))
    await registry.rescan()
    seen = {registry.resolve("a").text_id}
    other, fingerprint = registry.resolve("b").text_id, registry.resolve("a").fingerprint
    for file in (folder / "tokenizer_config.json", folder / "tokenizer.json", folder / "chat_template.jinja", named):
        file.write_text(file.read_text() + " " if file.exists() else "{{ 2 }}")
        assert await registry.rescan() == []
        seen.add(registry.resolve("a").text_id)
    assert (len(seen), registry.resolve("a").fingerprint, registry.resolve("b").text_id) == (5, fingerprint, other)


async def test_incomplete_models_are_listed_with_the_reason(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    weights = tmp_path / "a" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    registry = make_registry(tmp_path)
    facts = registered(await registry.rescan())["a"]
    assert "model.safetensors" in facts.incomplete
    assert registry.entries() == []
    with pytest.raises(HearthError) as caught:
        registry.resolve("a")
    assert (caught.value.code, caught.value.status) == ("model_incomplete", 503)
    assert "model.safetensors" in caught.value.message
    weights.write_bytes(whole)
    assert registered(await registry.rescan())["a"].incomplete == ""
    assert registry.resolve("a").name == "a"


async def test_what_no_more_files_will_mend_is_no_matter_of_waiting(tmp_path: Path) -> None:
    config = make_model(tmp_path / "a") / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "FalconForCausalLM"))
    registry = make_registry(tmp_path)
    facts = registered(await registry.rescan())["a"]
    assert facts.incomplete == ""
    assert "'FalconForCausalLM' is not supported; supported: LlamaForCausalLM" in facts.unusable
    assert registry.describe("a").startswith("a: refused: config.json")
    with pytest.raises(HearthError) as caught:
        registry.resolve("a")
    assert (caught.value.code, caught.value.status, caught.value.retry_after_s) == ("model_unusable", 400, None)
    assert "'a' cannot be served: config.json: key architectures: 'FalconForCausalLM'" in caught.value.message


async def test_settings_for_no_model_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path / "a")
    registry = make_registry(tmp_path, a=ModelConfig(), b=ModelConfig(pinned=True))
    await registry.rescan()
    assert registry.unknown_models() == ["b"]
    assert 'settings for models."b": there is no model of that name (yet)' in caplog.text


async def test_a_chat_template_that_is_not_there_is_told_until_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path / "models" / "a")
    named = tmp_path / "own.jinja"
    registry = make_registry(tmp_path / "models", a=ModelConfig(chat_template=str(named)))
    await registry.rescan()
    assert registry.unknown_models() == []
    assert f'settings for models."a".chat_template: there is no file {named} (yet)' in caplog.text
    assert registry.models["a"].notes == (f"chats are refused: its chat_template, {named}, is not there",)
    named.write_text("{{ 1 }}")
    await registry.rescan()
    assert registry.models["a"].notes == ()


async def test_default_length_is_a_quarter_of_the_device_and_fits(tmp_path: Path) -> None:
    make_model(tmp_path / "long", max_position_embeddings=1 << 20)
    for budget_bytes in (32 * MIB, 128 * MIB):
        registry = make_registry(tmp_path, budget_bytes)
        facts = registered(await registry.rescan())["long"]
        assert 2048 <= facts.max_model_len < 1 << 20
        assert facts.max_model_len * facts.kv_bytes_per_token <= budget_bytes // 4
        need = facts.weights_bytes + facts.work_space_bytes + facts.max_model_len * facts.kv_bytes_per_token
        assert need < budget_bytes
        assert "of 1048576" in registry.describe("long")


async def test_windows_reserve_less_and_allow_more(tmp_path: Path) -> None:
    for name, architecture in (("full", "LlamaForCausalLM"), ("windows", "MistralForCausalLM")):
        make_model(tmp_path / name, architecture=architecture, max_position_embeddings=1 << 16, sliding_window=256)
    found = registered(await make_registry(tmp_path, 64 * MIB).rescan())
    full, windows = found["full"], found["windows"]
    assert full.kv_reserved_bytes == 0
    assert 0 < windows.kv_reserved_bytes < windows.max_model_len * windows.kv_bytes_per_token // 4
    assert windows.max_model_len > full.max_model_len
    text = make_registry(tmp_path, 64 * MIB, windows=ModelConfig(max_model_len=4096))
    await text.rescan()
    assert f"reserved KV {windows.kv_reserved_bytes / MIB:.1f} MiB" in text.describe("windows")


async def test_a_reload_changes_settings_of_unchanged_folders(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    registry = make_registry(tmp_path)
    await registry.rescan()
    config = NodeConfig(models_dir=str(tmp_path), models={"a": ModelConfig(aliases=["x"], priority=5.0)}, chunk_bytes=2 * MIB)
    assert registered(await registry.rescan(config))["a"].priority == 5.0
    assert registry.resolve("x").aliases == ("x",)


async def test_a_real_name_hides_an_alias(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_model(tmp_path / "a")
    make_model(tmp_path / "b")
    registry = make_registry(tmp_path, a=ModelConfig(aliases=["b"]))
    await registry.rescan()
    assert registry.resolve("b").name == "b"
    assert "hidden" in caplog.text


async def test_a_missing_folder_changes_nothing(tmp_path: Path) -> None:
    make_model(tmp_path / "m" / "a")
    registry = make_registry(tmp_path / "m")
    await registry.rescan()
    (tmp_path / "m").rename(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="No such file"):
        await registry.rescan()
    assert registry.resolve("a").name == "a"


async def test_quantised_weights_are_counted_and_asked_for(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    make_model(tmp_path / "b")
    registry = make_registry(tmp_path, a=ModelConfig(quantize="int8"), b=ModelConfig(quantize="none"))
    facts = registered(await registry.rescan())
    assert facts["a"].weights_bytes < facts["b"].weights_bytes
    sources = [registry.source(name) for name in ("a", "b")]
    assert [source.quantize for source in sources if source is not None] == ["int8", ""]
    assert "int8 matrices" in registry.describe("a")


async def test_packed_weights_are_counted_and_asked_for(tmp_path: Path) -> None:
    for name in ("a", "b"):
        make_model(tmp_path / name, dtype="bfloat16", hidden_size=128, intermediate_size=256)
    registry = make_registry(tmp_path, a=ModelConfig(resident="packed"), b=ModelConfig(resident="plain"))
    facts = registered(await registry.rescan())
    assert facts["a"].weights_bytes < 0.85 * facts["b"].weights_bytes
    sources = [registry.source(name) for name in ("a", "b")]
    assert [source.quantize for source in sources if source is not None] == ["packed", ""]
    assert "bfloat16, packed matrices" in registry.describe("a")
    assert registry.resolve("a").quantize == "", "nothing is quantised"


@pytest.mark.parametrize(
    ("dtype", "settings", "wanted"),
    [
        (
            "float32",
            {},
            "resident: packed is for bfloat16 weights, and this model is computed in float32; leave it out, or set dtype",
        ),
        ("float32", {"dtype": "bfloat16"}, ""),
        ("bfloat16", {"quantize": "int8"}, "quantize: int8 does not go with resident = 'packed'; leave one of them out"),
        ("bfloat16", {"quantize": "none"}, ""),
        ("bfloat16", {"devices": ["cuda:0"]}, "resident: packed is not built for cuda:0"),
    ],
)
async def test_what_cannot_stay_packed_is_refused_by_field(
    tmp_path: Path, dtype: str, settings: dict[str, Any], wanted: str
) -> None:
    make_model(tmp_path / "a", dtype=dtype)
    named = ModelConfig(**({"devices": ["cpu:0"]} | settings), resident="packed")
    config = NodeConfig(models_dir=str(tmp_path), models={"a": named}, chunk_bytes=2 * MIB)
    devices = [DeviceBudget("cpu:0", 256 * MIB), DeviceBudget("cuda:0", 256 * MIB)]
    (facts,) = registered(await Registry(config, devices, NodeState(str(tmp_path / "s"))).rescan()).values()
    assert facts.unusable.startswith(f'models."a".{wanted}' if wanted else "")
    assert bool(facts.unusable) == bool(wanted)


async def test_a_quantised_checkpoint_cannot_stay_packed(tmp_path: Path) -> None:
    make_model(tmp_path / "plain", dtype="bfloat16")
    compress(tmp_path / "plain", tmp_path / "small")
    facts = registered(await make_registry(tmp_path, small=ModelConfig(resident="packed")).rescan())
    assert facts["small"].unusable.startswith('models."small".resident: its checkpoint is quantised (compressed-tensors')


async def test_float16_is_computed_as_bfloat16_where_only_cpu_devices_may_hold_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("plain", "half", "asked"):
        make_model(tmp_path / name, dtype="float32" if name == "plain" else "float16")
    caplog.set_level(logging.INFO)
    registry = make_registry(tmp_path, asked=ModelConfig(dtype="float16"))
    await registry.rescan()
    assert {name: registry.resolve(name).dtype for name in ("plain", "half", "asked")} == {
        "plain": "float32",
        "half": "bfloat16",
        "asked": "float16",
    }
    assert "half: stored as float16 and computed as bfloat16, because cpu devices have no kernels for float16" in caplog.text
    assert "asked: dtype: float16 has no kernels on cpu devices" in caplog.text
    both = [DeviceBudget("cpu:0", 256 * MIB), DeviceBudget("cuda:0", 256 * MIB)]
    registry = Registry(NodeConfig(models_dir=str(tmp_path), chunk_bytes=2 * MIB), both, NodeState(str(tmp_path / "state")))
    await registry.rescan()
    assert registry.resolve("half").dtype == "float16"


@pytest.mark.parametrize("is_built", [False, True])
async def test_what_cannot_be_quantised_is_refused_by_field(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_built: bool
) -> None:
    """int8 goes to any device. What a format is told that is not built for GPUs is tested with int8 in its place."""
    make_model(tmp_path / "a")
    monkeypatch.setitem(FORMATS, "int8", replace(INT8, device_kinds=() if is_built else ("cpu",)))
    refused = "" if is_built else "int8 is not built for cuda:0"
    for devices, wanted in (([], refused), (["cuda:0"], refused), (["cpu:0"], "")):
        settings = ModelConfig(quantize="int8", devices=devices)
        config = NodeConfig(models_dir=str(tmp_path), models={"a": settings}, chunk_bytes=2 * MIB)
        registry = Registry(
            config, [DeviceBudget("cpu:0", 256 * MIB), DeviceBudget("cuda:0", 256 * MIB)], NodeState(str(tmp_path / "s"))
        )
        (facts,) = registered(await registry.rescan()).values()
        assert wanted in facts.unusable
        assert ('models."a".quantize' in facts.unusable) == bool(wanted)


async def test_a_checkpoint_in_int8_goes_to_any_device(tmp_path: Path) -> None:
    make_model(tmp_path / "plain", dtype="bfloat16")
    compress(tmp_path / "plain", tmp_path / "small")
    for device in ("cuda:0", "cpu:0"):
        config = NodeConfig(models_dir=str(tmp_path), chunk_bytes=2 * MIB)
        registry = Registry(config, [DeviceBudget(device, 256 * MIB)], NodeState(str(tmp_path / "s")))
        facts = registered(await registry.rescan())["small"]
        assert (facts.unusable, facts.devices) == ("", ())


async def test_a_quantised_checkpoint_that_gpus_do_not_compute_goes_to_cpu_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMATS, STORED_INT8.name, replace(STORED_INT8, device_kinds=("cpu",)))
    make_model(tmp_path / "plain", dtype="bfloat16")
    compress(tmp_path / "plain", tmp_path / "small")
    gpu, cpu = DeviceBudget("cuda:0", 256 * MIB), DeviceBudget("cpu:0", 256 * MIB)
    for there, named, wanted in (([gpu, cpu], [], ""), ([gpu], [], "give the node a cpu device"), ([gpu, cpu], ["cuda:0"], "cuda")):
        config = NodeConfig(models_dir=str(tmp_path), models={"small": ModelConfig(devices=named)}, chunk_bytes=2 * MIB)
        registry = Registry(config, there, NodeState(str(tmp_path / "s")))
        facts = registered(await registry.rescan())
        assert wanted in facts["small"].unusable
        assert bool(facts["small"].unusable) == bool(wanted)
        if not wanted:
            assert facts["small"].devices == ("cpu:0",)
            assert facts["small"].weights_bytes < facts["plain"].weights_bytes
            source = registry.source("small")
            assert source is not None
            assert source.quantize == STORED_INT8.name
            assert "compressed-tensors int8 matrices" in registry.describe("small")


async def test_experts_in_mxfp4_go_to_any_device_as_large_as_they_are_stored(tmp_path: Path) -> None:
    write_mxfp4(tmp_path / "a", mxfp4_tensors())
    stored_bytes = (tmp_path / "a" / "model.safetensors").stat().st_size
    for device in ("cuda:0", "cpu:0"):
        config = NodeConfig(models_dir=str(tmp_path), chunk_bytes=2 * MIB)
        registry = Registry(config, [DeviceBudget(device, 512 * MIB)], NodeState(str(tmp_path / "s")))
        (facts,) = registered(await registry.rescan()).values()
        assert (facts.unusable, facts.devices) == ("", ())
        assert 0 <= facts.weights_bytes - stored_bytes < 64 << 10
        assert "bfloat16, mxfp4 matrices" in registry.describe("a")
        source = registry.source("a")
        assert source is not None
        assert source.quantize == "mxfp4"


async def test_an_fp8_checkpoint_goes_to_any_device_and_is_named_and_counted(tmp_path: Path) -> None:
    make_model(tmp_path / "plain", dtype="bfloat16")
    fp8.quantize(tmp_path / "plain", tmp_path / "small", fp8.KINDS["fine-grained"])
    config = NodeConfig(models_dir=str(tmp_path), chunk_bytes=2 * MIB)
    there = [DeviceBudget("cuda:0", 256 * MIB), DeviceBudget("cpu:0", 256 * MIB)]
    registry = Registry(config, there, NodeState(str(tmp_path / "s")))
    facts = registered(await registry.rescan())
    assert (facts["small"].unusable, facts["small"].devices) == ("", ())
    assert facts["small"].weights_bytes < facts["plain"].weights_bytes
    source = registry.source("small")
    assert source is not None
    assert source.quantize == "fp8 by block"
    assert "fp8 by block matrices" in registry.describe("small")


async def test_what_drafts_tokens(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    make_encoder(tmp_path / "encoder")
    make_checkpoint(tmp_path / "gated", **CASES["qwen3-next"])

    async def scanned(**settings: Any) -> tuple[dict[str, events.ModelFacts], dict[str, str]]:
        one = ModelConfig(**settings)
        config = NodeConfig(models_dir=str(tmp_path), models=dict.fromkeys(("a", "encoder", "gated"), one), chunk_bytes=2 * MIB)
        registry = Registry(config, [DeviceBudget("cpu:0", 64 * MIB)], NodeState(str(tmp_path / "s")))
        facts = registered(await registry.rescan())
        return facts, {name: one.entry.speculator for name, one in registry.models.items() if one.entry is not None}

    assert (await scanned())[1] == {"a": "prompt-lookup", "encoder": "none", "gated": "none"}
    assert (await scanned(speculator="none"))[1] == {"a": "none", "encoder": "none", "gated": "none"}
    facts, chosen = await scanned(speculator="prompt-lookup")
    assert chosen == {"a": "prompt-lookup"}
    assert facts["encoder"].unusable == 'models."encoder".speculator: prompt-lookup: encoders generate no text; leave it out'
    assert "the states of its layers cannot go back" in facts["gated"].unusable


async def test_a_head_drafts_for_the_model_that_names_it_or_beside_which_it_lies(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny", **CASES["llama"])
    make_head(tmp_path / "other", "specforge", model)

    async def scanned(budget_mib: int = 64, **settings: Any) -> tuple[events.ModelFacts, Registry]:
        config = NodeConfig(models_dir=str(tmp_path), models={"tiny": ModelConfig(**settings)}, chunk_bytes=64 << 10)
        registry = Registry(config, [DeviceBudget("cpu:0", budget_mib * MIB)], NodeState(str(tmp_path / "s")))
        facts = registered(await registry.rescan())
        is_used = settings.get("speculator") == "other"
        assert facts["other"].drafts
        assert facts["other"].unusable.startswith("it drafts tokens for tiny" if is_used else "it drafts tokens for other models")
        assert await registry.rescan() == []
        return facts["tiny"], registry

    plain, registry = await scanned()
    entry = registry.resolve("tiny")
    assert (entry.speculator, entry.head) == ("prompt-lookup", ""), "nothing says that it was made for this model"
    with_head, registry = await scanned(speculator="other")
    entry = registry.resolve("tiny")
    assert (entry.speculator, entry.head, entry.head_path) == ("eagle3", "other", str(tmp_path / "other"))
    assert with_head.weights_bytes > plain.weights_bytes + 50_000
    assert with_head.kv_bytes_per_token == plain.kv_bytes_per_token + 2 * 2 * 12 * 4
    assert entry.fingerprint == with_head.fingerprint != plain.fingerprint
    assert ", drafts by other, max_model_len" in registry.describe("tiny")
    make_head(tmp_path / "tiny" / "draft", "speculators", model)
    inside, registry = await scanned()
    assert registry.resolve("tiny").head == "tiny/draft"
    assert (await scanned(speculator="none"))[0].weights_bytes == plain.weights_bytes
    absent, _ = await scanned(speculator="nobody")
    assert absent.unusable.endswith("name of an EAGLE-3 head in the models folder (there are other, tiny/draft); leave it out")
    tight = (inside.weights_bytes + inside.work_space_bytes) / MIB
    small, registry = await scanned(budget_mib=int(tight), max_model_len=64)
    assert (registry.resolve("tiny").speculator, small.weights_bytes) == ("prompt-lookup", plain.weights_bytes), "it does not fit"


async def test_a_head_that_does_not_fit_its_model_is_told_by_key_or_tensor(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "tiny", **CASES["llama"])
    make_head(tmp_path / "head", "3.1", model)
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    node = NodeConfig(models_dir=str(tmp_path), models={"tiny": ModelConfig(speculator="head")}, chunk_bytes=64 << 10)

    async def told(**changes: Any) -> str:
        (tmp_path / "head" / "config.json").write_text(json.dumps(config | changes))
        registry = Registry(node, [DeviceBudget("cpu:0", 64 * MIB)], NodeState(str(tmp_path / "s")))
        facts = registered(await registry.rescan())
        return facts["tiny"].unusable

    assert await told() == ""
    reads = {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}
    for changes, words in (
        ({"vocab_size": 200}, "key vocab_size: 200 is not the model's 211"),
        ({"target_hidden_size": 64}, "key target_hidden_size: 64 is not the model's 48"),
        ({"eagle_config": reads}, "[1, 2, 8] reaches beyond the model's 3 layers"),
        ({"eagle_config": {}}, "a model of 3 layers has no default"),
        ({"fc_norm": False}, "head/model.safetensors: tensor fc_norm.0.weight: a head with"),
        ({"intermediate_size": 60}, "tensor midlayer.mlp.down_proj.weight: has shape [48, 56], config.json asks for [48, 60]"),
        ({"num_hidden_layers": 2}, "head: config.json: key num_hidden_layers: 2 is not supported"),
    ):
        found = await told(**changes)
        assert found.startswith('models."tiny".speculator: head: '), changes
        assert words in found, changes


async def test_a_named_head_that_cannot_be_read_is_told_by_its_fault(tmp_path: Path) -> None:
    """Tells what is wrong with the head's files, not that there is none, and uses the head once its files are whole."""
    model = make_checkpoint(tmp_path / "tiny", **CASES["llama"])
    make_head(tmp_path / "head", "3.1", model)
    weights = tmp_path / "head" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    node = NodeConfig(models_dir=str(tmp_path), models={"tiny": ModelConfig(speculator="head")}, chunk_bytes=64 << 10)
    registry = Registry(node, [DeviceBudget("cpu:0", 64 * MIB)], NodeState(str(tmp_path / "s")))
    said = registered(await registry.rescan())["tiny"].unusable
    assert re.match(r'models."tiny".speculator: head: model.safetensors: tensor \S+: cut off: the file has', said), said
    assert "(yet): model.safetensors: tensor " in "".join(models_check.check(node, "node.toml"))
    weights.write_bytes(whole)
    await registry.rescan()
    assert registry.resolve("tiny").head == "head"
    assert models_check.check(node, "node.toml") == []


async def test_fp8_kv_is_counted_asked_for_and_kept_from_cpu_devices(tmp_path: Path) -> None:
    make_model(tmp_path / "a")
    make_encoder(tmp_path / "encoder")
    gpu, cpu = DeviceBudget("cuda:0", 64 * MIB, "GPU-a"), DeviceBudget("cpu:0", 64 * MIB)

    async def scanned(there: list[DeviceBudget], **settings: Any) -> tuple[events.ModelFacts, events.ModelFacts, Registry]:
        one = ModelConfig(**settings)
        config = NodeConfig(models_dir=str(tmp_path), models={"a": one, "encoder": one}, chunk_bytes=2 * MIB)
        registry = Registry(config, there, NodeState(str(tmp_path / "s")))
        facts = registered(await registry.rescan())
        return facts["a"], facts["encoder"], registry

    plain, _, _ = await scanned([gpu, cpu])
    halved, encoder, registry = await scanned([gpu, cpu], kv_cache_dtype="fp8")
    assert plain.devices == ()
    assert halved.devices == ("cuda:0",)
    head_dim = 8
    assert halved.kv_bytes_per_token * 4 * head_dim == plain.kv_bytes_per_token * (head_dim + 1)  # float32
    source = registry.source("a")
    assert source is not None
    assert source.kv_cache_dtype == "fp8"
    assert "float32, fp8 KV, max_model_len" in registry.describe("a")
    assert encoder.unusable == 'models."encoder".kv_cache_dtype: encoders keep no KV; leave it out'
    for devices, named in (([cpu], []), ([gpu, cpu], ["cpu:0"])):
        refused, _, _ = await scanned(devices, kv_cache_dtype="fp8", devices=named)
        wanted = 'models."a".kv_cache_dtype: fp8 is built for cuda devices only, and this model may live on cpu:0'
        assert refused.unusable == wanted


@pytest.mark.parametrize("device", ["cpu:0", "cuda:0"])
async def test_experts_are_rounded_to_int8_if_each_has_tensors_of_its_own(tmp_path: Path, device: str) -> None:
    write_checkpoint(tmp_path / "a", MIXTRAL)
    write_checkpoint(tmp_path / "b", STACKED)

    async def facts(quantize: str, **more: str) -> dict[str, events.ModelFacts]:
        settings = {name: ModelConfig(quantize=quantize, **more) for name in ("a", "b")}  # type: ignore[arg-type]
        config = NodeConfig(models_dir=str(tmp_path), models=settings, chunk_bytes=2 * MIB)
        registry = Registry(config, [DeviceBudget(device, 256 * MIB)], NodeState(str(tmp_path / "s")))
        return registered(await registry.rescan())

    plain, rounded = await facts("none"), await facts("int8")
    assert {one.unusable for one in plain.values()} == {""}
    assert rounded["a"].unusable == ""
    assert rounded["a"].weights_bytes < plain["a"].weights_bytes
    why = "int8 is not built for experts that the checkpoint holds in one tensor; leave it out"
    assert rounded["b"].unusable == f'models."b".quantize: {why}'
    packed = await facts("none", dtype="bfloat16", resident="packed")
    wanted = "packed is not built for mixtures of experts; leave it out" if device == "cpu:0" else "packed is not built for cuda:0;"
    assert wanted in packed["a"].unusable


async def test_a_gpus_work_space_does_not_grow_with_the_context(tmp_path: Path) -> None:
    """Attention reads keys and values where they are there; on the cpu device a row's context is gathered."""
    make_model(tmp_path / "a", max_position_embeddings=1 << 17)
    config = NodeConfig(models_dir=str(tmp_path), chunk_bytes=2 * MIB)

    def work_space(devices: list[DeviceBudget], length: int) -> int:
        named = msgspec.structs.replace(config, models={"a": ModelConfig(max_model_len=length)})
        return Registry(named, devices, NodeState("")).register(named, scan_one(tmp_path / "a")).facts.work_space_bytes

    gpu, cpu = DeviceBudget("cuda:0", 4096 * MIB, "GPU-a"), DeviceBudget("cpu:0", 4096 * MIB)
    assert work_space([gpu], 1 << 17) == work_space([gpu], 1 << 11)
    assert work_space([cpu], 1 << 17) > work_space([cpu], 1 << 11)
    either = [work_space([one], 1 << 17) for one in (gpu, cpu)]
    assert work_space([gpu, cpu], 1 << 17) == max(either)


async def test_an_encoder_lives_on_cpu_devices_only(tmp_path: Path) -> None:
    make_encoder(tmp_path / "enc")
    config = NodeConfig(models_dir=str(tmp_path), chunk_bytes=2 * MIB)
    gpu, cpu = DeviceBudget("cuda:0", 4096 * MIB, "GPU-a"), DeviceBudget("cpu:0", 256 * MIB)
    (facts,) = registered(await Registry(config, [gpu, cpu], NodeState("")).rescan()).values()
    assert (facts.devices, facts.unusable) == (("cpu:0",), "")
    alone = Registry(config, [gpu], NodeState(""))
    (facts,) = registered(await alone.rescan()).values()
    assert "encoders are not built for cuda devices" in facts.unusable
    with pytest.raises(HearthError, match="give the node a cpu device") as caught:
        alone.resolve("enc")
    assert caught.value.code == "model_unusable", "waiting would not help"


async def test_a_models_own_predictor(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It is loaded where it is asked for or comes first, is whole, and there is memory for it; the model is served in any case."""
    caplog.set_level(logging.INFO)
    config = config_of("glm4-moe")
    tensors = tensors_of(config)
    write_predicting(tmp_path / "whole", config, tensors)
    write_predicting(tmp_path / "named", config, tensors)
    write_predicting(tmp_path / "off", config, tensors)
    write_predicting(tmp_path / "damaged", config, {name: tensors[name] for name in tensors if "layers.2.hnorm" not in name})
    write_predicting(tmp_path / "damaged-named", config, {name: tensors[name] for name in tensors if "layers.2.hnorm" not in name})
    asked = {"named": "mtp", "off": "none", "damaged-named": "mtp"}
    models = {name: ModelConfig(speculator=speculator) for name, speculator in asked.items()}
    registry = make_registry(tmp_path, **models)
    facts = registered(await registry.rescan())
    assert [registry.resolve(name).speculator for name in ("whole", "named", "off", "damaged")] == [
        *("mtp", "mtp", "none", "prompt-lookup")
    ]
    more = facts["whole"].weights_bytes - facts["off"].weights_bytes
    assert more == facts["named"].weights_bytes - facts["damaged"].weights_bytes > 30_000
    assert facts["whole"].kv_bytes_per_token * 2 == facts["off"].kv_bytes_per_token * 3
    assert facts["whole"].work_space_bytes > facts["off"].work_space_bytes
    assert registry.layout_id("whole") == registry.layout_id("named") != registry.layout_id("off") == registry.layout_id("damaged")
    with pytest.raises(HearthError, match=r'models."damaged-named".speculator: mtp: .*layers.2.hnorm.weight.*; leave it out'):
        registry.resolve("damaged-named")
    assert "damaged: drafts by prompt lookup and not by a predictor: model.safetensors" in caplog.text
    small = make_registry(tmp_path, _budget_of(facts["off"]), 64 << 10, **models)
    await small.rescan()
    assert [small.resolve(name).speculator for name in ("whole", "off")] == ["prompt-lookup", "none"]
    assert "whole: drafts by prompt lookup and not by a predictor: with it the model would not fit its devices" in caplog.text


async def test_why_the_own_predictor_is_used_where_a_head_lies_beside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    config = config_of("glm4-moe")
    write_predicting(tmp_path / "a", config, tensors_of(config))
    make_head(tmp_path / "a" / "draft", "specforge", make_checkpoint(tmp_path / "tiny", **CASES["llama"]))
    described = json.loads((tmp_path / "a" / "draft" / "config.json").read_text())
    (tmp_path / "a" / "draft" / "config.json").write_text(json.dumps(described | {"vocab_size": 200}))
    registry = make_registry(tmp_path)
    await registry.rescan()
    assert registry.resolve("a").speculator == "mtp"
    told = [record.message for record in caplog.records if record.message.startswith("a: drafts by")]
    assert len(told) == 1
    assert told[0].startswith("a: drafts by its own predictor and not by an EAGLE-3 head: ")
    assert "key vocab_size: 200 is not the model's" in told[0]


def _budget_of(facts: events.ModelFacts) -> int:
    size = size_of(facts, 64 << 10)
    return (size.chunks + size.work_space_chunks) * (64 << 10)
