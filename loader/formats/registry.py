"""Lists the weight formats."""

from __future__ import annotations

from loader.config_fields import Fields
from loader.formats.int8 import INT8
from loader.formats.mxfp4 import MXFP4
from loader.formats.plain import PLAIN
from loader.formats.stored_awq import STORED_AWQ
from loader.formats.stored_fp8 import STORED_FP8
from loader.formats.stored_gptq import STORED_GPTQ
from loader.formats.stored_int4 import STORED_INT4
from loader.formats.stored_int8 import STORED_INT8
from loader.formats.stored_nvfp4 import STORED_NVFP4
from loader.formats.weight_format import WeightFormat
from loader.model_shape import ModelShape

FORMATS = {
    one.name: one for one in (PLAIN, INT8, STORED_INT8, *STORED_FP8, *STORED_INT4, *STORED_GPTQ, *STORED_AWQ, MXFP4, *STORED_NVFP4)
}
CONFIG_KEY = "quantization_config"


def asked_format(quantize: str | None) -> WeightFormat:
    """Returns the format that a value of the setting `quantize` asks for. Raises ValueError if there is none."""
    for one in FORMATS.values():
        if quantize in one.settings:
            return one
    raise ValueError(f"quantize: {quantize!r} is no weight format")


def held_format(shape: ModelShape, quantize: str | None) -> WeightFormat:
    """Returns the weight format in which a model is held in memory: its checkpoint's own if that is quantised, else the one that
    the setting `quantize` asks for. Raises ValueError if there is no such format."""
    return stored_format(shape) if shape.stored_format else asked_format(quantize)


def stored_format(shape: ModelShape) -> WeightFormat:
    """Returns the weight format of a model's checkpoint; PLAIN if it is not quantised."""
    return FORMATS[shape.stored_format]


def recognised_format(fields: Fields, key: str = CONFIG_KEY) -> str:
    """Returns the name of the weight format in which a checkpoint stores its matrices by its configuration; "": plain. fields: the
    object that holds the description of the format under `key`. Raises UnsupportedModel for a format or a setting that is not
    served."""
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
