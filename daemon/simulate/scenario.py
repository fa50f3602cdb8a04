"""A scenario file (TOML or JSON): the node that is simulated, its models, and how to make its trace. See docs/simulate.md."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

import msgspec

from config import replicas, units
from config.load import ConfigError, fields_of, located, read_toml, with_device_defaults
from config.schema import ModelConfig, NodeConfig, key
from daemon.simulate.trace_shape import ARRIVALS, TraceShape
from scheduler.node.events import ModelFacts
from scheduler.node.replica_names import further
from scheduler.simulate.costs import Costs, ModelCosts
from scheduler.simulate.steps import StepSettings

_DEFAULTS, _MODEL_DEFAULTS, _SHAPE = Costs(), ModelConfig(), TraceShape(())
MAX_QUEUED = 1_000_000  # no limit in practice: a simulation shows how long requests wait, unless asked to refuse them


class NodeCosts(msgspec.Struct, frozen=True):
    """The table `[costs]` of a scenario file: how long loads, evictions and steps take on the simulated node (see
    scheduler.simulate.costs.Costs), and three settings of its engines. A setting that is None has the default of the node's
    configuration."""

    disk_bytes_per_s: Annotated[float, key("reading weights from disk")] = _DEFAULTS.disk_bytes_per_s
    copy_bytes_per_s: Annotated[float, key("copying from host memory to the device")] = _DEFAULTS.copy_bytes_per_s
    load_overhead_s: Annotated[float, key("of each load, beside its bytes")] = _DEFAULTS.load_overhead_s
    evict_s: Annotated[float, key("of each eviction")] = _DEFAULTS.evict_s
    memory_bytes_per_s: Annotated[float, key("reading weights for a decode step")] = _DEFAULTS.memory_bytes_per_s
    flops_per_s: Annotated[float, key("computing a prompt")] = _DEFAULTS.flops_per_s
    decode_overhead_s: Annotated[float, key("of each decode step, beside reading the weights")] = _DEFAULTS.decode_overhead_s
    decode_s_per_sequence: Annotated[float, key("of each sequence in a decode step")] = _DEFAULTS.decode_s_per_sequence
    prefill_step_s: Annotated[float, key("of a step with tokens of prompts, beside a decode step's and theirs")] = (
        _DEFAULTS.prefill_step_s
    )
    turn_budget_ms: Annotated[float | None, key("the engine's, as in the configuration, which has the defaults")] = None
    max_step_stretch: float | None = None
    max_num_batched_tokens: int | None = None


class ScenarioModel(msgspec.Struct, frozen=True):
    """A table `[models."org/name"]` of a scenario file: a simulated model's size and limits, and measurements of its speed. A
    measurement that is None is estimated."""

    weights_bytes: Annotated[int | str, key("its weights on the device")]
    kv_bytes_per_token: Annotated[int, key("KV of one token")] = 0
    work_space_bytes: Annotated[int | str, key("beside weights and KV")] = 1
    max_model_len: Annotated[int, key("KV for one request of it is always kept")] = 4096
    kv_floor_tokens: Annotated[int, key("KV of so many tokens, if they are more; a split model has no other")] = 0
    max_sequences: Annotated[int, key("sequences in one batch")] = _MODEL_DEFAULTS.max_sequences
    priority: Annotated[float, key("factor on its value")] = _MODEL_DEFAULTS.priority
    keep_alive: Annotated[float | str, key("how long it stays after its last request")] = _MODEL_DEFAULTS.keep_alive
    pinned: Annotated[bool, key("loaded at start, never evicted")] = _MODEL_DEFAULTS.pinned
    num_ranks: Annotated[int, key("devices that it is split over; the bytes above are then those of each share")] = 1
    num_stages: Annotated[int, key("stages of its pipeline, each on devices of one host; num_ranks is a multiple of it")] = 1
    replicas: Annotated[int | Literal["auto"], key("on how many devices, or groups of them, it may be at once")] = 1
    disk_load_s: Annotated[float | None, key("measured; as below")] = None
    host_load_s: float | None = None
    prefill_tokens_per_s: float | None = None
    decode_step_s: float | None = None
    decode_s_per_sequence: float | None = None
    prefill_step_s: float | None = None


class TraceTable(msgspec.Struct, frozen=True):
    """The table `[trace]` of a scenario file, from which a trace of requests is generated: the fields of TraceShape except
    `models`, because the requests are for all models of the file."""

    requests_per_s: float = _SHAPE.requests_per_s
    duration_s: float = _SHAPE.duration_s
    zipf: float = _SHAPE.zipf
    arrivals: str = _SHAPE.arrivals
    burst_s: float = _SHAPE.burst_s
    active_share: float = _SHAPE.active_share
    input_tokens: list[int] = []  # empty: the default of TraceShape
    output_tokens: list[int] = []
    seed: int = _SHAPE.seed


@dataclass(slots=True, frozen=True)
class Scenario:
    """The content of a scenario file. source: the file's path, for errors. devices: name -> budget in bytes. chunk_bytes: None if
    the file does not set it. models: by name, including further replicas. trace: how to generate the requests; None if the file has
    no table `[trace]`. engine: settings of the engines, by the configuration's keys."""

    source: str
    devices: dict[str, int]
    chunk_bytes: int | None
    models: dict[str, ModelFacts]
    costs: Costs
    trace: TraceShape | None
    host_tier_bytes: int = 0
    engine: Mapping[str, Any] = field(default_factory=dict)

    def node_config(self, devices: Iterable[str]) -> NodeConfig:
        """Returns the configuration of the simulated node: the defaults of a node with these devices, and the file's settings of
        the engines. devices: names such as `cuda:0`."""
        return msgspec.structs.replace(with_device_defaults(NodeConfig(), devices, self.engine), **self.engine)


EMPTY = Scenario("", {}, None, {}, Costs(), None)
_ENGINE_KEYS = ("turn_budget_ms", "max_step_stretch", "max_num_batched_tokens")
_TABLES = ("devices", "chunk_bytes", "host_tier_bytes", "costs", "models", "trace")


def step_settings(config: NodeConfig) -> StepSettings:
    """Returns those settings of a node that limit the steps of its engines, in the form that the simulator takes."""
    return StepSettings(config.turn_budget_ms / 1e3, config.max_step_stretch, config.max_num_batched_tokens)


def read(path: str) -> Scenario:
    """Returns the content of a scenario file, which is JSON if its name ends in .json, else TOML. Raises ConfigError, which names
    the file, the key and, where it is known, the line."""
    try:
        return _scenario(path, _json(path) if path.endswith(".json") else read_toml(path))
    except ConfigError as error:
        raise (error if path.endswith(".json") else located(error)) from None


def _json(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            value = json.load(file)
    except OSError as error:
        raise ConfigError(path, "", f"cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(path, "", f"is not valid JSON: {error}") from None
    except json.JSONDecodeError as error:
        raise ConfigError(path, "", f"is not valid JSON: {error.msg}", error.lineno) from None
    if not isinstance(value, dict):
        raise ConfigError(path, "", "must be an object")
    return value


def _scenario(path: str, tables: dict[str, Any]) -> Scenario:
    for name in tables:
        if name not in _TABLES:
            raise ConfigError(path, name, f"unknown key; known keys: {', '.join(_TABLES)}")
    chunk_bytes = None if "chunk_bytes" not in tables else _size(path, "chunk_bytes", tables["chunk_bytes"])
    host_tier = tables.get("host_tier_bytes", 0)
    host_tier_bytes = 0 if host_tier == 0 else _size(path, "host_tier_bytes", host_tier)
    devices = {}
    for name, budget in _table(path, "devices", tables).items():
        try:
            devices[units.parse_device(f"{name}=1GiB")[0]] = _size(path, f'devices."{name}"', budget)
        except ValueError:
            raise ConfigError(path, f'devices."{name}"', 'is no device; one is named "cpu", "cuda:0" and so on') from None
    values = _positive(path, "costs.", fields_of(path, "costs.", NodeCosts, _table(path, "costs", tables)))
    engine = {name: value for name in _ENGINE_KEYS if (value := values.pop(name, None)) is not None}
    costs = Costs(**values)
    models: dict[str, ModelFacts] = {}
    measured: dict[str, ModelCosts] = {}
    for name, entry in _table(path, "models", tables).items():
        where = f'models."{name}"'
        if not isinstance(entry, dict):
            raise ConfigError(path, where, "must be a table")
        facts, measured[name] = _model(path, where + ".", name, entry)
        asked = entry.get("replicas", 1)
        most = len(devices) if asked == replicas.AUTO else asked
        models |= {one.name: one for one in (facts, *further(facts, most, by_load=asked == replicas.AUTO))}
    shape = None
    if "trace" in tables:
        shape = _shape(path, fields_of(path, "trace.", TraceTable, _table(path, "trace", tables)), tuple(measured))
    return Scenario(path, devices, chunk_bytes, models, replace(costs, models=measured), shape, host_tier_bytes, engine)


def _table(path: str, name: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    value = tables.get(name, {})
    if not isinstance(value, dict):
        raise ConfigError(path, name, "must be a table")
    return value


def _size(path: str, where: str, value: Any) -> int:
    try:
        return units.parse_bytes(value)
    except ValueError as error:
        raise ConfigError(path, where, f"{value!r} {error}") from None


def _positive(path: str, prefix: str, values: dict[str, Any]) -> dict[str, Any]:
    for name, value in values.items():
        least_open = name.endswith("_per_s")  # rates are divisors
        if (
            name != "keep_alive"
            and isinstance(value, float)
            and not (math.isfinite(value) and (value > 0 if least_open else value >= 0))
        ):
            raise ConfigError(path, prefix + name, f"{value!r} must be {'above 0' if least_open else '0 or more'}")
    return values


def _model(path: str, prefix: str, name: str, entry: dict[str, Any]) -> tuple[ModelFacts, ModelCosts]:
    values = _positive(path, prefix, fields_of(path, prefix, ScenarioModel, entry))
    if "weights_bytes" not in values:
        raise ConfigError(path, prefix[:-1], "needs weights_bytes")
    for size in ("weights_bytes", "work_space_bytes"):
        if size in values:
            values[size] = _size(path, prefix + size, values[size])
    if values.get("num_ranks", 1) < 1:
        raise ConfigError(path, prefix + "num_ranks", f"{values['num_ranks']} must be 1 or more")
    num_stages = values.get("num_stages", 1)
    if num_stages < 1 or values.get("num_ranks", 1) % num_stages:
        raise ConfigError(path, prefix + "num_stages", f"{num_stages} must divide num_ranks, {values.get('num_ranks', 1)}")
    try:
        replicas.check(values.get("replicas", 1))
    except ValueError as error:
        raise ConfigError(path, prefix + "replicas", str(error)) from None
    model = ScenarioModel(**values)
    return facts_of(name, model), ModelCosts(
        model.disk_load_s,
        model.host_load_s,
        model.prefill_tokens_per_s,
        model.decode_step_s,
        model.decode_s_per_sequence,
        model.prefill_step_s,
    )


def facts_of(name: str, model: ScenarioModel) -> ModelFacts:
    return ModelFacts(
        name,
        int(model.weights_bytes),
        model.kv_bytes_per_token,
        int(model.work_space_bytes),
        model.max_model_len,
        model.kv_floor_tokens,
        max_sequences=model.max_sequences,
        max_queued=MAX_QUEUED,
        priority=model.priority,
        keep_alive_s=units.parse_duration_s(model.keep_alive),
        pinned=model.pinned,
        num_ranks=model.num_ranks,
        num_stages=model.num_stages,
    )


def _shape(path: str, values: dict[str, Any], models: tuple[str, ...]) -> TraceShape:
    if not models:
        raise ConfigError(path, "trace", "needs models to ask for: give each a table under [models]")
    for name in ("input_tokens", "output_tokens"):
        if name in values:
            bounds = values[name] = tuple(values[name])
            if len(bounds) != 2 or not 1 <= bounds[0] <= bounds[1]:
                raise ConfigError(path, f"trace.{name}", "must be [least, most], both 1 or more")
    if values.get("arrivals", ARRIVALS[0]) not in ARRIVALS:
        raise ConfigError(path, "trace.arrivals", f"{values['arrivals']!r} must be one of {', '.join(ARRIVALS)}")
    for name in ("requests_per_s", "duration_s", "burst_s", "active_share"):
        if name in values and not 0 < values[name] < math.inf:
            raise ConfigError(path, f"trace.{name}", f"{values[name]!r} must be above 0")
    if values.get("active_share", 0.5) > 1:
        raise ConfigError(path, "trace.active_share", f"{values['active_share']!r} must be at most 1")
    return TraceShape(models=models, **values)
