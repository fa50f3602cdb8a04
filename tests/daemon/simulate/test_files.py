"""Traces and scenarios: what is read, and what each mistake is told."""

from __future__ import annotations

import io
import json
from pathlib import Path

import msgspec
import pytest

from config.load import CUDA_DEFAULTS, ConfigError
from config.schema import NodeConfig
from daemon.simulate import scenario, trace_file
from daemon.simulate.generate import generate
from daemon.simulate.trace_shape import TraceShape
from scheduler.simulate.steps import StepSettings
from scheduler.simulate.trace import TraceRequest

ROOT = Path(__file__).resolve().parents[3]
HEADER = "time_s,model,input_tokens,output_tokens\n"


def read(text: str) -> list[TraceRequest]:
    return trace_file.read(io.StringIO(text), "t.csv")


def test_a_trace_comes_back_as_it_was_written() -> None:
    made = generate(TraceShape(("a", "org/b,c"), 5.0, 20.0))
    file = io.StringIO()
    trace_file.write(file, made, ["a comment"])
    assert read(file.getvalue()) == made


def test_columns_may_stand_in_any_order() -> None:
    assert read("model,output_tokens,time_s,input_tokens\na,2,0.5,1\n\n# more\n") == [TraceRequest(0.5, "a", 1, 2)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.csv: holds no request"),
        (HEADER, "t.csv: holds no request"),
        (
            "time,model\n",
            "t.csv:1: the first line must name the columns time_s,model,input_tokens,output_tokens; it is 'time,model'",
        ),
        (HEADER + "0,a,1\n", "t.csv:2: 3 columns, expected 4"),
        (HEADER + "x,a,1,1\n", "t.csv:2: time_s: 'x' must be seconds from 0 on"),
        (HEADER + "nan,a,1,1\n", "t.csv:2: time_s: 'nan'"),
        (HEADER + "-1,a,1,1\n", "t.csv:2: time_s: '-1'"),
        (HEADER + "2,a,1,1\n1,a,1,1\n", "t.csv:3: time_s: 1 comes after 2"),
        (HEADER + "0,,1,1\n", "t.csv:2: model: is empty"),
        (HEADER + "0,a,0,1\n", "t.csv:2: input_tokens: '0' must be a whole number of tokens from 1 on"),
        (HEADER + "0,a,1,1.5\n", "t.csv:2: output_tokens: '1.5'"),
        (HEADER + '0,"a,1,1\n', "t.csv:2: 2 columns"),
    ],
)
def test_bad_traces(text: str, message: str) -> None:
    with pytest.raises(trace_file.TraceError) as caught:
        read(text)
    assert str(caught.value).startswith(message)


def test_the_same_seed_makes_the_same_trace() -> None:
    shape = TraceShape(("a", "b", "c"), 2.0, 600.0)
    made = generate(shape)
    assert made == generate(shape)
    assert made != generate(TraceShape(("a", "b", "c"), 2.0, 600.0, seed=2))
    assert made == sorted(made, key=lambda one: one.time_s)
    assert sorted(sum(one.model == name for one in made) for name in "abc") == [218, 327, 655]  # as 1/3 : 1/2 : 1
    assert all(0 <= one.time_s <= 600 and 16 <= one.input_tokens <= 128 and 16 <= one.output_tokens <= 128 for one in made)


def test_bursts_are_bursts() -> None:
    """The busiest fifth of the time holds most of a bursty model's requests, and not of an even one's."""

    def busiest(arrivals: str) -> float:
        made = generate(TraceShape(("a",), 2.0, 20_000.0, arrivals=arrivals, burst_s=50.0))
        bins = [0] * 2000
        for one in made:
            bins[min(1999, int(one.time_s / 10))] += 1
        return sum(sorted(bins, reverse=True)[:400]) / sum(bins)

    assert busiest("bursty") > 0.6
    assert busiest("poisson") < 0.4


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "simulate").glob("*.toml")), ids=lambda path: path.name)
def test_shipped_scenarios(path: Path) -> None:
    found = scenario.read(str(path))
    assert found.trace is not None
    assert len(generate(found.trace)) > 1000
    assert found.devices
    assert set(found.costs.models) == set(found.models) == set(found.trace.models)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", ":1: x: unknown key; known keys: devices, chunk_bytes, host_tier_bytes, costs, models, trace"),
        ("host_tier_bytes = 'much'", ":1: host_tier_bytes: 'much' must be a number of bytes"),
        ("[costs", ": is not valid TOML"),
        ("[costs]\ndisk = 1.0", ":2: costs.disk: unknown key"),
        ("[costs]\ndisk_bytes_per_s = 0.0", ":2: costs.disk_bytes_per_s: 0.0 must be above 0"),
        ("[costs]\nload_overhead_s = -1.0", ":2: costs.load_overhead_s: -1.0 must be 0 or more"),
        ("[costs]\nevict_s = 'x'", ":2: costs.evict_s: 'x' must be a number"),
        ("[models.a]\nmax_model_len = 1", ':1: models."a": needs weights_bytes'),
        ("[models.a]\nweights_bytes = '1 lb'", ":2: models.\"a\".weights_bytes: '1 lb' must be a number of bytes"),
        ("[models.a]\nweights_bytes = 1\nkeep_alive = 'x'", ":3: models.\"a\".keep_alive: 'x' must be a number of seconds"),
        ("[models.a]\nweights_bytes = 1\nnum_ranks = 0", ':3: models."a".num_ranks: 0 must be 1 or more'),
        (
            "[models.a]\nweights_bytes = 1\nnum_ranks = 3\nnum_stages = 2",
            ':4: models."a".num_stages: 2 must divide num_ranks, 3',
        ),
        ("[models]\na = 1", ':2: models."a": must be a table'),
        ("[devices]\ntpu = '1GiB'", ':2: devices."tpu": is no device'),
        ("[devices]\ncpu = 0", ':2: devices."cpu": 0 must be more than 0 bytes'),
        ("[trace]\nseed = 1", ":1: trace: needs models to ask for"),
        ("[models.a]\nweights_bytes = 1\n[trace]\narrivals = 'x'", ":4: trace.arrivals: 'x' must be one of bursty, poisson"),
        ("[models.a]\nweights_bytes = 1\n[trace]\ninput_tokens = [5, 2]", ":4: trace.input_tokens: must be [least, most]"),
        (
            "[models.a]\nweights_bytes = 1\n[trace]\ninput_tokens = [0.5]",
            ":4: trace.input_tokens: [0.5] must be a list of whole numbers",
        ),
        ("[models.a]\nweights_bytes = 1\n[trace]\nduration_s = 0.0", ":4: trace.duration_s: 0.0 must be above 0"),
    ],
)
def test_bad_scenarios(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "s.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        scenario.read(str(path))
    assert str(caught.value).startswith(str(path) + message)


def test_json_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "s.json"
    model = {"weights_bytes": "1GiB", "disk_load_s": 2.5, "num_ranks": 2, "num_stages": 2, "kv_floor_tokens": 8192}
    path.write_text(json.dumps({"models": {"a": model}, "devices": {"cuda:0": "80GiB", "cuda:0@b": "70GiB"}}))
    found = scenario.read(str(path))
    assert found.devices == {"cuda:0": 80 << 30, "cuda:0@b": 70 << 30}
    assert found.costs.disk_load_s(found.models["a"]) == 2.5
    assert (found.models["a"].num_ranks, found.models["a"].num_stages, found.models["a"].kv_floor_tokens) == (2, 2, 8192)
    for text, message in (("{", ":1: is not valid JSON"), ("[]", ": must be an object")):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            scenario.read(str(path))
        assert str(caught.value).startswith(str(path) + message)


def test_engines_have_the_configurations_settings(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[costs]\nmax_step_stretch = 0.0\n")
    for given, stretch in ((scenario.EMPTY, NodeConfig().max_step_stretch), (scenario.read(str(path)), 0.0)):
        for devices, changed in ((["cpu:0"], {}), (["cpu:0", "cuda:1"], CUDA_DEFAULTS)):
            config = msgspec.structs.replace(NodeConfig(), **changed)
            wanted = StepSettings(config.turn_budget_ms / 1e3, stretch, config.max_num_batched_tokens)
            assert scenario.step_settings(given.node_config(devices)) == wanted
            assert given.node_config(devices).chunk_bytes == config.chunk_bytes
