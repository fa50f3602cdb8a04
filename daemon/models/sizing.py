"""Computes the memory of a model on the devices where it may live, from its files, its settings and its speculator.

Its functions expect settings that fix the number of devices over which a model is split; planning.py replaces "auto" by numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace

from config import parallel, replicas
from config.device_names import KINDS
from config.schema import DeviceBudget, ModelConfig, NodeConfig, ParallelConfig
from config.units import parse_duration_s
from daemon.models.speculators import Speculator
from daemon.record.state import NodeState
from loader.formats.registry import asked_format, held_format, stored_format, why_not_resident
from loader.models import catalog
from loader.shapes import kv_layout
from loader.shapes.dtypes import computed_dtype
from loader.shapes.kv_dtypes import KV_CACHE_DTYPES, asked_kv_cache_dtype, kv_dtype_of
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes import layout, slices, work_space
from loader.sizes.gpu_sizing import gpu_work_space_bytes
from scheduler import expert_copies
from scheduler.node import events
from scheduler.node.groups import most_groups, pools
from scheduler.node.ledger import size_of

log = logging.getLogger("hearthd.models")


class Sizing:
    """Computes how much memory models take, and on which devices they may live. devices: the node's devices, with carve-outs.
    state: what operators have set. without_carve_out: isolated model -> why no memory could be set aside for it."""

    def __init__(self, devices: Sequence[DeviceBudget], state: NodeState, without_carve_out: Mapping[str, str]) -> None:
        self._devices, self._state, self._without_carve_out = devices, state, without_carve_out

    def misfit(self, name: str, settings: ModelConfig, shape: ModelShape) -> str:
        """Returns why no device of the node can run the model with these settings, or "" if one can. Whether the model's size fits
        is checked by fits(), not here."""
        misfits = (self._parallel_misfit, self._encoder_misfit, self._kv_misfit, self._format_misfit)
        return next((why for misfit in misfits if (why := misfit(name, settings, shape))), "")

    def without_carve_out(self, name: str, settings: ModelConfig) -> str:
        """Returns why no memory could be set aside for an isolated model; "" if it was, or if the model is not isolated."""
        return self._without_carve_out.get(name, "") if settings.isolate else ""

    def facts(
        self,
        config: NodeConfig,
        checkpoint: catalog.Checkpoint,
        settings: ModelConfig,
        speculator: Speculator,
        dtype: str,
    ) -> events.ModelFacts:
        """Returns the facts that the scheduler needs about a model, together with the layers of its speculator. dtype: the dtype in
        which it is computed. For a model that is split over devices, the bytes are those of the largest of the parts on one
        device."""
        name, ranks, shape = checkpoint.name, parallel.num_ranks(settings), speculator.shape
        weight_format = held_format(shape, settings.quantize, settings.resident)
        if ranks > 1:
            weights_bytes = layout.share_weights_bytes(shape, dtype, division_of(settings), weight_format)
            shape = slices.split(shape, 0, division_of(settings))
        else:
            weights_bytes = layout.weights_bytes(shape, dtype, weight_format)
        kv_dtype = kv_dtype_of(dtype, asked_kv_cache_dtype(settings.kv_cache_dtype))
        max_model_len = self._max_model_len(config, name, settings, shape, dtype, kv_dtype, weights_bytes)
        facts = events.ModelFacts(
            name=name,
            weights_bytes=weights_bytes,
            kv_bytes_per_token=kv_layout.kv_bytes_per_token(shape, kv_dtype),
            work_space_bytes=self._work_space_bytes(config, name, settings, shape, dtype, max_model_len),
            max_model_len=max_model_len,
            kv_floor_tokens=settings.kv_floor_tokens or 0,
            kv_reserved_bytes=_kv_reserved_bytes(config, shape, kv_dtype, max(max_model_len, settings.kv_floor_tokens or 0)),
            num_ranks=ranks,
            num_stages=division_of(settings).num_stages,
            expert_parts=division_of(settings).expert_parts,
            max_sequences=settings.max_sequences,
            max_queued=config.max_queued_per_model if settings.max_queued is None else settings.max_queued,
            priority=settings.priority,
            keep_alive_s=parse_duration_s(settings.keep_alive),
            pinned=self._state.pinned.get(name, settings.pinned),
            enabled=self._state.enabled.get(name, True),
            devices=self._named_devices(name, settings, shape),
            fingerprint=speculator.fingerprint,
            expert_copies=self.most_copies(settings, shape),
        )
        return facts if ranks == 1 else self._with_all_kv(facts, config, settings, shape)

    def most_copies(self, settings: ModelConfig, shape: ModelShape) -> int:
        """Returns how many experts of other devices a load may copy to each device, at most, in each layer. Returns 0 if the
        model's experts are not divided among devices."""
        parts, experts = division_of(settings).expert_parts, shape.experts
        if experts is None or parts == 1:
            return 0
        return min(settings.expert_copies, experts.num_experts - experts.num_experts // parts)

    def bytes_with_copies(self, settings: ModelConfig, shape: ModelShape, dtype: str) -> dict[int, int]:
        """Returns the most bytes that a split model's weights take on one device that also gets copies of other devices' experts:
        number of copied experts in each layer -> bytes, for each number that a load may choose. shape: that of the whole model."""
        weight_format = held_format(shape, settings.quantize, settings.resident)
        how = (shape, dtype, division_of(settings), weight_format)
        numbers = expert_copies.numbers(self.most_copies(settings, shape))
        return {number: layout.share_bytes_with_copies(*how, number) for number in numbers}

    def _with_all_kv(
        self, facts: events.ModelFacts, config: NodeConfig, settings: ModelConfig, shape: ModelShape
    ) -> events.ModelFacts:
        """Returns the facts of a split model with all the KV that it will have, because the KV of a split model is reserved at its
        load and does not grow. The reserved KV holds kv_floor_tokens tokens if that is set; otherwise as many as fit into a quarter
        of the memory besides weights and work space, but at least max_model_len and at most max_sequences times max_model_len."""
        num_tokens = facts.kv_floor_tokens
        if settings.kv_floor_tokens is None:
            chunk_bytes, size = int(config.chunk_bytes), size_of(facts, int(config.chunk_bytes))
            budgets = [budget_bytes for budget_bytes, _ in self._budgets_by_kind(facts.name, settings, shape)]
            # of the kinds that hold the model, the one with the least room: no kind is ruled out by KV beyond what a request needs
            roomy = [one for one in budgets if size.chunks + size.work_space_chunks <= one // chunk_bytes]
            budget_bytes = min(roomy or budgets, default=0)
            left_bytes = budget_bytes - facts.weights_bytes - facts.work_space_bytes
            # in whole chunks; one chunk is for blocks that cross the boundaries of chunks
            num_left = budget_bytes // chunk_bytes - size.weights_chunks - size.work_space_chunks - 1
            block_bytes = facts.kv_bytes_per_token * config.block_tokens
            fitting = max(0, min(left_bytes // 4, num_left * chunk_bytes)) // block_bytes * config.block_tokens
            num_tokens = min(max(facts.max_model_len, fitting), facts.max_sequences * facts.max_model_len)
        kv_reserved_bytes = facts.kv_reserved_bytes
        if kv_reserved_bytes:  # several sequences need more KV of a sliding window than one sequence with all their tokens
            kv_reserved_bytes = max(kv_reserved_bytes, num_tokens * facts.kv_bytes_per_token)
        return replace(facts, kv_floor_tokens=num_tokens, kv_reserved_bytes=kv_reserved_bytes)

    def fits(self, facts: events.ModelFacts, config: NodeConfig, settings: ModelConfig, shape: ModelShape) -> bool:
        """Returns whether the model fits on an empty device that its settings allow or, if it is split, on as many such devices of
        one kind as it has shares. facts: the model's facts."""
        chunk_bytes = int(config.chunk_bytes)
        size = size_of(facts, chunk_bytes)
        budget_bytes, _ = self._budgets(facts.name, settings, shape)
        return size.chunks + size.work_space_chunks <= budget_bytes // chunk_bytes

    def kinds(self, name: str, settings: ModelConfig, shape: ModelShape) -> set[str]:
        return {device.kind for device in self._allowed(name, settings, shape)}

    def num_replicas(self, name: str, settings: ModelConfig, shape: ModelShape) -> int:
        """Returns the most replicas that the model may have."""
        division = division_of(settings)
        names = [[device.name for device in each] for each in self._allowed_by_kind(name, settings, shape)]
        return replicas.number(settings, sum(most_groups(each, division.size, division.num_stages) for each in names))

    def shared_names(self) -> list[str]:
        """Returns the names of the node's devices that are not carve-outs, those of other hosts included."""
        return [device.name for device in self._devices if not device.model]

    def why_not_split(self, settings: ModelConfig, shape: ModelShape) -> str:
        """Returns why the settings, the node's devices or the checkpoint's format do not allow that the model is split as the
        settings say; "" if they do."""
        return parallel.problem(settings, self.shared_names(), _refused_kinds(shape))

    def largest_bytes(self, name: str, settings: ModelConfig, shape: ModelShape) -> int:
        """Returns the bytes of memory that the model can have at most: the sum of the budgets of the largest devices of one kind,
        as many as the model is split over."""
        ranks = parallel.num_ranks(settings)
        allowed = self._allowed_by_kind(name, settings, shape)
        return max((sum(sorted((one.budget_bytes for one in each), reverse=True)[:ranks]) for each in allowed), default=0)

    def computed_dtype(self, asked: str, name: str, settings: ModelConfig, shape: ModelShape) -> str:
        """Returns the dtype in which the model is computed on the devices where it may live, by the rule of
        loader.shapes.dtypes.computed_dtype. asked: the setting, such as "auto"."""
        return computed_dtype(asked, shape.dtype, self.kinds(name, settings, shape))

    def tell_of_dtype(self, asked: str, dtype: str, name: str, settings: ModelConfig, shape: ModelShape) -> None:
        """Logs a line for operators if the dtype in which the model is computed makes it slower, or differs from the stored one.
        asked: the setting. dtype: the dtype in which it is computed."""
        kinds = self.kinds(name, settings, shape)
        if dtype != shape.dtype and asked == "auto":
            why = f"cpu devices have no kernels for {shape.dtype}; the key dtype decides otherwise"
            log.info("%s: stored as %s and computed as %s, because %s", name, shape.dtype, dtype, why)
        elif dtype == "float16" and "cpu" in kinds:
            log.warning("%s: dtype: float16 has no kernels on cpu devices and is several times slower there than bfloat16", name)

    def _budgets(self, name: str, settings: ModelConfig, shape: ModelShape) -> tuple[int, int]:
        """Returns (budget, budget without carve-outs) in bytes: the most memory that the model, or each device's part of a split
        model, can have on any kind of device; (0, 0) if there are too few devices. The second number is the budget that the device
        would have if no carve-outs were set aside on it."""
        budgets = self._budgets_by_kind(name, settings, shape)
        return max((budget for budget, _ in budgets), default=0), max((whole for _, whole in budgets), default=0)

    def _budgets_by_kind(self, name: str, settings: ModelConfig, shape: ModelShape) -> list[tuple[int, int]]:
        """Returns, for each kind of device on which the model may live, two numbers of bytes: the most memory that the model can
        have on a device, with and without regard to carve-outs. The second number is the budget that the device would have if no
        carve-outs were set aside on it. For a model on one device, the device is the largest one of the kind. A split model gets
        the largest devices of the kind, and the device is the smallest of these."""
        division, found = division_of(settings), []
        for allowed in self._allowed_by_kind(name, settings, shape):
            budgets = {device.name: device.budget_bytes for device in allowed}
            wholes = {device.name: device.whole_bytes or device.budget_bytes for device in allowed}
            found.append((_smallest_of_largest(budgets, division), _smallest_of_largest(wholes, division)))
        return found

    def _allowed(self, name: str, settings: ModelConfig, shape: ModelShape) -> list[DeviceBudget]:
        """Returns the devices where the model may live and that can run it. A model with a carve-out may live only there. Any other
        model may live on the devices that its setting `devices` names (without it, on all) that are no carve-outs; on those of
        other hosts only if it is a pipeline. For a split model, kinds of devices of which there are too few are left out."""
        own = [device for device in self._devices if device.model == name]
        shared = [device for device in self._devices if not device.model]
        named = own or [device for device in shared if not settings.devices or device.name in settings.devices]
        kinds, division = _kinds(settings, shape), division_of(settings)
        there = pools((device.name for device in named if device.kind in kinds), division.size, division.num_stages)
        usable = {name for pool in there for name in pool}
        return [device for device in named if device.name in usable]

    def _allowed_by_kind(self, name: str, settings: ModelConfig, shape: ModelShape) -> list[list[DeviceBudget]]:
        """Returns the devices on which the model may live and that can run it (_allowed), as one list for each kind of device."""
        allowed = self._allowed(name, settings, shape)
        return [[device for device in allowed if device.kind == kind] for kind in sorted({device.kind for device in allowed})]

    def _named_devices(self, name: str, settings: ModelConfig, shape: ModelShape) -> tuple[str, ...]:
        """Returns the names of the devices where the scheduler may place the model; () means any device."""
        is_split = parallel.num_ranks(settings) > 1
        if is_split or len(_kinds(settings, shape)) < 2 or any(device.model for device in self._devices):
            return tuple(device.name for device in self._allowed(name, settings, shape)) or tuple(settings.devices)
        return tuple(settings.devices)

    def _work_space_bytes(
        self, config: NodeConfig, name: str, settings: ModelConfig, shape: ModelShape, dtype: str, max_model_len: int
    ) -> int:
        """Returns the bytes of work space that one step of the model needs. The rules for cpu and cuda devices differ; if the model
        may live on both, the larger result counts."""
        batch, sequences = config.max_num_batched_tokens, settings.max_sequences
        kinds = self.kinds(name, settings, shape)
        sizes = [gpu_work_space_bytes(shape, dtype, batch, sequences)] if "cuda" in kinds else []
        if kinds != {"cuda"}:
            weight_format = held_format(shape, settings.quantize, settings.resident)
            sizes.append(work_space.work_space_bytes(shape, dtype, batch, sequences, max_model_len, weight_format))
        return max(sizes)

    def _parallel_misfit(self, name: str, settings: ModelConfig, shape: ModelShape) -> str:
        """Returns why the model cannot be split over devices as the setting `parallel` says; "" if it can, or is not split."""
        ranks = parallel.num_ranks(settings)
        if ranks == 1:
            return ""
        why = self.why_not_split(settings, shape) or slices.refusal(shape, division_of(settings))
        return f'models."{name}".parallel: {why}' if why else ""

    def _encoder_misfit(self, name: str, settings: ModelConfig, shape: ModelShape) -> str:
        """Returns why the node has no device for a model that is an encoder; "" if it has one, or the model is no encoder."""
        if not shape.is_encoder or self._allowed(name, settings, shape):
            return ""
        if own := [device for device in self._devices if device.model == name]:
            return (
                f'models."{name}".isolate: its part was set aside on {own[0].hardware}, and encoders are not built for cuda '
                'devices; name a cpu device in its "devices" and restart hearthd'
            )
        return f'models."{name}".devices: encoders are not built for cuda devices; give the node a cpu device for them'

    def _format_misfit(self, name: str, settings: ModelConfig, shape: ModelShape) -> str:
        """Returns why the model cannot be held in the configured weight format, or that of its checkpoint; "" if it can."""
        if shape.stored_format:
            if self._allowed(name, settings, shape):
                return ""
            refused = _refused_kinds(shape)
            others = " or ".join(kind for kind in KINDS if kind not in refused)
            return f"quantization_config: {'; '.join(refused.values())}; give the node a {others} device for it"
        try:
            asked = asked_format(settings.quantize, settings.resident)
        except ValueError as error:
            return f'models."{name}".{error}'
        key = f'models."{name}".{asked.setting}'
        gpus = [one.name for one in self._devices if one.is_local("cuda") and one.name in (settings.devices or [one.name])]
        if gpus and not asked.runs_on("cuda"):
            return f'{key}: {asked.name} is not built for {gpus[0]}; name cpu devices in its "devices"'
        if shape.is_encoder and not asked.runs_encoders:
            return f"{key}: {asked.name} is not built for encoders; leave it out"
        if experts := asked.unbuilt_experts(shape):
            return f"{key}: {asked.name} is not built for {experts}; leave it out"
        return ""

    def resident_misfit(self, name: str, settings: ModelConfig, shape: ModelShape, dtype: str) -> str:
        """Returns why the model, computed in dtype, cannot be held in memory as the setting `resident` says; "" if it can."""
        why = why_not_resident(settings.resident, shape, dtype)
        return f'models."{name}".resident: {why}' if why else ""

    def _kv_misfit(self, name: str, settings: ModelConfig, shape: ModelShape) -> str:
        """Returns why the model's KV cannot be kept in the configured type (kv_cache_dtype); "" if it can."""
        kv_dtype = KV_CACHE_DTYPES.get(settings.kv_cache_dtype)
        if kv_dtype is None:
            return ""
        if shape.is_encoder:
            return f'models."{name}".kv_cache_dtype: encoders keep no KV; leave it out'
        if self._allowed(name, settings, shape):
            return ""
        own = [device.hardware for device in self._devices if device.model == name]
        where = ", ".join(own or settings.devices or self.shared_names())
        return f'models."{name}".kv_cache_dtype: {kv_dtype.about_devices}, and this model may live on {where}'

    def _max_model_len(
        self,
        config: NodeConfig,
        name: str,
        settings: ModelConfig,
        shape: ModelShape,
        dtype: str,
        kv_dtype: str,
        weights_bytes: int,
    ) -> int:
        """Returns max_model_len, the most tokens of a sequence: the configured length (at most the checkpoint's) or a default.

        The default is the checkpoint's length or, if less, the number of tokens whose KV takes 25 % of a device's budget,
        carve-outs on the device included. The device is the largest one that the model may use. A split model gets the largest
        devices, and the smallest of these counts. The default is halved, down to 2,048, while the model with the work space for
        contexts of this length would not fit at all."""
        if settings.max_model_len is not None:
            return min(settings.max_model_len, shape.max_position_embeddings)
        budget_bytes, whole_bytes = self._budgets(name, settings, shape)
        length = kv_layout.default_max_model_len(shape, kv_dtype, whole_bytes)
        chunk_bytes = int(config.chunk_bytes)
        while length > kv_layout.MIN_MODEL_LEN:
            facts = events.ModelFacts(
                name="",
                weights_bytes=weights_bytes,
                kv_bytes_per_token=kv_layout.kv_bytes_per_token(shape, kv_dtype),
                work_space_bytes=self._work_space_bytes(config, name, settings, shape, dtype, length),
                max_model_len=length,
                kv_reserved_bytes=_kv_reserved_bytes(config, shape, kv_dtype, length),
            )
            size = size_of(facts, chunk_bytes)
            if size.chunks + size.work_space_chunks <= budget_bytes // chunk_bytes:
                break
            length = max(kv_layout.MIN_MODEL_LEN, length // 2)
        return length


def _smallest_of_largest(budgets: Mapping[str, int], division: Division) -> int:
    """Returns the memory in bytes that a split model can use on each of its devices, if it gets the devices with the largest
    budgets: the smallest of these budgets, 0 if there are too few devices. budgets: device -> bytes, for devices of one kind.
    division: how the model is divided among devices."""
    for least in sorted(set(budgets.values()), reverse=True):
        roomy = (name for name, budget_bytes in budgets.items() if budget_bytes >= least)
        if pools(roomy, division.size, division.num_stages):
            return least
    return 0


def division_of(settings: ModelConfig) -> Division:
    """Returns how the settings divide the model among devices; Division(1) for one device. "auto" must have been replaced."""
    return division(settings.parallel) if isinstance(settings.parallel, ParallelConfig) else Division(1)


def division(how: ParallelConfig) -> Division:
    """Returns the Division that a value of the key `parallel` (a ParallelConfig) asks for."""
    return Division(how.num_devices, how.expert, how.pipeline)


def _kinds(settings: ModelConfig, shape: ModelShape) -> set[str]:
    """Returns the kinds of devices ("cpu", "cuda") that have kernels for the model. GPUs have none for encoders and some checkpoint
    formats, CPUs none for some types of KV."""
    if shape.is_encoder:
        return {"cpu"}
    kinds = set(KINDS) - _refused_kinds(shape).keys()
    kv_dtype = KV_CACHE_DTYPES.get(settings.kv_cache_dtype)
    return kinds if kv_dtype is None else set(filter(kv_dtype.runs_on, kinds))


def _refused_kinds(shape: ModelShape) -> dict[str, str]:
    """Returns the kinds of devices that have no kernels for the format of the checkpoint, each with the reason."""
    held = stored_format(shape)
    return {kind: f"{held.title} is not built for {kind} devices" for kind in KINDS if not held.runs_on(kind)}


def _kv_reserved_bytes(config: NodeConfig, shape: ModelShape, kv_dtype: str, num_tokens: int) -> int:
    """Returns the KV bytes to reserve for a model with sliding windows or states (ModelFacts.kv_reserved_bytes), or 0 for any other
    model. num_tokens: the tokens for which they must suffice."""
    if not kv_layout.has_several_groups(shape):
        return 0
    return kv_layout.kv_reserved_bytes(
        shape, kv_dtype, num_tokens, config.block_tokens, config.max_num_batched_tokens, int(config.chunk_bytes)
    )
