"""Does the work of `hearth simulate` and `hearth trace`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from config import units
from config.load import ConfigError
from daemon.cli.client import CommandError
from daemon.cli.simulation import report
from daemon.errors import EXIT_NOT_FOUND, EXIT_USAGE
from daemon.simulate import scenario, trace_file
from daemon.simulate.generate import generate
from daemon.simulate.scenario import MAX_QUEUED, Scenario, ScenarioModel
from daemon.simulate.trace_shape import TraceShape
from scheduler.node.events import ModelFacts
from scheduler.simulate.compare import POLICIES, compare, settings_for
from scheduler.simulate.costs import Costs, ModelCosts
from scheduler.simulate.simulation import SimulatedNode, SimulationError
from scheduler.simulate.trace import TraceRequest

NO_LIMIT_S = 1e9


def simulate(options: argparse.Namespace) -> None:
    """Runs `hearth simulate`: simulates a trace under each policy and prints the results. Raises CommandError for wrong options or
    files."""
    try:
        given = scenario.read(options.costs) if options.costs else scenario.EMPTY
        trace = _trace(options, given)
        node = _node(options, given, trace)
    except (ConfigError, trace_file.TraceError) as error:
        raise _usage(str(error)) from None
    for policy in options.policy:
        if policy not in POLICIES:
            raise _usage(f"--policy: there is no {policy!r}; known: {', '.join(POLICIES)}")
    settings = settings_for(node, options.max_wait or NO_LIMIT_S, MAX_QUEUED)
    if options.overdue_after is not None:
        settings = replace(settings, overdue_after_s=options.overdue_after)
    started = time.perf_counter()
    progress = report.Progress(sys.stderr)
    try:
        found = compare(node, trace, settings, options.slo, options.policy or POLICIES, progress.show)
    except SimulationError as error:
        raise CommandError(1, {"code": "internal", "message": str(error), "details": {}}) from None
    finally:
        progress.end()
    run = report.Report(trace, node, options.slo, found, time.perf_counter() - started)
    if options.json:
        print(json.dumps(run.as_json(), indent=1))
    else:
        print(run.text(per_model=options.per_model))


def trace(options: argparse.Namespace) -> None:
    """Runs `hearth trace`: generates a trace of requests and prints it. Raises CommandError for wrong options or files."""
    try:
        given = scenario.read(options.name) if options.name else scenario.EMPTY
        shape = given.trace or TraceShape(tuple(given.models) or _model_names(options.num_models))
        made = _changed(options, shape)
    except ConfigError as error:
        raise _usage(str(error)) from None
    requests = generate(made)
    if options.json:
        print(json.dumps([[one.time_s, one.model, one.input_tokens, one.output_tokens] for one in requests]))
    else:
        trace_file.write(sys.stdout, requests, [f"seed {made.seed}, {made.arrivals}, zipf {made.zipf:g}: {len(requests)} requests"])


def _usage(message: str, exit_code: int = EXIT_USAGE) -> CommandError:
    return CommandError(exit_code, {"code": "invalid_request", "message": message, "details": {}})


# ---- the trace


def _trace(options: argparse.Namespace, given: Scenario) -> list[TraceRequest]:
    if options.generate:
        if options.name:
            raise _usage("give TRACE or --generate, not both")
        if given.trace is None:
            raise _usage("--generate needs a --costs file with a [trace] table, which says how to make it")
        seed = given.trace.seed if options.seed is None else options.seed
        return generate(replace(given.trace, seed=seed))
    if not options.name:
        raise _usage("which trace? Name a file (- reads standard input), or use --generate with a --costs file")
    if options.name == "-":
        return trace_file.read(sys.stdin, "standard input")
    try:
        with open(options.name, encoding="utf-8", newline="") as file:
            return trace_file.read(file, options.name)
    except OSError as error:
        code = EXIT_NOT_FOUND if isinstance(error, FileNotFoundError) else EXIT_USAGE
        raise _usage(f"{options.name}: cannot be read: {error.strerror}", code) from None


def _model_names(number: int) -> tuple[str, ...]:
    if not 0 < number <= 100_000:
        raise _usage(f"--num-models: {number} must be from 1 to 100000")
    return tuple(f"model-{index + 1}" for index in range(number))


def _changed(options: argparse.Namespace, shape: TraceShape) -> TraceShape:
    """Returns the parameters of the trace to generate: those of the file, with the values of the given flags in their place. shape:
    the file's parameters. Raises CommandError for a value out of range."""
    values: dict[str, Any] = {"arrivals": options.arrivals, "seed": options.seed, "zipf": options.zipf}
    for flag, name in (("rate", "requests_per_s"), ("duration", "duration_s"), ("burst", "burst_s"), ("active_share",) * 2):
        value = getattr(options, flag)
        if value is not None and not 0 < value < math.inf:
            raise _usage(f"--{flag.replace('_', '-')}: {value:g} must be above 0")
        values[name] = value
    if (options.active_share or 1) > 1:
        raise _usage(f"--active-share: {options.active_share:g} must be at most 1")
    for name in ("input_tokens", "output_tokens"):
        text = getattr(options, name)
        values[name] = _lengths(f"--{name.replace('_', '-')}", text) if text else None
    return replace(shape, **{name: value for name, value in values.items() if value is not None})


def _lengths(flag: str, text: str) -> tuple[int, int]:
    least, dash, most = text.partition("-")
    parts = (least, most if dash else least)
    if not all(part.isascii() and part.isdigit() for part in parts) or not 1 <= int(parts[0]) <= int(parts[1]):
        raise _usage(f"{flag}: {text!r} must be A-B, as in 16-128")
    return int(parts[0]), int(parts[1])


# ---- the node


def _node(options: argparse.Namespace, given: Scenario, trace: Sequence[TraceRequest]) -> SimulatedNode:
    devices = _devices(options, given)
    config = given.node_config(devices)
    chunk_bytes = _size("--chunk", options.chunk) or given.chunk_bytes or units.parse_bytes(config.chunk_bytes)
    costs = _costs(options, given.costs)
    known = dict(given.models)
    if options.models:
        known = _of_folder(options.models, devices, chunk_bytes) | known
    weights_bytes = _size("--weights", options.weights)
    for name in dict.fromkeys(request.model for request in trace):
        if name not in known:
            if not weights_bytes:
                raise _usage(
                    f"nothing says how large {name} is: give it a table in the --costs file, name their folder with --models, "
                    "or give a size for all such models with --weights"
                )
            known[name] = scenario.facts_of(name, ScenarioModel(weights_bytes))
    measured = dict(costs.models)
    for name in known:
        own = measured.get(name, ModelCosts())
        measured[name] = replace(
            own,
            prefill_tokens_per_s=own.prefill_tokens_per_s or options.prefill,
            decode_step_s=own.decode_step_s if own.decode_step_s is not None else options.step,
        )
    host_tier_bytes = given.host_tier_bytes if options.host_tier is None else _size_or_none(options.host_tier)
    costs = replace(costs, models=measured)
    return SimulatedNode(devices, chunk_bytes, known, costs, scenario.step_settings(config), host_tier_bytes)


def _devices(options: argparse.Namespace, given: Scenario) -> dict[str, int]:
    devices = {}
    for text in options.device:
        try:
            name, amount = units.parse_device(text)
            devices[name] = units.parse_bytes(amount)
        except ValueError as error:
            raise _usage(f"--device: {text!r} {error}") from None
    if not (devices or given.devices):
        raise _usage("which devices? Name them with --device, as in --device cuda:0=80GiB")
    return devices or given.devices


def _costs(options: argparse.Namespace, costs: Costs) -> Costs:
    changed: dict[str, Any] = {}
    for flag, field in (("disk", "disk_bytes_per_s"), ("copy", "copy_bytes_per_s")):
        num_bytes = _size(f"--{flag}", getattr(options, flag))
        if num_bytes:
            changed[field] = float(num_bytes)
    for flag in ("prefill", "step", "slo", "overdue_after", "max_wait"):
        value = getattr(options, flag)
        if value is not None and not 0 < value < math.inf:
            raise _usage(f"--{flag.replace('_', '-')}: {value:g} must be above 0")
    return replace(costs, **changed)


def _size(flag: str, text: str) -> int:
    """Returns the size in bytes that a flag's value stands for; 0 for "". flag: the flag's name, for the error. text: the value,
    such as 8GiB. Raises CommandError if it is no size."""
    try:
        return units.parse_bytes(text) if text else 0
    except ValueError as error:
        raise _usage(f"{flag}: {text!r} {error}") from None


def _size_or_none(text: str) -> int:
    return 0 if text.strip() == "0" else _size("--host-tier", text)


def _of_folder(folder: str, devices: dict[str, int], chunk_bytes: int) -> dict[str, ModelFacts]:
    """Returns the facts about each model in the folder, by name, as a daemon with default settings would report them to the node
    scheduler. Models that cannot be loaded are left out. devices: name -> budget in bytes. chunk_bytes: the size of a chunk. Raises
    CommandError if the folder cannot be read."""
    from config.schema import DeviceBudget, NodeConfig
    from daemon.models.registry import Registry
    from daemon.record.state import NodeState
    from loader.models import catalog

    config = NodeConfig(models_dir=folder, chunk_bytes=chunk_bytes)
    registry = Registry(config, [DeviceBudget(name, budget) for name, budget in devices.items()], NodeState(""))
    try:
        found = catalog.scan(folder, {})
    except OSError as error:
        raise _usage(f"--models: {folder}: cannot be read: {error.strerror}", EXIT_NOT_FOUND) from None
    facts = [registry.register(config, checkpoint).facts for checkpoint in found.values()]
    return {one.name: replace(one, max_queued=MAX_QUEUED) for one in facts if not (one.incomplete or one.unusable)}
