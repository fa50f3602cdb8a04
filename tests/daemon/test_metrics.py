"""/metrics against docs/reference/metrics.md, in both directions, on a running node; tenants' labels; the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from daemon.access import keys
from daemon.contracts import Generation
from daemon.metrics import families as metric_families
from daemon.metrics import page as metrics_page
from daemon.metrics.counters import Metrics
from daemon.metrics.families import BY_NAME, FAMILIES, NUM_TENANTS
from daemon.metrics.histogram import Histogram
from daemon.metrics.page import ModelNow, Now
from daemon.operate import metrics_now
from engine.protocol import SamplingParams
from tests.daemon.api.fakes import entry
from tests.e2e.chat import Stream
from tests.e2e.checkpoints import make_model
from tests.e2e.node import ROOT, Node

KEY = "sk-test-0123456789abcdefghij"
ROW = re.compile(r"\| `(\S+)` \| (counter|gauge|histogram) \| (\w*) \| ((?:`\w+`(?:, )?)*) \| .+ \|")


def documented() -> dict[str, tuple[str, tuple[str, ...]]]:
    """name -> (kind, labels), as the page says it."""
    text = (ROOT / "docs/reference/metrics.md").read_text()
    return {row[1]: (row[2], tuple(re.findall(r"`(\w+)`", row[4]))) for row in ROW.finditer(text)}


def families(text: str) -> dict[str, Any]:
    """By the name the page uses."""
    return {one.name + ("_total" if one.type == "counter" else ""): one for one in text_string_to_metric_families(text)}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for one in text_string_to_metric_families(text)
        for sample in one.samples
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """/metrics and /m/b/metrics of a node with keys, two devices and two models, after requests of all kinds."""
    folder = tmp_path_factory.mktemp("metrics")
    for name in ("a", "b"):
        make_model(folder / "models" / name)
    (folder / "keys.toml").write_text(f'[tenants.search]\nkeys = ["{keys.hash_key(KEY)}"]\n')
    with Node(folder, devices=["cpu:0=64MiB", "cpu:1=64MiB"], flags=["--keys-file", str(folder / "keys.toml")]) as node:
        with node.openai(key=KEY) as client:
            for model in ("a", "b"):
                client.completions.create(model=model, prompt="x" * 40, max_tokens=8, extra_body={"ignore_eos": True})
            client.completions.create(model="b", prompt="x" * 40, max_tokens=8)
        assert node.get("/metrics")[0] == 401
        assert node.cli("unload", "a").returncode == 0
        assert node.cli("reload").returncode == 0
        header = {"Authorization": f"Bearer {KEY}"}
        return node.get("/metrics", header)[1], node.get("/m/b/metrics", header)[1]


def test_the_page_is_made_from_the_table() -> None:
    page = (ROOT / "docs/reference/metrics.md").read_text()
    assert page == metric_families.reference(), "run: python -m daemon.metrics.families > docs/reference/metrics.md"
    assert list(documented()) == [family.name for family in FAMILIES]


def test_the_output_has_what_the_page_lists_and_nothing_else(pages: tuple[str, str]) -> None:
    told, listed = families(pages[0]), documented()
    assert told.keys() == listed.keys()
    seen = set()
    for name, (kind, labels) in listed.items():
        assert told[name].type == kind, name
        for sample in told[name].samples:
            assert set(sample.labels) - {"le"} == set(labels), sample
            seen.add(name)
    # what takes an accident, a limit or another server has no sample here
    assert listed.keys() - seen == {
        "hearth_accepted_tokens_total",  # the null model's texts do not repeat themselves: tests/e2e/test_drafts.py
        "hearth_adapter_loads_total",  # null models take no adapters: tests/e2e/test_adapters.py
        "hearth_adapter_load_seconds_total",
        "hearth_drafted_tokens_total",
        "hearth_engine_restarts_total",
        "hearth_engine_stalls_total",
        "hearth_expert_imbalance",  # null models have no experts: tests/e2e/test_experts.py
        "hearth_expert_tokens_total",
        "hearth_gpu_faults_total",
        "hearth_tenant_limit_refused_total",
        "hearth_text_worker_deaths_total",
        "hearth_tls_certificate_expiry_time_seconds",  # there is no certificate here; tests/e2e/test_tls.py has one
        "hearth_upstream_up",
    }


def test_names_and_units() -> None:
    for name, kind, unit, _, meaning in FAMILIES:
        assert meaning, name
        assert name.endswith("_total") == (kind == "counter"), name
        if name.startswith("hearth_") and unit in ("seconds", "bytes"):
            assert re.search(rf"_{unit}(_total|_max)?$", name), f"{name} is in {unit}"


def test_what_a_request_counts(pages: tuple[str, str]) -> None:
    told = samples(pages[0])
    one, two = (("model", "a"),), (("model", "b"),)
    assert told["hearth_requests_total", (("model", "a"), ("outcome", "length"))] == 1
    assert told["hearth_generated_tokens_total", one] == 8
    assert told["hearth_cached_tokens_total", two] == 32
    for name in ("queue_seconds", "time_to_first_token_seconds", "request_seconds", "time_per_output_token_seconds"):
        assert told[f"hearth_{name}_count", one] == 1, name
        assert told[f"hearth_{name}_bucket", (("le", "+Inf"), ("model", "b"))] == 2, name
        assert told[f"hearth_{name}_sum", two] > 0, name
    tenant = (("tenant", "search"),)
    assert told["hearth_tenant_generated_tokens_total", tenant] == told["hearth_generated_tokens_total", two] + 8
    assert told["hearth_tenant_cached_tokens_total", tenant] == 32
    assert told["hearth_access_refused_total", (("reason", "no_key"),)] == 1
    assert told["hearth_http_answers_total", (("endpoint", "metrics"), ("status", "401"))] == 1
    assert told["hearth_http_answers_total", (("endpoint", "completions"), ("status", "200"))] == 3
    assert told["hearth_reloads_total", (("outcome", "applied"),)] == 1
    states = {labels: value for (name, labels), value in told.items() if name == "hearth_model_state" and ("model", "a") in labels}
    assert sum(states.values()) == 1
    assert states[("model", "a"), ("state", "cold")] == 1


def test_one_models_page_has_its_rows_only(pages: tuple[str, str]) -> None:
    whole, part = samples(pages[0]), samples(pages[1])
    assert part
    for _, labels in part:
        assert dict(labels).get("model", dict(labels).get("model_name")) == "b"
    of_b = {key for key in whole if dict(key[1]).get("model", dict(key[1]).get("model_name")) == "b"}
    assert part.keys() == of_b
    listed = {name for name, (_, labels) in documented().items() if labels[:1] in (("model",), ("model_name",))}
    assert families(pages[1]).keys() == listed


def test_every_bucket_is_cumulative() -> None:
    histogram = Histogram((0.1, 1.0))
    for seconds in (0.05, 0.1, 0.5, 5.0):
        histogram.add(seconds)
    metrics = Metrics()
    metrics.ttft["m"] = histogram
    told = samples(metrics_page.render(metrics, Now("1", {})).decode())
    counts = [told["hearth_time_to_first_token_seconds_bucket", (("le", le), ("model", "m"))] for le in ("0.1", "1.0", "+Inf")]
    assert counts == [2, 3, 4]


def test_a_name_with_quotes_stays_one_label() -> None:
    name = 'a"b\\c\nd'
    told = samples(metrics_page.render(Metrics(), Now("1", {name: ModelNow("cold")}), name).decode())
    assert told["hearth_requests_queued", (("model", name),)] == 0


def ended(tenant: str, num_tokens: int) -> Generation:
    return Generation(
        model=entry("m"), prompt=[0] * num_tokens, params=SamplingParams(1), sink=SimpleNamespace(), tenant=tenant, outcome="stop"
    )  # type: ignore[arg-type]


def tenant_tokens(metrics: Metrics) -> dict[str, float]:
    told = samples(metrics_page.render(metrics, Now("1", {})).decode())
    return {labels[0][1]: value for (name, labels), value in told.items() if name == "hearth_tenant_prompt_tokens_total"}


def test_the_largest_tenants_have_names_and_no_counter_goes_down() -> None:
    metrics = Metrics()
    before: dict[str, float] = {}
    total = 0
    for turn in range(5):
        for at in range(60):
            size = 1 + (at * 7 + turn * 13) % 60 * (turn + 1)
            metrics.ended(ended(f"t{at}", size))
            total += size
        told = tenant_tokens(metrics)
        assert len(told.keys() - {"other"}) <= NUM_TENANTS
        for label in told.keys() & before.keys():
            assert told[label] >= before[label], label
        before |= told
    largest = metrics.tenants.named
    metrics.ended(ended("t-huge", 10**6))
    tenant_tokens(metrics)
    metrics.ended(ended("t-huge", 5))
    assert "t-huge" in metrics.tenants.named
    assert tenant_tokens(metrics)["t-huge"] == 5, "what it had before stays with other"
    assert len(metrics.tenants.named & largest) == NUM_TENANTS - 1
    assert sum(metrics.tenants.prompt_tokens.values()) == total + 10**6 + 5


def test_the_dashboard_uses_listed_metrics_only() -> None:
    board = json.loads((ROOT / "docs/hearthd-dashboard.json").read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    texts += [one["expr"] for one in board["annotations"]["list"]] + [
        one["query"]["query"] for one in board["templating"]["list"][1:]
    ]
    assert len(panels) > 20
    used = set()
    for text in texts:
        names = re.findall(r"\b(?:hearth_|vllm:)\w+", text)
        assert names, text
        for name in names:
            family = BY_NAME.get(name) or BY_NAME.get(re.sub(r"_(bucket|sum|count)$", "", name))
            assert family is not None, f"{name} in {text}"
            assert (name == family.name) == (family.kind != "histogram"), f"{name} is a {family.kind}"
            used.add(family.name)
            for label in re.findall(r"by \(([^)]+)\)", text):
                known = {*family.labels, "le", "instance"}
                others = {each for other in names if other in BY_NAME for each in BY_NAME[other].labels}
                assert set(label.split(", ")) <= known | others, text
            for label in re.findall(r'[{,](\w+)=~?"', text):
                assert label in {*family.labels, "job", "instance"} or len(names) > 1, f"{label} in {text}"
    assert len(used) > 30
    assert {"hearth_device_chunks", "hearth_kv_moved_bytes_total"} <= used


def test_the_dashboards_ids_and_places_are_sound() -> None:
    panels = json.loads((ROOT / "docs/hearthd-dashboard.json").read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken, panel["title"]
        taken |= cells


def test_what_routers_read(tmp_path: Path) -> None:
    """Two requests for a model with one place: one runs, one waits; the KV of the running one shows, and goes."""
    make_model(tmp_path / "models" / "m")
    config = "[models.m]\nmax_sequences = 1\n"
    with Node(tmp_path, config=config, null_step_ms=3) as node:
        streams = [Stream(node, "m", "x" * 200, 400) for _ in range(2)]

        def read(path: str = "/m/m/metrics") -> tuple[float, float, float]:
            told = samples(node.get(path)[1])
            names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            return tuple(told[f"vllm:{name}", (("model_name", "m"),)] for name in names)  # type: ignore[return-value]

        node.wait_for(lambda: read()[:2] == (1, 1) and 0 < read("/metrics")[2] <= 1, "one that runs and one that waits")
        for stream in streams:
            assert stream.join().error == ""
        node.wait_for(lambda: read() == (0, 0, 0), "nothing running")


def test_kv_use_is_of_what_a_model_could_have() -> None:
    """Its reserved KV and what the others leave of the lease: 100 reserved + 300 lease - 50 that a neighbour has drawn."""
    here = {"device": "cpu:0", "devices": ("cpu:0",), "kv_reserved_bytes": 100}
    views = {name: SimpleNamespace(name=name, **here) for name in ("a", "b", "c")}
    stats = SimpleNamespace(models={"a": [70, 1, 0, 0], "b": [150, 1, 0, 0], "c": [20, 0, 0, 0]})
    node = SimpleNamespace(
        scheduler=SimpleNamespace(
            model=views.get, devices=lambda: [SimpleNamespace(name="cpu:0", lease_chunks=30, chunk_bytes=10)]
        ),
        engine_events=SimpleNamespace(stats={"cpu:0": stats}),
    )
    assert metrics_now.kv_share(node, views["a"], 70) == 70 / 350  # type: ignore[arg-type]
    assert metrics_now.kv_share(node, views["a"], 900) == 1.0  # type: ignore[arg-type]
    split = SimpleNamespace(name="s", device="cpu:0+cpu:1", devices=("cpu:0", "cpu:1"), kv_reserved_bytes=100)
    assert metrics_now.kv_share(node, split, 70) == 0.7, "it draws on no lease"  # type: ignore[arg-type]
