"""Pipelines whose first stages are on another host, which a lender in this process stands for."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.loop.pulse import Doing, Pulse, read_pulse
from engine.protocol import Configure, EngineFault, EngineReady, Evicted, LoadFailed
from loader.models.catalog import scan_one
from loader.sizes.work_space import handed_bytes
from tests.e2e.checkpoints import END_ID, make_model
from tests.engine.engine_process import EngineProcess, Node
from tests.engine.group_engines import Engines
from tests.engine.other_host import KEY, OtherHost
from tests.engine.said import Said
from tests.kernel_cache import CACHE_DIR

LIMITS = {"max_model_len": 256, "max_sequences": 8, "eos_token_ids": [END_ID], "weights_chunks": 16, "kv_reserved_chunks": 16}
CONFIGURE = Configure("cpu:0", 96, 64 << 10, 1 << 20, 64, 16, 10.0, 1, cache_dir=CACHE_DIR)
NULL = msgspec.structs.replace(CONFIGURE, runner="null", null_step_ms=1.0)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The models folder of the daemon's host: two models, of which the second has two KV groups."""
    folder = tmp_path_factory.mktemp("remote") / "models"
    make_model(folder / "a", seed=1, hidden_size=64, num_layers=3)
    windows = {"architecture": "Gemma2ForCausalLM", "model_type": "gemma2", "sliding_window": 24, "query_pre_attn_scalar": 16}
    others: dict[str, Any] = {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True, **windows}
    make_model(folder / "b", seed=2, hidden_size=64, num_layers=4, **others)
    return folder


@pytest.fixture(scope="module")
def other_models(models: Path) -> Path:
    """A copy of the models folder, written at another time."""
    copy = models.parent / "other" / "models"
    for folder in models.iterdir():
        (copy / folder.name).mkdir(parents=True)
        for file in folder.iterdir():
            (copy / folder.name / file.name).write_bytes(file.read_bytes())
    return copy


@pytest.fixture(scope="module")
def four(models: Path, other_models: Path) -> Iterator[Engines]:
    """Two engines of this host, and two of the other one."""
    host = OtherHost(other_models)
    lent = {number: host.arguments(models, device) for number, device in ((2, "cpu:0"), (3, "cpu:1"))}
    engines = Engines(4, CONFIGURE, lent=lent, **LIMITS)
    yield engines
    engines.close()
    host.close()


@pytest.fixture(scope="module")
def alone(four: Engines, models: Path) -> dict[str, Said]:
    """What the models say when they are whole, on one device."""
    said = {}
    for name in ("a", "b"):
        path = str(models / name)
        four.load_alone(path, name, 0, fingerprint=scan_one(path).fingerprint, speculator="prompt-lookup")
        said[name] = Said(four, 0, name)
        four.evict_alone(name, 0)
    return said


@pytest.fixture
def two(models: Path, other_models: Path) -> Iterator[tuple[Engines, OtherHost]]:
    """An engine of this host, and one of the other one, which a test may end. They compute nothing."""
    host = OtherHost(other_models)
    engines = Engines(2, NULL, lent={1: host.arguments(models)}, **LIMITS)
    yield engines, host
    engines.close()
    host.close()


def how(models: Path, name: str, num_stages: int) -> dict[str, Any]:
    checkpoint = scan_one(models / name)
    assert checkpoint.shape is not None
    return {
        "fingerprint": checkpoint.fingerprint,
        "files_id": checkpoint.files_id,
        "speculator": "prompt-lookup",
        "num_stages": num_stages,
        "num_kv_groups": 2 if name == "b" else 1,
        "handed_bytes": handed_bytes(checkpoint.shape, "float32", 64),
    }


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("members", [[0, 2], [0, 2, 3], [1, 3, 2]])
def test_it_says_what_a_whole_model_says(
    four: Engines, alone: dict[str, Said], models: Path, name: str, members: list[int]
) -> None:
    four.load(str(models / name), name, members, **how(models, name, len(members)))
    Said(four, members[0], name).check(alone[name])
    Said(four, members[0], name).check(alone[name])  # from cached prefixes and recorded steps
    four.evict(name)


def test_a_stage_there_may_be_divided_among_devices(four: Engines, alone: dict[str, Said], models: Path) -> None:
    """Both devices of the first stage are on the other host, where they exchange parts through memory of that host."""
    for members in ([0, 1, 2, 3], [1, 0, 3, 2]):
        four.load(str(models / "a"), "a", members, **how(models, "a", 2))
        Said(four, members[0], "a").check(alone["a"])
        four.evict("a")


def test_models_beside_each_other(four: Engines, alone: dict[str, Said], models: Path) -> None:
    """Two pipelines over overlapping devices, and two models of single devices of this host."""
    for number, (name, members) in enumerate((("a", [0, 2]), ("b", [1, 2, 3]))):
        path = str(models / name)
        four.load_alone(path, f"own {name}", number, fingerprint=scan_one(path).fingerprint, speculator="prompt-lookup")
        four.load(path, name, members, **how(models, name, len(members)))
    asked = [(number, model, four.ask(number, model, 60, temperature=0.0)) for _ in range(4) for number, model in _ASKED]
    told: dict[str, list[list[int]]] = {}
    for number, model, request_id in asked:
        four.all[number].wait_finished(request_id)
        told.setdefault(model[-1], []).append(four.all[number].output()[request_id])
    for outputs in told.values():
        assert all(output == outputs[0] for output in outputs)
    for number, model in _ASKED:
        four.evict(model) if len(model) == 1 else four.evict_alone(model, number)


_ASKED = ((0, "a"), (0, "own a"), (1, "b"), (1, "own b"))


def test_a_killed_engine_there(two: tuple[Engines, OtherHost], models: Path) -> None:
    engines, host = two
    leader = engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))
    stream = engines.ask(0, "a", 200, temperature=0.0, ignore_eos=True)
    engines.wait_tokens(0, stream, 20)
    proxy, pid = engines.all[1], engines.all[1].of(EngineReady)[0].pid
    os.kill(pid, signal.SIGKILL)
    fault = proxy.wait_for(EngineFault)
    assert fault.error == "the engine on host b was ended by SIGKILL"
    assert proxy.process.wait(10) == 70
    assert set(proxy.running()) <= {stream}
    engines.node.exchange.break_group(engines.groups["a"][1][0])  # as the daemon does
    engines.evict("a", [0])
    assert stream not in leader.finished()
    engines.replace(1)
    engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))
    again = engines.ask(0, "a", 8)
    leader.wait_finished(again)
    assert any("the engine was ended by SIGKILL" in line for line in host.lines)


def test_the_daemon_sees_the_life_of_an_engine_there(two: tuple[Engines, OtherHost], models: Path) -> None:
    """The proxy writes the engine's signs of life where the daemon looks for them, with times of this host."""
    engines, _ = two
    proxy = engines.all[1]

    def beat_after(at_s: float) -> Pulse:
        for _ in range(200):
            if (pulse := read_pulse(proxy.journal)).at_s > at_s:
                return pulse
            time.sleep(0.05)
        raise AssertionError("no sign of life within 10 s")

    first = beat_after(0.0)
    assert first.doing in (Doing.IDLE, Doing.TURN)
    assert 0.0 < time.monotonic() - first.at_s < 30.0
    engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))
    assert beat_after(first.at_s).at_s <= time.monotonic()


def test_a_host_that_is_gone(two: tuple[Engines, OtherHost], models: Path) -> None:
    engines, host = two
    engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))
    pid = engines.all[1].of(EngineReady)[0].pid
    host.lender.stop(host.listener)
    fault = engines.all[1].wait_for(EngineFault)
    assert fault.error.startswith("the connection to host b has ended: ")
    assert gone(pid)


def test_a_killed_proxy_takes_its_engine_along(two: tuple[Engines, OtherHost], models: Path) -> None:
    engines, _ = two
    engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))
    pid = engines.all[1].of(EngineReady)[0].pid
    engines.all[1].process.kill()
    assert gone(pid)
    engines.evict("a", [0])
    engines.replace(1)
    engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))


def test_an_eviction_ends_a_step_that_waits(two: tuple[Engines, OtherHost], models: Path) -> None:
    engines, _ = two
    engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))
    for _ in range(4):
        stream = engines.ask(0, "a", 200, temperature=0.0, ignore_eos=True)
        engines.wait_tokens(0, stream, 3)
        engines.node.exchange.break_group(engines.groups["a"][1][0])
        engines.evict("a", [1, 0])
        assert engines.all[1].of(Evicted)
        engines.load(str(models / "a"), "a", [0, 1], **how(models, "a", 2))


def test_other_files_there_are_not_served(two: tuple[Engines, OtherHost], models: Path, other_models: Path) -> None:
    engines, _ = two
    make_model(other_models / "changed", seed=1, hidden_size=64, num_layers=4)
    make_model(models / "changed", seed=1, hidden_size=64, num_layers=3)
    engines.begin(str(models / "changed"), "changed", [0, 1], **how(models, "changed", 2))
    assert "holds other files than the daemon's host has under this name" in engines.all[1].wait_for(LoadFailed).error
    engines.evict("changed", [0])
    make_model(models / "only here", seed=1, hidden_size=64, num_layers=3)
    engines.begin(str(models / "only here"), "only here", [0, 1], **how(models, "only here", 2))
    engines.all[1].until(lambda: len(engines.all[1].of(LoadFailed)) == 2)
    assert engines.all[1].of(LoadFailed)[1].error.endswith("only here: No such file or directory")
    engines.evict("only here", [0])


@pytest.mark.parametrize(
    ("device", "key", "budget_bytes", "text"),
    [
        ("cpu:0", "another key, which differs", 96 * (64 << 10), "the keys differ"),
        ("cpu:0", "short", 96 * (64 << 10), "its first line must be a key of 16 characters or more"),
        ("cpu:7", KEY, 96 * (64 << 10), "host b: cpu:7 is not lent here; lent are cpu:0, cpu:1"),
        ("cpu:0", KEY, 1 << 20, "cpu:0 is lent with 0.00 GiB, and the daemon's budget for it is 0.01 GiB"),
    ],
)
def test_what_is_refused(models: Path, other_models: Path, device: str, key: str, budget_bytes: int, text: str) -> None:
    host, node = OtherHost(other_models, budget_bytes), Node(1)
    proxy = EngineProcess(NULL, node=node, module="engine.remote", arguments=host.arguments(models, device, key))
    try:
        assert text in proxy.wait_for(EngineFault).error
        assert proxy.process.wait(10) == 70
    finally:
        proxy.__exit__(None, None, None)
        node.close()
        host.close()


def test_a_device_is_lent_once_at_a_time(two: tuple[Engines, OtherHost], models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, host = two
    monkeypatch.setattr("daemon.lending.lender.FREE_LIMIT_S", 0.1)
    node = Node(1)
    second = EngineProcess(NULL, node=node, module="engine.remote", arguments=host.arguments(models))
    try:
        assert "host b: cpu:0 is in use by 127.0.0.1" in second.wait_for(EngineFault).error
    finally:
        second.__exit__(None, None, None)
        node.close()


def gone(pid: int) -> bool:
    """Waits until a process has ended, 10 s at most, and returns whether it has."""
    for _ in range(200):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
