"""`hearth simulate` and `hearth trace` as they are called."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from daemon.cli.main import run

ROOT = Path(__file__).resolve().parents[3]
EIGHT, EIGHT_SPLIT = (str(ROOT / "docs" / "simulate" / f"{name}.toml") for name in ("eight", "eight-split"))


def made(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert run(["trace", "--duration", "60", *more]) == 0
    path = tmp_path / "t.csv"
    path.write_text(capsys.readouterr().out)
    return str(path)


def test_a_trace_is_made_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, capsys, "--num-models", "4", "--seed", "3")
    assert run(["simulate", path, "--device", "cuda:0=40GiB", "--weights", "16GB", "--per-model"]) == 0
    out = capsys.readouterr().out
    for policy in ("hearthd", "lru", "ollama", "clairvoyant", "all-resident"):
        assert f"\n{policy} " in out
    assert "times faster than real time" in out
    assert "\nmodel-4 " in out


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, capsys)
    command = ["simulate", path, "--device", "cpu=1GiB", "--weights", "200MB", "--policy", "lru", "--policy", "hearthd", "--json"]
    assert run(command) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["devices"] == {"cpu:0": 1 << 30}
    assert [one["policy"] for one in value["policies"]] == ["lru", "hearthd"]
    for one in value["policies"]:
        assert one["num_refused"] == 0
        assert 0 < one["miss_rate"] < 1
        assert one["p50_wait_s"] <= one["p99_wait_s"]
        assert sum(model["num_requests"] for model in one["models"].values()) == value["num_requests"]
        assert one["swaps"]["disk_bytes"] == 200_000_000 * one["swaps"]["num_disk_loads"]


def test_scenario_with_flags_over_it(capsys: pytest.CaptureFixture[str]) -> None:
    base = ["simulate", "--generate", "--costs", EIGHT, "--policy", "hearthd", "--json"]

    def wait_s(*flags: str) -> float:
        assert run([*base, *flags]) == 0
        return float(json.loads(capsys.readouterr().out)["policies"][0]["mean_wait_s"])

    usual = wait_s()
    assert wait_s("--device", "cpu=8GiB") < usual
    assert wait_s("--disk", "25MB") > usual
    assert wait_s("--seed", "2") != usual


@pytest.mark.parametrize(
    ("devices", "is_split"), [(("cpu:0", "cpu:1"), True), (("cuda:0", "cuda:1"), True), (("cpu:0", "cuda:0"), False)]
)
def test_models_that_are_split_over_devices_of_one_kind(
    devices: tuple[str, ...], is_split: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [word for name in devices for word in ("--device", f"{name}=640MiB")]
    assert run(["simulate", "--generate", "--costs", EIGHT_SPLIT, "--policy", "hearthd", "--json", *flags]) == 0
    (policy,) = json.loads(capsys.readouterr().out)["policies"]
    whole, split = ([policy["models"][f"mid-{number}"] for number in numbers] for numbers in ((1, 3, 4, 6, 7, 8), (2, 5)))
    assert all(model["slo_attainment"] > 0.9 for model in whole)
    assert {model["slo_attainment"] > 0.9 for model in split} == {is_split}
    assert (policy["num_refused"] == 0) == is_split


REPLICATED = """\
[devices]
"cpu:0" = "130MiB"
"cpu:1" = "130MiB"
[models.m]
weights_bytes = "100MiB"
max_sequences = 16
disk_load_s = 1.0
prefill_tokens_per_s = 10000.0
decode_step_s = 0.01
decode_s_per_sequence = 0.01
"""


@pytest.mark.parametrize("replicas", ["2", '"auto"'])
def test_replicas_share_what_one_device_would_make_wait(replicas: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Forty requests come at once, again and again, of which a device runs 16: once a second replica is loaded, they end sooner."""
    rows = [f"{at},m,10,20" for at in (0, 20, 40) for _ in range(40)]
    requests = tmp_path / "t.csv"
    requests.write_text("time_s,model,input_tokens,output_tokens\n" + "".join(f"{row}\n" for row in rows))

    def policy(more: str) -> dict[str, Any]:
        costs = tmp_path / "costs.toml"
        costs.write_text(REPLICATED + more)
        assert run(["simulate", str(requests), "--costs", str(costs), "--policy", "hearthd", "--json"]) == 0
        (found,) = json.loads(capsys.readouterr().out)["policies"]
        assert (found["num_refused"], found["num_requests"], list(found["models"])) == (0, len(rows), ["m"])
        return dict(found)

    one, several = policy(""), policy(f"replicas = {replicas}\n")
    assert (one["swaps"]["num_disk_loads"], several["swaps"]["num_disk_loads"]) == (1, 2)
    assert several["mean_wait_s"] < 0.75 * one["mean_wait_s"]


def test_trace_from_a_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["trace", EIGHT, "--rate", "1", "--output-tokens", "7", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == pytest.approx(1200, abs=5)
    assert {row[3] for row in rows} == {7}
    assert {row[1] for row in rows} == {f"mid-{index}" for index in range(1, 9)}


def test_refused_requests_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--generate", "--costs", EIGHT, "--max-wait", "0.5", "--policy", "hearthd", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["policies"]
    assert found["num_refused"] > 0
    assert found["mean_wait_s"] is None


@pytest.mark.parametrize(
    ("args", "exit_code", "message"),
    [
        (["simulate"], 2, "which trace?"),
        (["simulate", "nowhere.csv", "--device", "cpu=1GiB"], 3, "nowhere.csv: cannot be read: No such file or directory"),
        (["simulate", "--generate"], 2, "--generate needs a --costs file"),
        (["simulate", "x", "--generate", "--costs", EIGHT], 2, "give TRACE or --generate, not both"),
        (["simulate", "--generate", "--costs", EIGHT, "--device", "cpu"], 2, "--device: 'cpu' must be NAME=BUDGET"),
        (["simulate", "--generate", "--costs", EIGHT, "--policy", "x"], 2, "--policy: there is no 'x'; known: hearthd, lru"),
        (["simulate", "--generate", "--costs", EIGHT, "--disk", "x"], 2, "--disk: 'x' must be a number of bytes"),
        (["simulate", "--generate", "--costs", EIGHT, "--step", "0"], 2, "--step: 0 must be above 0"),
        (["simulate", "--generate", "--costs", EIGHT, "--models", "/nowhere"], 3, "--models: /nowhere: cannot be read"),
        (["trace", "--rate", "0"], 2, "--rate: 0 must be above 0"),
        (["trace", "--num-models", "0"], 2, "--num-models: 0 must be from 1"),
        (["trace", "--active-share", "2"], 2, "--active-share: 2 must be at most 1"),
        (["trace", "--input-tokens", "9-3"], 2, "--input-tokens: '9-3' must be A-B"),
    ],
)
def test_usage(args: list[str], exit_code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(args) == exit_code
    assert capsys.readouterr().err.startswith(f"hearth: {message}")


def test_a_model_without_a_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = made(tmp_path, capsys, "--num-models", "2")
    assert run(["simulate", path, "--device", "cpu=1GiB"]) == 2
    assert "nothing says how large model-" in capsys.readouterr().err


def test_sizes_from_a_models_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    folder = ROOT / "demo" / "models"
    names = sorted(each.name for each in folder.iterdir() if (each / "config.json").exists())
    path.write_text("time_s,model,input_tokens,output_tokens\n" + "".join(f"{at},{name},5,5\n" for at, name in enumerate(names)))
    assert run(["simulate", str(path), "--device", "cpu=64MiB", "--models", str(folder), "--policy", "hearthd", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["policies"]
    assert len(found["models"]) == len(names) == 3
    assert found["num_refused"] == 0
