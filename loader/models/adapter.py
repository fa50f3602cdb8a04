"""Reads what the files of a LoRA adapter say: `adapter_config.json`, and the header of `adapter_model.safetensors`.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. Nothing here reads tensor data.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass

from loader.errors import CheckpointError, UnsupportedModel
from loader.files.safetensors import Header, TensorRef
from loader.shapes.config_fields import Fields, json_fields

CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
MAX_RANK = 256
MAX_ALPHA = 1_000_000
MAX_MODULES = 10_000  # the largest models have some 1,000 matrices besides those of experts
WEIGHT_DTYPES = ("F32", "BF16", "F16")
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
_NAME = re.compile(r"\^?(\w|-|\.|\\\.)+\$?", re.ASCII)
_DEFAULT = 8  # default of r and of lora_alpha, as in PEFT's LoraConfig
# Keys that ask for something other than W + scale * B A, with names for messages. The values false, null and empty ask for nothing.
_VARIANTS = {
    "use_dora": "DoRA",
    "lora_bias": "a bias of lora_B",
    "modules_to_save": "modules that are stored whole",
    "fan_in_fan_out": "matrices that are stored transposed",
    "trainable_token_indices": "tokens with embeddings of their own",
    "layer_replication": "layers that are used more than once",
    "target_parameters": "adapters of single parameters (experts)",
    "megatron_config": "adapters of Megatron's layers",
    "alora_invocation_tokens": "activated LoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "arrow_config": "Arrow",
    "kasa_config": "KaSA",
    "monteclora_config": "MonteCLoRA",
}
# values of init_lora_weights that change the base's own matrices, so that the adapter fits no other base
_CHANGES_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
# parts of tensors' names that mark a tensor as something other than lora_A or lora_B
_OTHER_TENSORS = {
    ".lora_embedding_A": "adapters of embeddings are not served",
    ".lora_embedding_B": "adapters of embeddings are not served",
    ".lora_magnitude_vector": "DoRA is not served",
    ".lora_A.bias": "a bias is not served",
    ".lora_B.bias": "a bias is not served",
}


@dataclass(slots=True, frozen=True)
class AdapterModule:
    """A module of an adapter: two matrices that change one matrix W [outputs, inputs] of the base model, to which scale * up @ down
    is added. name: the module's name; the base model's tensor has this name followed by ".weight". down: the tensor lora_A [rank,
    inputs]. up: the tensor lora_B [outputs, rank]."""

    name: str
    rank: int
    scale: float
    down: TensorRef
    up: TensorRef


@dataclass(slots=True, frozen=True)
class Adapter:
    """A LoRA adapter. base: the name or path of the model for which it was made, as its config gives it; "": the config gives none.
    modules: at least one, in the order of the file. digest: a hash of the config and of the weight file's header; adapters with
    equal digests have the same modules."""

    base: str
    modules: tuple[AdapterModule, ...]
    digest: str = ""

    @property
    def rank(self) -> int:
        """The largest LoRA rank of the adapter's modules."""
        return max(module.rank for module in self.modules)

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors of the adapter, as they are in the file."""
        return sum(module.down.num_bytes + module.up.num_bytes for module in self.modules)


def parse_adapter(config_text: bytes, header: Header) -> Adapter:
    """Returns the adapter that a folder's files describe. config_text: the content of adapter_config.json. header: the header of
    the weight file. Raises UnsupportedModel for an adapter of another kind, and CheckpointError for files that are not valid; both
    name the key of the config, or the file and tensor, that is at fault."""
    fields = json_fields(config_text, CONFIG_NAME)
    _refuse_variants(fields)
    base = fields.values.get("base_model_name_or_path")
    if base is not None and not isinstance(base, str):
        raise fields.fail("base_model_name_or_path", f"{base!r} is not a text")
    pairs = _pairs(header)
    ranks, alphas = _PerModule(fields, "r", "rank_pattern"), _PerModule(fields, "lora_alpha", "alpha_pattern")
    by_root = fields.boolean("use_rslora")
    modules = []
    for name, (down, up) in pairs.items():
        (rank, key), (alpha, _) = ranks.of(name), alphas.of(name)
        _check_tensors(down, up, int(rank), key)
        modules.append(AdapterModule(name, int(rank), alpha / (rank**0.5 if by_root else rank), down, up))
    return Adapter(base or "", tuple(modules), hashlib.blake2b(config_text + header.raw, digest_size=16).hexdigest())


def check_config(config_text: bytes) -> None:
    """Raises UnsupportedModel or CheckpointError if adapter_config.json alone shows that the adapter cannot be served. config_text:
    the file's content."""
    _refuse_variants(json_fields(config_text, CONFIG_NAME))


def _refuse_variants(fields: Fields) -> None:
    kind = fields.values.get("peft_type")
    if kind != "LORA":
        raise fields.unsupported("peft_type", f"{kind!r} is not supported; supported: 'LORA'" if kind is not None else "missing")
    for key, called in _VARIANTS.items():
        if fields.values.get(key) not in (None, False, [], {}, ""):
            raise fields.unsupported(key, f"{called}: not supported")
    if (bias := fields.values.get("bias")) not in (None, "none"):
        raise fields.unsupported("bias", f"{bias!r} is not supported; supported: 'none'")
    begun = fields.values.get("init_lora_weights")
    if isinstance(begun, str) and begun.lower().startswith(_CHANGES_BASE):
        why = "is for a base with other weights than the stored ones; save the adapter again as plain LoRA"
        raise fields.unsupported("init_lora_weights", f"{begun!r} {why}")


def _pairs(header: Header) -> dict[str, tuple[TensorRef, TensorRef]]:
    """Returns the tensors of all modules of an adapter: the module's name in the base model -> (lora_A, lora_B). header: the header
    of the adapter's weight file. Raises UnsupportedModel for a tensor of another kind. Raises CheckpointError for a tensor whose
    counterpart is missing, whose dtype is not supported, or that is packed, and if there are no modules or too many."""
    downs, ups = dict[str, TensorRef](), dict[str, TensorRef]()
    for tensor in header.tensors:
        for half, suffix in ((downs, _DOWN), (ups, _UP)):
            if tensor.name.startswith(_PREFIX) and tensor.name.endswith(suffix):
                half[tensor.name.removeprefix(_PREFIX).removesuffix(suffix)] = tensor
                break
        else:
            raise UnsupportedModel(tensor.file, tensor.name, _what_else(tensor.name))
        if tensor.record is not None:
            raise CheckpointError(tensor.file, tensor.name, "is packed: adapters are read from plain files alone")
        if tensor.dtype not in WEIGHT_DTYPES:
            supported = ", ".join(WEIGHT_DTYPES)
            raise CheckpointError(tensor.file, tensor.name, f"dtype {tensor.dtype} is not supported here; supported: {supported}")
    for name, tensor in (downs | ups).items():
        if name not in downs or name not in ups:
            other = _UP if name in downs else _DOWN
            raise CheckpointError(tensor.file, tensor.name, f"there is no {other.removeprefix('.')} beside it")
    if not downs:
        raise CheckpointError(WEIGHTS_NAME, None, "holds no tensors")
    if len(downs) > MAX_MODULES:
        raise CheckpointError(WEIGHTS_NAME, None, f"adapts {len(downs)} modules (at most {MAX_MODULES})")
    return {name: (down, ups[name]) for name, down in downs.items()}


def _what_else(name: str) -> str:
    for part, why in _OTHER_TENSORS.items():
        if part in name:
            return why
    if not name.startswith(_PREFIX):
        return f"its name does not begin with {_PREFIX}"
    return "is neither lora_A.weight nor lora_B.weight of a module: matrices that are stored whole are not served"


def _check_tensors(down: TensorRef, up: TensorRef, rank: int, key: str) -> None:
    """Checks the two tensors of a module. Raises CheckpointError unless they are matrices of the given rank: down [rank, inputs],
    up [outputs, rank]. key: the key of the config that gives the rank."""
    for tensor, axis, wanted in ((down, 0, "[rank, inputs]"), (up, 1, "[outputs, rank]")):
        if len(tensor.shape) != 2 or 0 in tensor.shape:
            raise CheckpointError(tensor.file, tensor.name, f"has shape {list(tensor.shape)}, no {wanted}")
        if tensor.shape[axis] != rank:
            asked = f"{CONFIG_NAME} asks for rank {rank} ({key})"
            raise CheckpointError(tensor.file, tensor.name, f"has shape {list(tensor.shape)} {wanted}, {asked}")


class _PerModule:
    """A number that an adapter's config gives for all modules (under `key`) and differently for some modules by name (under
    `pattern_key`): the rank or alpha.

    PEFT reads such a name as a regular expression for the end of a module's full name, starting at the beginning of the full name
    or after a dot. PEFT and trainers write only plain names. Other expressions are refused with UnsupportedModel, because Python
    may take any time to match an expression from a file."""

    def __init__(self, fields: Fields, key: str, pattern_key: str) -> None:
        self._key, self._pattern_key = key, pattern_key
        self._usual = self._read(fields, key)
        given = fields.mapping(pattern_key) or Fields({}, fields.file)
        self._special: dict[str, tuple[int, str, float]] = {}  # name -> (place in the file, key, number)
        for place, each in enumerate(given.values):
            if not _NAME.fullmatch(each):
                raise fields.unsupported(pattern_key, f"{each!r} is an expression, and only names of modules are read")
            name = each.removesuffix("$").replace("\\.", ".")
            self._special.setdefault(name, (place, each, self._read(given, each)))

    def of(self, module: str) -> tuple[float, str]:
        """Returns (number, key) for a module. number: the module's rank if this object was made for the key `r`, its alpha if made
        for `lora_alpha`. key: the key of the config that gives the number. module: the module's full name.

        A name under `pattern_key` matches a module if it is the module's full name or the end of it after a dot; a name that begins
        with ^ must be the full name. If several names match, the first in the file counts. If none matches, the number is the one
        for all modules."""
        parts = module.split(".")
        names = [f"^{module}", *(".".join(parts[at:]) for at in range(len(parts)))]
        found = min((self._special[name] for name in names if name in self._special), default=None)
        return (self._usual, self._key) if found is None else (found[2], f"{self._pattern_key}.{found[1]}")

    def _read(self, fields: Fields, key: str) -> float:
        if self._key == "r":
            return fields.integer(key, _DEFAULT, at_most=MAX_RANK)
        alpha = fields.number(key, _DEFAULT)
        if not 0 < alpha <= MAX_ALPHA:
            raise fields.fail(key, f"{alpha} is out of range (above 0, to {MAX_ALPHA})")
        return alpha
