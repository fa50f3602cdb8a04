"""Reads config.json and generation_config.json of a Hugging Face folder, as transformers 5 writes them (with `rope_parameters` and
`dtype`) and as earlier versions do (with `rope_theta`, `rope_scaling` and `torch_dtype`). If config.json does not say how matrices
are quantised, hf_quant_config.json may say it. loader/architectures describes what each family reads from config.json.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from loader.architectures import eagle
from loader.architectures.registry import named_architecture
from loader.architectures.wrapper import TEXT_KEY, Wrapper
from loader.formats import modelopt
from loader.formats.left_plain import left_plain
from loader.formats.registry import CONFIG_KEY, FORMATS, recognised_format
from loader.shapes.config_fields import Fields, json_fields
from loader.shapes.model_shape import OPTIONAL_STACKS, ModelShape

CONFIG_NAME = "config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
QUANT_CONFIG_NAME = modelopt.QUANT_CONFIG_NAME


@dataclass(slots=True, frozen=True)
class GenerationDefaults:
    """The token ids that begin and end texts, and the sampling settings that the checkpoint's authors recommend. A setting for
    which they recommend nothing is None."""

    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


def parse_config(text: bytes, file: str = CONFIG_NAME, quant_text: bytes | None = None) -> ModelShape:
    """Returns the model's shape from its configuration. text: the content of config.json. file: the file's name in errors.
    quant_text: the content of hf_quant_config.json; None: there is no such file. Raises UnsupportedModel if the architecture, the
    activation, the kind of rotary embedding or of layers, or the weight format is not served, and CheckpointError, which names the
    key, for a wrong value."""
    fields = json_fields(text, file)
    architecture, headless = named_architecture(fields)
    shape = architecture.parse(fields)
    if headless:
        shape = replace(shape, named_headless=True)
    fields = _quantised(fields, isinstance(architecture, Wrapper))
    stored = recognised_format(*_said_by(fields, quant_text))
    if stored and shape.is_encoder and not FORMATS[stored].runs_encoders:
        raise fields.unsupported(CONFIG_KEY, "quantised encoders are not served")
    if stored and shape.experts is not None and not FORMATS[stored].runs_experts:
        raise fields.unsupported(CONFIG_KEY, f"mixtures of experts are not served as {FORMATS[stored].title}")
    FORMATS[stored].check(fields, shape)
    if stored and shape.experts is not None and shape.experts.stack in OPTIONAL_STACKS:  # quantised experts are stored one by one
        shape = replace(shape, experts=replace(shape.experts, stacked=False))
    return replace(shape, stored_format=stored) if stored else shape


def check_config(text: bytes, quant_text: bytes | None) -> None:
    """Checks that a config.json describes a model that is served, or a head that drafts tokens for such a model. text: the content
    of config.json. quant_text: the content of hf_quant_config.json; None: there is no such file. Raises UnsupportedModel or
    CheckpointError, which name the key at fault, if config.json describes neither of the two."""
    if eagle.is_head(fields := json_fields(text, CONFIG_NAME)):
        eagle.parse_head(fields, None)
    else:
        parse_config(text, quant_text=quant_text)


def _quantised(fields: Fields, is_wrapper: bool) -> Fields:
    """Returns the object in which the key `quantization_config` is to be looked up. It is config.json itself or, if config.json
    lacks the key and is that of a wrapper (a decoder beside other encoders), its object text_config. is_wrapper: whether
    config.json is that of a wrapper."""
    if not is_wrapper or fields.has(CONFIG_KEY):
        return fields
    return fields.mapping(TEXT_KEY) or fields


def _said_by(fields: Fields, quant_text: bytes | None) -> tuple[Fields, str]:
    """Returns (the object that describes how matrices are quantised, the key of the description in that object). The object is
    hf_quant_config.json if there is such a file and config.json has no description, else config.json. fields: config.json.
    quant_text: the content of hf_quant_config.json; None: there is no such file."""
    if quant_text is None or fields.has(CONFIG_KEY):
        return fields, CONFIG_KEY
    return modelopt.quant_config(quant_text), modelopt.QUANT_CONFIG_KEY


def plain_modules(text: bytes, file: str = CONFIG_NAME, quant_text: bytes | None = None) -> Callable[[str], bool]:
    """Returns a function that takes a module's name and returns whether the configuration of a quantised checkpoint leaves the
    module unquantised. text: the content of config.json. file: the file's name in errors. quant_text: the content of
    hf_quant_config.json; None: there is no such file. Raises CheckpointError, which names the key, for a value that is not
    valid."""
    fields = json_fields(text, file)
    fields = _quantised(fields, isinstance(named_architecture(fields)[0], Wrapper))
    own, key = _said_by(fields, quant_text)
    return left_plain(own.mapping(key) or Fields({}, file))


def parse_generation(config_text: bytes, generation_text: bytes | None) -> GenerationDefaults:
    """Returns the ids that begin and end texts and the recommended sampling settings. config_text: the content of config.json, used
    for ids that generation_config.json lacks. generation_text: the content of generation_config.json; None: there is no such file.
    Raises CheckpointError, which names file and key, for a value that is not valid."""
    config = json_fields(config_text, CONFIG_NAME)
    if not config.has("eos_token_id"):
        config = config.mapping(TEXT_KEY) or config
    if generation_text is None:
        return GenerationDefaults(config.ids("eos_token_id"), _first(config.ids("bos_token_id")))
    given = json_fields(generation_text, GENERATION_CONFIG_NAME)
    temperature = given.number("temperature") if given.has("temperature") else None
    top_p = given.number("top_p") if given.has("top_p") else None
    top_k = given.integer("top_k", at_least=0) if given.has("top_k") else None
    min_p = given.number("min_p") if given.has("min_p") else None
    if min_p is not None and not 0 <= min_p <= 1:
        raise given.fail("min_p", f"{min_p} is not from 0 to 1")
    if temperature is not None and temperature < 0:
        raise given.fail("temperature", f"{temperature} is negative")
    if top_p is not None and not 0 < top_p <= 1:
        raise given.fail("top_p", f"{top_p} is not above 0 and at most 1")
    return GenerationDefaults(
        eos_token_ids=given.ids("eos_token_id") or config.ids("eos_token_id"),
        bos_token_id=_first(given.ids("bos_token_id") or config.ids("bos_token_id")),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=given.positive("repetition_penalty") if given.has("repetition_penalty") else None,
    )


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None
