"""A registered model as requests and loads see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.exchange import GroupForm


@dataclass(slots=True, frozen=True)
class ServedAdapter:
    """A LoRA adapter that can be served. name: its path below the models folder. created: Unix seconds. rank: the largest of a
    matrix. num_bytes: of its tensors in the file."""

    name: str
    path: str
    fingerprint: str
    aliases: tuple[str, ...]
    created: int
    rank: int
    num_bytes: int


@dataclass(slots=True)
class ModelEntry:
    """A registered model as requests see it. Each name has one object, replaced by the registry when files or settings change. An
    adapter's is its base's with `adapter` set; what is counted, and the scheduler, go by `name`, clients see own_name."""

    name: str
    path: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    created: int  # Unix seconds: mtime of config.json
    fingerprint: str
    generation_defaults: dict[str, float | int] = field(default_factory=dict)  # generation_config.json, overridden by `sampling`
    chat_template: str | None = None  # set in the config (a file path or text); None: the checkpoint's
    max_sequences: int = 256
    tool_parser: str | None = None  # named in daemon/text/tool_parsers/registry.py; None: chosen by the chat template
    reasoning_parser: str | None = None
    embedding_size: int = 0  # of a model that makes embeddings and nothing else; 0: it makes none
    cut_sizes: Sequence[int] = ()  # smaller sizes that its embeddings may be cut to
    scoring: str = ""  # a cross-encoder's, which only scores pairs of texts: what makes a score's relevance (ModelShape.scoring)
    architecture: str = ""  # as config.json names it
    dtype: str = ""  # of its weights in memory
    quantize: str = ""  # "int8" if the layers' matrices are quantised
    weights_bytes: int = 0  # in memory, on all devices together
    num_parameters: int = 0
    speculator: str = "none"  # what drafts tokens for its requests, as LoadModel.speculator has it
    head: str = ""  # the EAGLE-3 head that does
    head_path: str = ""
    upstream: str = ""  # host and port of the server that answers for this name; "": this node does
    adapter: ServedAdapter | None = None  # with which the model answers; None: it answers alone

    @property
    def own_name(self) -> str:
        """What lists and answers call it: the adapter's name, or else the model's."""
        return self.name if self.adapter is None else self.adapter.name

    @property
    def own_aliases(self) -> tuple[str, ...]:
        return self.aliases if self.adapter is None else self.adapter.aliases

    @property
    def identity(self) -> tuple[str, str]:
        """Its own name, and a text that changes with the files that its answers come from."""
        adapter = self.adapter
        return self.own_name, self.fingerprint if adapter is None else f"{self.fingerprint}+{adapter.fingerprint}"

    @property
    def generates_text(self) -> bool:
        return not self.embedding_size and not self.scoring

    @property
    def does(self) -> str:
        """What the model does, to follow its name in a refusal of something else."""
        if self.scoring:
            return "is a cross-encoder: it scores documents for a query"
        return "makes embeddings" if self.embedding_size else "generates text"

    @property
    def task(self) -> str:
        """What the model does, as Submit.task names it."""
        if self.scoring:
            return "score"
        return "embed" if self.embedding_size else "generate"


@dataclass(slots=True, frozen=True)
class LoadSource:
    """The part of a LoadModel message that does not come from the scheduler: the model's files and settings."""

    path: str
    dtype: str
    entry: ModelEntry
    quantize: str = ""
    kv_cache_dtype: str = ""
    form: GroupForm | None = None  # of the devices that the model is split over; None: it is on one
