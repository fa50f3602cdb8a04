"""Defines the registry's record of one model name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from daemon.models.entry import ModelEntry
from loader.configs.kernel_needs import needed_kernels
from loader.configs.kernel_sets import KernelSet
from loader.formats.registry import FORMATS
from loader.models import catalog
from loader.shapes.model_shape import Division, ModelShape
from loader.sizes.layout import num_parameters
from scheduler.node import events

_WHOLE = Division(1)
_TOKENIZER = "tokenizer.json"


@dataclass(slots=True, frozen=True)
class Registered:
    """The registry's record of one model. facts: what the scheduler knows about it. entry: what requests need to know about it;
    None if it cannot be served, and then `problem` tells why."""

    checkpoint: catalog.Checkpoint
    facts: events.ModelFacts
    entry: ModelEntry | None
    dtype: str
    problem: str
    quantize: str = ""  # weight format (loader/formats) of the layers' matrices in memory; "": plain
    kv_cache_dtype: str = ""  # "fp8"; "": keys and values are kept in dtype
    shape: ModelShape | None = None  # the shape that is loaded: the checkpoint's, or that with its predictor
    division: Division = _WHOLE  # the division over devices
    replicas: tuple[events.ModelFacts, ...] = ()  # facts of further replicas
    # Number of further experts in each layer of a share -> the most bytes of its weights; for the numbers that loads may take.
    bytes_with_copies: Mapping[int, int] = field(default_factory=dict)
    missing_template: str = ""  # the file that the setting chat_template names, if it is not there
    missing_replicas: str = ""  # a sentence about replicas that the settings ask for and no devices can hold; "": there are none

    @property
    def held_as(self) -> str:
        """Words that say how the model's matrices are held in memory: their weight format, such as "int4 by 128", or the dtype of
        plain ones."""
        return self.quantize or self.dtype

    @property
    def bits_per_weight(self) -> float | None:
        """The bits of memory per parameter of the model, on average: all that is loaded, scales included, divided by the number of
        parameters. None if that number is not known."""
        if self.shape is None or not (num := num_parameters(self.shape)):
            return None
        return round(8 * self.facts.weights_bytes * self.facts.num_ranks / num, 1)

    @property
    def has_tokenizer(self) -> bool:
        return _TOKENIZER in self.checkpoint.tokenizer_files

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for operators: which content of the model's files is not used, which files are missing, and which replicas the
        model cannot have."""
        notes = list(self.checkpoint.notes)
        if not self.has_tokenizer:
            notes.append(f"{_TOKENIZER} is missing, so it can read and write no text: copy it there from where the model came from")
        if self.missing_template:
            notes.append(f"chats are refused: its chat_template, {self.missing_template}, is not there")
        if self.missing_replicas:
            notes.append(self.missing_replicas)
        return tuple(notes)

    @property
    def kernels(self) -> list[KernelSet]:
        """The kernels that the model needs on a `cpu` device; empty if it cannot be served."""
        if self.shape is None:
            return []
        return needed_kernels(self.shape, self.dtype, FORMATS[self.quantize], is_split=self.division.size > 1)


def all_kernels(models: Sequence[Registered]) -> tuple[KernelSet, ...]:
    """Returns the kernels that the models need on `cpu` devices, each once; those of the dtype that most models have come first."""
    num_models = Counter(model.dtype for model in models)
    by_dtype = sorted(models, key=lambda model: -num_models[model.dtype])
    return tuple(dict.fromkeys(kernel_set for model in by_dtype for kernel_set in model.kernels))
