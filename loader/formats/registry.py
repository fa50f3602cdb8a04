"""Lists the weight formats that are served: every WeightFormat that this module imports, either directly or within a tuple."""

from __future__ import annotations

from loader.formats.int8 import INT8
from loader.formats.mxfp4 import MXFP4
from loader.formats.packed_in_memory import PACKED_IN_MEMORY
from loader.formats.plain import PLAIN
from loader.formats.stored_awq import STORED_AWQ
from loader.formats.stored_fp8 import STORED_FP8
from loader.formats.stored_gptq import STORED_GPTQ
from loader.formats.stored_int4 import STORED_INT4
from loader.formats.stored_int8 import STORED_INT8
from loader.formats.stored_nvfp4 import STORED_NVFP4
from loader.formats.weight_format import WeightFormat
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ModelShape

_IMPORTED = [one for value in list(vars().values()) for one in (value if isinstance(value, tuple) else (value,))]
FORMATS = {one.name: one for one in _IMPORTED if isinstance(one, WeightFormat)}
CONFIG_KEY = "quantization_config"
AS_STORED = "plain"  # the value of `resident` that asks for no format


def asked_format(quantize: str | None, resident: str = AS_STORED) -> WeightFormat:
    """Returns the weight format that a model's settings `quantize` and `resident` ask for; PLAIN if they ask for none. Raises
    ValueError for a value that names no format, or if both settings ask for one."""
    if resident != AS_STORED and quantize not in PLAIN.settings:
        raise ValueError(f"quantize: {quantize} does not go with resident = {resident!r}; leave one of them out")
    for one in FORMATS.values():
        if one.resident == resident != "" if resident != AS_STORED else quantize in one.settings:
            return one
    key, value = ("quantize", quantize) if resident == AS_STORED else ("resident", resident)
    raise ValueError(f"{key}: {value!r} is no weight format")


def held_format(shape: ModelShape, quantize: str | None, resident: str = AS_STORED) -> WeightFormat:
    """Returns the weight format in which a model is held in memory: that of its checkpoint if the checkpoint is quantised, else the
    one that the settings `quantize` and `resident` ask for. Raises ValueError for a setting that names no format, or if both
    settings ask for one."""
    return stored_format(shape) if shape.stored_format else asked_format(quantize, resident)


def why_not_resident(resident: str, shape: ModelShape, dtype: str) -> str:
    """Returns why a model cannot be held in memory as the setting `resident` says, whatever the device; "" if it can. dtype: the
    dtype in which the model is computed."""
    if resident == AS_STORED:
        return ""
    if shape.stored_format:
        return f"its checkpoint is quantised ({stored_format(shape).title}), and {resident} is for bfloat16 weights; leave it out"
    if dtype != "bfloat16":
        advice = 'leave it out, or set dtype = "bfloat16"'
        return f"{resident} is for bfloat16 weights, and this model is computed in {dtype}; {advice}"
    return ""


def stored_format(shape: ModelShape) -> WeightFormat:
    """Returns the weight format of a model's checkpoint; PLAIN if it is not quantised."""
    return FORMATS[shape.stored_format]


def recognised_format(fields: Fields, key: str = CONFIG_KEY) -> str:
    """Returns the name of the weight format in which a checkpoint stores its matrices, according to its configuration; "": plain.
    fields: a JSON object of the configuration, which describes the format under `key`. Raises UnsupportedModel for a format or a
    setting that is not served."""
    config = fields.values.get(key)
    if config is None or config == {}:
        return PLAIN.name
    if not isinstance(config, dict):
        raise fields.fail(key, "is no object")
    for one in FORMATS.values():
        if one.recognises is not None and one.recognises(config):
            return one.name
    for one in FORMATS.values():
        if (refusal := one.refuses(config)) is not None:
            setting, why = refusal
            raise fields.unsupported(f"{key}.{setting}", why)
    method, form = str(config.get("quant_method"))[:64], str(config.get("format", ""))[:64]
    served = "; ".join(dict.fromkeys(one.title for one in FORMATS.values() if one.title))
    raise fields.unsupported(key, f"{f'{method} {form}'.strip()!r} with these settings is not served; served: {served}")
