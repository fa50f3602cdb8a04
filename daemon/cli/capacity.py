"""Implements `hearth plan --config FOLDER`, which computes the memory that a model would take on given devices, which need not
exist. It reads the model's config.json, and also its weight files if they are there. Needs no daemon.
"""

from __future__ import annotations

import argparse
import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from config import parallel, units
from config.devices import CUDA_LEFT_BYTES
from config.load import CUDA_DEFAULTS, DTYPES
from config.schema import ModelConfig, NodeConfig, ParallelConfig
from daemon.cli.client import CommandError
from daemon.cli.table import size
from daemon.errors import EXIT_NO_FIT, EXIT_OK, EXIT_USAGE
from daemon.models import speculators
from daemon.models.planning import division_over
from loader.errors import CheckpointError
from loader.formats.registry import FORMATS, held_format, why_not_resident
from loader.models import catalog
from loader.models.described_model import CONFIG, HEADERS, INDEX, DescribedModel, described_model
from loader.shapes.dtypes import computed_dtype
from loader.shapes.kv_dtypes import KV_CACHE_DTYPES, asked_kv_cache_dtype, kv_dtype_named, kv_dtype_of
from loader.shapes.model_shape import ModelShape
from loader.sizes import capacity

_DEVICES = re.compile(r"(cpu|cuda)=(?:(\d+)x)?(.+)\Z")
_MOST_DEVICES = 1024
_SEEN = {"window": "the last {} tokens", "chunked": "their own chunk of {} tokens"}  # by kind of a KV group
_SOURCES = {
    HEADERS: "by the headers of its weight files",
    INDEX: "by config.json and the names in its index; the weights are not there",
    CONFIG: "by config.json alone",
}


def capacity_plan(options: argparse.Namespace) -> int:
    """Runs `hearth plan --config`: prints the plan, as JSON if --json is given. Returns the exit code; with --json it is
    EXIT_NO_FIT if the model fits none of the given devices. Without --json CommandError is raised in that case. Raises CommandError
    also for wrong options and models that cannot be loaded."""
    kind, num_devices, memory_bytes = ("", 0, 0) if options.devices is None else _devices(options.devices)
    described = _described(options.config)
    try:
        return _planned(options, described, kind, num_devices, memory_bytes)
    except CheckpointError as error:  # a width that the weight format does not allow: described by config.json alone
        raise _unusable(options.config, error) from None


def _planned(options: argparse.Namespace, described: DescribedModel, kind: str, num_devices: int, memory_bytes: int) -> int:
    """Prints what the model takes on these devices, and returns the exit code. kind, num_devices, memory_bytes: the devices'. The
    errors are those of capacity_plan, and CheckpointError for a matrix that its weight format does not allow."""
    settings = _settings(options, described.shape, kind)
    budget_bytes = max(0, memory_bytes - (CUDA_LEFT_BYTES if kind == "cuda" else 0))
    division = _division(options, num_devices)
    if not num_devices:
        devices = []
    elif division is None:  # on one device, and split over all of them
        devices = [_devices_by_default(kind, number, budget_bytes, described.shape) for number in sorted({1, num_devices} - {0})]
    else:
        devices = [capacity.Devices(kind, num_devices, budget_bytes, division.expert, division.pipeline)]
        _check_division(options, described.shape, settings, devices[0], division)
    speculator = _speculator(options, described, kind, division)
    shares = [capacity.share_of(_shape_on(each, speculator, described), settings, each) for each in devices]
    with_it = [share for share in shares if _shape_on(share.devices, speculator, described) is not described.shape]
    if with_it and not any(share.fits for share in with_it):
        plain = [capacity.share_of(described.shape, settings, each) for each in devices]
        if any(share.fits for share in plain):  # a node drops the predictor in this case, too
            why = "with it the model would not fit"
            speculator, shares = speculators.prompt_lookup(described.shape, "", why), plain
    need, plain_need = (capacity.model_need(shape, settings) for shape in (speculator.shape, described.shape))
    need = replace(need, num_parameters=plain_need.num_parameters, active_parameters=plain_need.active_parameters)
    predictor = capacity.predictor_need(described.shape, speculator.shape, settings, kind)
    if options.json:
        print(json.dumps(_as_json(described, settings, need, shares, speculator, predictor), indent=1))
    else:
        _tell(described, settings, need, shares, memory_bytes, speculator, predictor)
    if not shares or any(share.fits for share in shares):
        return EXIT_OK
    if not options.json:
        message = f"{options.config} does not fit on {options.devices}"
        raise CommandError(EXIT_NO_FIT, {"code": "would_not_fit", "message": message, "details": {}})
    return EXIT_NO_FIT


def _devices_by_default(kind: str, number: int, budget_bytes: int, shape: ModelShape) -> capacity.Devices:
    """Returns the description of `number` devices over which the model is split as the setting parallel = "auto" would split it.
    kind: the kind of device, such as "cuda". budget_bytes: the budget of each device."""
    how = division_over(shape, number) if number > 1 else ParallelConfig()
    return capacity.Devices(kind, number, budget_bytes, how.expert, how.pipeline)


def _shape_on(devices: capacity.Devices, speculator: speculators.Speculator, described: DescribedModel) -> ModelShape:
    """Returns the shape of the model as it is loaded on these devices. On one device it includes the predictor that the speculator
    uses, if any; a model that is split over several devices has no predictor."""
    return described.shape if devices.num_devices > 1 else speculator.shape


def _described(folder: str) -> DescribedModel:
    if Path(folder).is_file():
        raise _usage(f"--config {folder}: is a file; name the folder in which the model's config.json lies")
    try:
        return described_model(Path(folder))
    except CheckpointError as error:
        raise _unusable(folder, error) from None
    except OSError as error:
        raise _usage(f"--config {error.filename or folder}: {error.strerror}") from None


def _unusable(folder: str, error: CheckpointError) -> CommandError:
    return CommandError(EXIT_NO_FIT, {"code": "model_unusable", "message": f"{folder}: {error}", "details": {}})


def _speculator(
    options: argparse.Namespace, described: DescribedModel, kind: str, division: ParallelConfig | None
) -> speculators.Speculator:
    """Returns the speculator of the model on devices of this kind, as the option --speculator asks. division: how the model is
    split over devices; None: not at all. Raises CommandError for a speculator that the model or the devices do not allow."""
    heads, folder = {}, options.speculator
    if folder not in speculators.KINDS:
        try:
            heads[folder] = catalog.scan_one(folder)
        except OSError:
            heads.clear()
        if not heads or heads[folder].head is None:
            fault = heads[folder].fault if heads else ""
            allowed = f"one of {', '.join(speculators.KINDS)}, or the folder of an EAGLE-3 head"
            raise _usage(f"--speculator: {allowed}, not {folder!r}{f': {fault}' if fault else ''}")
    settings, kinds = ModelConfig(speculator=folder, parallel=division), {kind} - {""}
    model = catalog.Checkpoint(options.config, options.config, shape=described.shape)
    choice = speculators.Choice(settings, described, described.shape, kinds, model, heads)
    if why := choice.why_not():
        message = f"{options.config}: --speculator {options.speculator}: {why}"
        raise CommandError(EXIT_NO_FIT, {"code": "model_unusable", "message": message, "details": {}})
    return choice.chosen()


def _devices(text: str) -> tuple[str, int, int]:
    """Returns (kind, number, bytes of memory of each) of the devices in `text`, the value of --devices, such as cuda=8x80GiB.
    Raises CommandError for another form."""
    form = "--devices: as in cuda=8x80GiB, cuda=80GiB or cpu=64GiB"
    match = _DEVICES.match(text)
    if match is None:
        raise _usage(f"{form}; not {text!r}")
    try:
        memory_bytes = units.parse_bytes(match[3])
    except ValueError as error:
        raise _usage(f"{form}; {match[3]!r} {error}") from None
    num_devices = int(match[2] or 1)
    if not 1 <= num_devices <= _MOST_DEVICES:
        raise _usage(f"{form}; from 1 to {_MOST_DEVICES} devices, not {num_devices}")
    return match[1], num_devices, memory_bytes


def _division(options: argparse.Namespace, num_devices: int) -> ParallelConfig | None:
    """Returns how --tensor, --expert and --pipeline divide the model over devices; None without these options. num_devices: the
    devices that --devices names. Raises CommandError for another number of devices."""
    given = {name: number for name in ("tensor", "expert", "pipeline") if (number := getattr(options, name)) is not None}
    if not given:
        return None
    told = ", ".join(f"--{name} {number}" for name, number in given.items())
    if min(given.values()) < 1:
        raise _usage(f"{told}: at least 1")
    division = ParallelConfig(**given)
    if division.num_devices != num_devices:
        there = f"--devices names {num_devices}" if num_devices else "--devices names none"
        raise _usage(f"{told}: for {division.num_devices} devices, and {there}")
    return division


def _check_division(
    options: argparse.Namespace,
    shape: ModelShape,
    settings: capacity.Settings,
    devices: capacity.Devices,
    division: ParallelConfig,
) -> None:
    """Raises CommandError if a node with these devices cannot split the model by `division`."""
    asked = ModelConfig(
        quantize=options.quantize,
        resident=options.resident,
        speculator=options.speculator,
        kv_cache_dtype=options.kv_cache_dtype,
        parallel=division,
    )
    why = parallel.problem(asked, [f"{devices.kind}:{number}" for number in range(devices.num_devices)])
    if why := f"parallel: {why}" if why else capacity.why_not_split(shape, settings, devices):
        raise CommandError(EXIT_NO_FIT, {"code": "model_unusable", "message": f"{options.config}: {why}", "details": {}})


def _settings(options: argparse.Namespace, shape: ModelShape, kind: str) -> capacity.Settings:
    """Returns the settings with which a node with devices of this kind would run the model: the options, and defaults for those
    that are not given. Raises CommandError for a value that the model or the devices do not allow."""
    node = NodeConfig(**({} if kind == "cpu" else CUDA_DEFAULTS))
    longest = shape.max_position_embeddings
    max_model_len = longest if options.max_model_len is None else options.max_model_len
    if not 1 <= max_model_len <= longest:
        raise _usage(f"--max-model-len: from 1 to the checkpoint's {longest}, not {max_model_len}")
    for option, value, allowed in (
        ("--dtype", options.dtype, DTYPES),
        ("--kv-cache-dtype", options.kv_cache_dtype, ("auto", *KV_CACHE_DTYPES)),
    ):
        if value not in allowed:
            raise _usage(f"{option}: one of {', '.join(allowed)}, not {value!r}")
    max_sequences = ModelConfig().max_sequences if options.max_sequences is None else options.max_sequences
    if max_sequences < 1:
        raise _usage(f"--max-sequences: at least 1, not {max_sequences}")
    try:
        weight_format = held_format(shape, options.quantize, options.resident)
    except ValueError as error:
        raise _usage(f"--{error}") from None
    dtype = computed_dtype(options.dtype, shape.dtype, (kind,))
    kv_cache_dtype = asked_kv_cache_dtype(options.kv_cache_dtype)
    kv_dtype = kv_dtype_named(kv_dtype_of(dtype, kv_cache_dtype))
    unlike_resident = why_not_resident(options.resident, shape, dtype)
    unbuilt_experts = weight_format.unbuilt_experts(shape)
    for refused, why in (
        (unlike_resident, f"--resident: {unlike_resident}"),
        (bool(kind) and not weight_format.runs_on(kind), f"{weight_format.name} is not built for {kind} devices"),
        (shape.is_encoder and kind == "cuda", "encoders are not built for cuda devices"),
        (shape.is_encoder and not weight_format.runs_encoders, f"{weight_format.name} is not built for encoders"),
        (unbuilt_experts, f"{weight_format.name} is not built for {unbuilt_experts}"),
        (kind and not kv_dtype.runs_on(kind), f"--kv-cache-dtype {kv_dtype.about_devices}"),
    ):
        if refused:
            raise CommandError(EXIT_NO_FIT, {"code": "model_unusable", "message": f"{options.config}: {why}", "details": {}})
    return capacity.Settings(
        dtype=dtype,
        weight_format=weight_format,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=max_model_len,
        max_sequences=max_sequences,
        max_num_batched_tokens=node.max_num_batched_tokens,
        block_tokens=node.block_tokens,
        chunk_bytes=units.parse_bytes(node.chunk_bytes),
    )


def _as_json(
    described: DescribedModel,
    settings: capacity.Settings,
    need: capacity.ModelNeed,
    shares: list[capacity.Share],
    speculator: speculators.Speculator,
    predictor: capacity.PredictorNeed | None,
) -> dict[str, Any]:
    named = {**asdict(replace(settings, weight_format=FORMATS[""])), "weight_format": settings.weight_format.name}
    return {
        "architecture": described.shape.architecture,
        "pooling": described.shape.pooling,
        "source": described.source,
        "settings": named,
        **asdict(need),
        "speculator": speculator.name,
        "predictor": None if predictor is None else asdict(predictor),
        "no_predictor": speculator.why_not,
        "notes": described.notes,
        "shares": [{**asdict(share), "fits": share.fits} for share in shares],
    }


def _tell(
    described: DescribedModel,
    settings: capacity.Settings,
    need: capacity.ModelNeed,
    shares: list[capacity.Share],
    memory_bytes: int,
    speculator: speculators.Speculator,
    predictor: capacity.PredictorNeed | None,
) -> None:
    of_token = f", {_count(need.active_parameters)} for a token" if need.active_parameters < need.num_parameters else ""
    held = f"{settings.weight_format.name} matrices, the rest {settings.dtype}" if settings.weight_format.name else settings.dtype
    print(f"{described.shape.architecture}, {_count(need.num_parameters)} parameters{of_token}: {_SOURCES[described.source]}")
    if described.shape.pooling:
        print(f"embeddings  of {described.shape.hidden_size} numbers, and no text")
    print(f"weights     {size(need.weights_bytes)} ({held})")
    for number, kv in enumerate(need.kv):
        seen = _SEEN.get(kv.kind, "all tokens").format(kv.window_tokens)
        held = f"{size(kv.token_bytes)} a token in {kv.num_layers} layers that see {seen}"
        if kv.state_bytes:
            held = f"{size(kv.state_bytes)} a state in {kv.num_layers} layers, of which a request keeps two"
        print(f"{'KV' if not number else '':12}{held}")
    if need.kv:
        print(f"{'':12}{size(need.sequence_bytes)} for one request of {settings.max_model_len} tokens{_fp8(settings)}")
    if predictor is not None:
        own = f"{size(predictor.weights_bytes)} of the weights, {size(predictor.kv_token_bytes)} of a token's KV"
        print(f"predictor   {own}, {size(predictor.work_space_bytes)} of a step's work space (speculator {speculator.name})")
    elif speculator.why_not:
        print(f"predictor   not counted: {speculator.why_not}")
    for note in described.notes:
        print(f"note        {note}")
    for share in shares:
        _tell_share(share, settings, memory_bytes)
    if (last := shares[-1:]) and last[0].devices.num_devices > 1:
        print(f"\n{_how_split(last[0])}")


def _how_split(share: capacity.Share) -> str:
    """Returns text on how the setting `parallel` would split the model over its devices, or why the model cannot be split. share:
    the memory that the model takes on each of the devices, with the division over them."""
    if share.not_split:
        return f"{share.not_split}; over several devices, these are the sums of tensor parallelism"
    division = share.devices.division
    keys = parallel.keys_text(ParallelConfig(division.inner_parts, division.expert_parts, division.num_stages))
    return f"split so by parallel = {{ {keys} }} in the model's table; without it a model is on one device"


def _fp8(settings: capacity.Settings) -> str:
    return f", as {settings.kv_cache_dtype}" if settings.kv_cache_dtype else ""


def _tell_share(share: capacity.Share, settings: capacity.Settings, memory_bytes: int) -> None:
    devices = share.devices
    number = devices.num_devices
    where, each = (f"one {devices.kind} device", "") if number == 1 else (f"{number} {devices.kind} devices", " on each")
    print(f"\n{where} of {size(memory_bytes)}: {'fits' if share.fits else 'does not fit'}")
    if devices.budget_bytes < memory_bytes:
        print(f"            {size(memory_bytes - devices.budget_bytes)}{each} for the CUDA context and what the driver keeps")
    print(f"            {size(share.weights_bytes)}{each} for weights")
    steps = f"steps of {settings.max_num_batched_tokens} tokens and {settings.max_sequences} requests"
    print(f"            {size(share.work_space_bytes)}{each} for {steps}")
    if share.free_bytes < 0:
        print(f"            {size(-share.free_bytes)}{each} too little")
    elif not share.sequence_bytes:
        print(f"            {size(share.free_bytes)}{each} are left")
    else:
        longest = "of any length" if share.tokens is None else f"{share.tokens} tokens, or"
        left = f"{size(share.free_bytes * number)} are left for KV" + (f", {size(share.free_bytes)}{each}" if each else "")
        print(f"            {left}: {longest} {share.sequences} requests of {settings.max_model_len} tokens")


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


def _usage(message: str) -> CommandError:
    return CommandError(EXIT_USAGE, {"code": "invalid_request", "message": message, "details": {}})
