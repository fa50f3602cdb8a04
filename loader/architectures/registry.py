"""Lists the families that are served, one line each. Error messages and docs/reference/models.md use the same order."""

from __future__ import annotations

from importlib import import_module

from loader.architectures.architecture import Architecture
from loader.architectures.decoder import Decoder
from loader.architectures.wrapper import Wrapper
from loader.shapes.config_fields import Fields
from loader.shapes.model_shape import ModelShape

_FILES = (  # files of this folder; each holds its description as ARCHITECTURE
    "llama",
    "mistral",
    "qwen2",
    "qwen3",
    "phi",
    "phi3",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_unified",
    "olmo2",
    "olmo3",
    "glm",
    "glm4",
    "smollm3",
    "seed_oss",
    "granite",
    "cohere",
    "cohere2",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "glm4_moe",
    "glm4_moe_lite",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "llama4",
    "gemma3_wrapper",
    "gemma4_wrapper",
    "gemma4_unified_wrapper",
    "mistral3_wrapper",
    "kimi_k25_wrapper",
    "qwen3_5_wrapper",
    "qwen3_5_moe_wrapper",
    "llama4_wrapper",
    "bert",
    "xlm_roberta",
    "roberta",
    "modernbert",
    "bert_reranker",
    "xlm_roberta_reranker",
    "roberta_reranker",
    "modernbert_reranker",
)
_DESCRIPTIONS: list[Architecture] = [import_module(f"loader.architectures.{file}").ARCHITECTURE for file in _FILES]
ARCHITECTURES = {one.name: one for one in _DESCRIPTIONS}
_HEADED = "ForCausalLM"
# by the name in config.json of a decoder without a head, such as Qwen3Model
_HEADLESS = {f"{one.name.removesuffix(_HEADED)}Model": one for one in _DESCRIPTIONS if isinstance(one, Decoder)}
_LIKENESS = 0.7  # difflib's ratio: "Qwen4" is like "Qwen3", and "Mamba" is not like "Llama"


def architecture_of(shape: ModelShape) -> Architecture:
    """Returns the description of the family to which a model of this shape belongs."""
    return ARCHITECTURES[shape.architecture]


def expert_size_key(shape: ModelShape) -> str:
    """Returns the key of config.json that gives the intermediate size of an expert. shape: that of a model with experts."""
    family = architecture_of(shape)
    assert isinstance(family, Decoder | Wrapper)
    experts = family.decoder_of(shape).experts
    assert experts is not None
    return experts.size_key


def named_architecture(fields: Fields) -> tuple[Architecture, bool]:
    """Returns (the family that config.json names, whether config.json names the decoder alone, without its head). Raises
    UnsupportedModel for another family, with a list of the supported ones and the most similar name, and CheckpointError if
    config.json names none."""
    listed = fields.values.get("architectures")
    if isinstance(listed, list) and listed:
        name = str(listed[0])
    else:
        model_type = fields.values.get("model_type")
        if model_type is None:
            raise fields.fail("architectures", "missing")
        name = next((one.name for one in ARCHITECTURES.values() if one.model_type == model_type != ""), str(model_type))
    if name in _HEADLESS:
        return _HEADLESS[name], True
    if name not in ARCHITECTURES:
        supported = ", ".join(ARCHITECTURES)
        raise fields.unsupported("architectures", f"{name!r} is not supported{_nearest(name)}; supported: {supported}")
    return ARCHITECTURES[name], False


def _nearest(name: str) -> str:
    """Returns a clause for an error message that names the supported architecture whose name is most similar to `name`; "" if none
    is similar."""
    from difflib import get_close_matches  # needed only when there is an error

    own = _family(name)
    found = get_close_matches(own, map(_family, ARCHITECTURES), 1, _LIKENESS)
    if not found:
        return ""
    alike = [one for one in ARCHITECTURES if _family(one) == found[0]]
    nearest = found[0] + name.removeprefix(own)  # with the same end
    return f" (the nearest that is: {nearest if nearest in alike else alike[0]})"


def _family(name: str) -> str:
    """Returns an architecture's name without an ending such as ForCausalLM. Names are compared without their endings, because most
    endings are alike."""
    return name.partition("For")[0].removesuffix("Model").removesuffix("LMHead")
