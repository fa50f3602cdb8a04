"""Decides how each model is served: over how many devices (the key `parallel`), in which dtype, and how tokens are drafted for it.

`parallel = "auto"` takes the fewest devices of this machine that hold the model. If all of them do not suffice, it takes the fewest
devices of all hosts that hold the model as a pipeline. Each number of devices is tried as if the settings had named it, so the
result is the same as with that setting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec

from config import parallel
from config.device_names import host_of
from config.schema import ModelConfig, NodeConfig, ParallelConfig
from daemon.models import speculators
from daemon.models.adapters import base_setting_misfit
from daemon.models.sizing import Sizing, division, division_of
from daemon.models.speculators import Speculator
from loader.models.catalog import Checkpoint
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes import slices
from scheduler.node import events

log = logging.getLogger("hearthd.models")

IS_HEAD = 'it drafts tokens for other models: name it there (speculator in [models."NAME"])'
_SHARES_AT_LEAST = 0.99  # the least part of a model's bytes that all its shares have together; they may have less padding
MOST_REASONS = 3  # the most reasons in one refusal why numbers of devices are not possible


@dataclass(slots=True, frozen=True)
class Plan:
    """The way in which a model is served. settings: the model's settings, with a fixed division in place of "auto". shape: the
    checkpoint's shape. facts: the scheduler's facts about the model. fits: whether the devices can hold the model if no other model
    is on them."""

    settings: ModelConfig
    shape: ModelShape
    division: Division
    dtype: str
    speculator: Speculator
    facts: events.ModelFacts
    fits: bool

    def told(self, if_too_large: str) -> Plan:
        """Returns a copy of the plan of a model that does not fit, in which `if_too_large` is appended to the message with which
        requests for the model are refused."""
        return replace(self, facts=replace(self.facts, if_too_large=if_too_large))


# settings with a fixed number of devices -> the plan, or why the model cannot be served in this way
_Attempt = Callable[[ModelConfig], Plan | str]


@dataclass(slots=True, frozen=True)
class _Search:
    """The result of trying to split a model over 2, 3 and more devices. found: the plan for the fewest devices that hold the model,
    or None. In that case `why` tells the reason, and `largest` is the plan for the most devices over which the model can be split,
    if there is one."""

    found: Plan | None = None
    why: str = ""
    largest: Plan | None = None


class Planner:
    """Makes the plan for each model: how it is served on the node's devices. sizing: knows the devices and computes the memory that
    models take."""

    def __init__(self, sizing: Sizing) -> None:
        self._sizing = sizing

    def plan(
        self, config: NodeConfig, checkpoint: Checkpoint, settings: ModelConfig, heads: Mapping[str, Checkpoint]
    ) -> Plan | str:
        """Returns how the model is served, or why it cannot be. heads: EAGLE-3 heads in the models folder, which may draft tokens
        for it, by name."""

        def attempt(settings: ModelConfig) -> Plan | str:
            return self._attempt(config, checkpoint, settings, heads)

        plan = attempt(settings) if parallel.num_ranks(settings) > 1 else self._whole_or_split(checkpoint.name, settings, attempt)
        if isinstance(plan, Plan):
            asked = settings.dtype or config.dtype
            self._sizing.tell_of_dtype(asked, plan.dtype, checkpoint.name, plan.settings, plan.shape)
            if plan.speculator.why_not:
                why, is_mtp = plan.speculator.why_not, plan.speculator.name == speculators.MTP
                told = "its own predictor and not by an EAGLE-3 head" if is_mtp else "prompt lookup and not by a predictor"
                log.info("%s: drafts by %s: %s", checkpoint.name, told, why)
        return plan

    def _whole_or_split(self, name: str, settings: ModelConfig, attempt: _Attempt) -> Plan | str:
        """Returns the plan for one device if the model fits on one. Otherwise the result depends on `parallel`. With "auto", it is
        the plan for the fewest devices that hold the model or, if no number suffices, a plan that does not fit and whose facts tell
        why. Without "auto", it is the plan for one device all the same, with a hint if "auto" would help. attempt: makes the plan
        for settings that fix the number of devices. Returns a text if the model cannot be served."""
        whole = attempt(msgspec.structs.replace(settings, parallel=None))
        if isinstance(whole, str) or whole.fits:
            return whole
        search = self._search(name, settings, whole, attempt)
        key = f'models."{name}".parallel'
        if settings.parallel != parallel.AUTO:
            if search.found is None:
                return whole
            return whole.told(f'{key} = "{parallel.AUTO}" would split it over {search.found.division.size} devices')
        return search.found or (search.largest or whole).told(f'{key} = "{parallel.AUTO}" {search.why}')

    def _search(self, name: str, settings: ModelConfig, whole: Plan, attempt: _Attempt) -> _Search:
        """Returns the result of a search for the fewest devices over which the model can be split so that it fits: first among
        those of this machine and, only if these do not suffice, for a pipeline over the devices of all hosts. attempt: makes the
        plan for fixed settings. whole: the plan for one device, which does not hold the model."""
        names = settings.devices or self._sizing.shared_names()
        own = [device for device in names if not host_of(device)]
        here = self._search_among(name, settings, own, whole, attempt)
        if len(own) == len(names):
            return here
        if here.found is not None:  # its settings name these devices alone, and a pipeline may live elsewhere, too
            plan = attempt(msgspec.structs.replace(here.found.settings, devices=settings.devices))
            return _Search(plan) if isinstance(plan, Plan) else here
        everywhere = self._search_among(name, settings, names, whole, attempt, over_hosts=True)
        why = here.why if everywhere.why == here.why else f"{here.why}; over several hosts: {everywhere.why}"
        return _Search(everywhere.found, why, everywhere.largest or here.largest)

    def _search_among(
        self,
        name: str,
        settings: ModelConfig,
        devices: Sequence[str],
        whole: Plan,
        attempt: _Attempt,
        over_hosts: bool = False,
    ) -> _Search:
        """Returns the result of a search for the fewest of these devices over which the model can be split so that it fits.
        devices: those of this machine, or all with over_hosts, where the model is divided by layers between hosts. whole: the plan
        for one device, which does not hold the model. attempt: makes the plan for fixed settings."""
        sizing, shape = self._sizing, whole.shape
        most = max(map(len, parallel.by_kind(devices).values()), default=0)
        if most < 2:
            has = f"devices names {', '.join(settings.devices)}" if settings.devices else f"the node has {', '.join(devices)}"
            return _Search(why=f"splits over two or more devices of one kind, and {has}")

        def plainly(number: int) -> ParallelConfig:
            return ParallelConfig(pipeline=number) if over_hosts else ParallelConfig(number)

        if why := sizing.why_not_split(_divided(settings, plainly(2)), shape):
            return _Search(why=why)
        is_all = len(devices) == len(settings.devices or sizing.shared_names())
        among = settings if is_all else msgspec.structs.replace(settings, devices=list(devices))
        largest, too_large, refused = None, ["1"], dict[str, list[str]]()
        for number in range(2, min(most, parallel.MOST_RANKS) + 1):
            asked = _divided(among, plainly(number))
            if not sizing.kinds(name, asked, shape):
                break  # there are more devices of another kind only
            if whole.facts.weights_bytes * _SHARES_AT_LEAST > sizing.largest_bytes(name, asked, shape):
                too_large.append(str(number))  # without computing a share's layout, which takes seconds for a very large model
                continue
            how = division_over_hosts(shape, number, devices) if over_hosts else division_over(shape, number)
            plan = attempt(_divided(among, how))
            if over_hosts and how != plainly(number) and not (isinstance(plan, Plan) and plan.fits):
                plan = attempt(asked)  # some of a layer is whole on each of its devices, so by layers alone it may fit
            if isinstance(plan, str):
                refused.setdefault(plan.removeprefix(f'models."{name}".parallel: '), []).append(str(number))
            elif plan.fits:
                return _Search(plan)
            else:
                largest = plan
                too_large.append(str(number))
        return _Search(why=_no_number(too_large, refused), largest=largest)

    def _attempt(
        self, config: NodeConfig, checkpoint: Checkpoint, settings: ModelConfig, heads: Mapping[str, Checkpoint]
    ) -> Plan | str:
        """Returns the plan for settings that fix the number of devices, or why the model cannot be served with them. If the model
        fits only without its predictor, the plan drafts tokens by prompt lookup instead."""
        sizing, name, shape = self._sizing, checkpoint.name, checkpoint.shape
        misfit = base_setting_misfit(name, settings) or sizing.without_carve_out(name, settings)
        if checkpoint.head is not None and checkpoint.complete:
            misfit = IS_HEAD
        if shape is not None:
            choice = speculators.Choice(settings, checkpoint, shape, sizing.kinds(name, settings, shape), checkpoint, heads)
            misfit = misfit or sizing.misfit(name, settings, shape) or choice.misfit(name)
        if not checkpoint.complete or shape is None or misfit:
            return checkpoint.fault or misfit or "not a model"
        dtype = sizing.computed_dtype(settings.dtype or config.dtype, name, settings, shape)
        if misfit := sizing.resident_misfit(name, settings, shape, dtype):
            return misfit
        speculator = choice.chosen()
        facts = sizing.facts(config, checkpoint, settings, speculator, dtype)
        if speculator.predicts and not sizing.fits(facts, config, settings, shape):
            why = "with it the model would not fit its devices"
            speculator = speculators.prompt_lookup(shape, checkpoint.fingerprint, why)
            facts = sizing.facts(config, checkpoint, settings, speculator, dtype)
        fits = sizing.fits(facts, config, settings, shape)
        return Plan(settings, shape, division_of(settings), dtype, speculator, facts, fits)


def division_over(shape: ModelShape, num_devices: int) -> ParallelConfig:
    """Returns how "auto" divides a model among num_devices devices: by matrices; if that is impossible, by whole experts; if that
    is impossible, too, by layers. If all three are impossible, returns the division by matrices, which is refused later."""
    ways = (ParallelConfig(num_devices), ParallelConfig(expert=num_devices), ParallelConfig(pipeline=num_devices))
    return next((how for how in ways if not slices.refusal(shape, division(how))), ways[0])


def division_over_hosts(shape: ModelShape, num_devices: int, devices: Sequence[str]) -> ParallelConfig:
    """Returns how "auto" divides a model among num_devices devices of several hosts: by layers into pipeline stages, each on
    devices of one host. The matrices of a stage are divided among as many devices as possible. devices: the names of all
    devices."""
    kinds = parallel.by_kind(devices).values()
    for size in range(num_devices // 2, 1, -1):
        how = ParallelConfig(size, pipeline=num_devices // size)
        is_there = num_devices % size == 0 and any(parallel.hold(names, how) for names in kinds)
        if is_there and not slices.refusal(shape, division(how)):
            return how
    return ParallelConfig(pipeline=num_devices)


def _divided(settings: ModelConfig, how: ParallelConfig) -> ModelConfig:
    return msgspec.structs.replace(settings, parallel=how)


def _no_number(too_large: list[str], refused: Mapping[str, list[str]]) -> str:
    """Returns, for an error message, why "auto" finds no number of devices over which to split a model. too_large: the numbers of
    devices that are too few to hold it. refused: reason -> the numbers of devices over which it cannot be split for that reason."""
    reasons = [f"over {_listed(numbers)}: {why}" for why, numbers in refused.items()]
    if further := [number for numbers in list(refused.values())[MOST_REASONS:] for number in numbers]:
        reasons[MOST_REASONS:] = [f"nor can it be split over {_listed(further)}"]
    return "; ".join((f"finds no number of devices: it is too large for {_listed(too_large)}", *reasons))


def _listed(numbers: list[str]) -> str:
    return " and ".join(part for part in (", ".join(numbers[:-1]), numbers[-1]) if part)
