"""Defines the facts about a registered model that requests and loads need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.exchange import GroupForm


@dataclass(slots=True, frozen=True)
class ServedAdapter:
    """A LoRA adapter that can be served. name: the name that requests use for it. path: the folder of its files. created: Unix time
    in seconds. rank: the largest rank of its matrices. num_bytes: the size of its tensors in the file."""

    name: str
    path: str
    fingerprint: str
    aliases: tuple[str, ...]
    created: int
    rank: int
    num_bytes: int


@dataclass(slots=True)
class ModelEntry:
    """A registered model with the facts that requests need. Each model has one entry, which the registry replaces when files or
    settings change. The entry of an adapter is a copy of its base model's entry with `adapter` set. The scheduler and all counters
    use `name`; clients see `own_name`."""

    name: str
    path: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    created: int  # Unix seconds: mtime of config.json
    fingerprint: str
    text_id: str = ""  # changes whenever the tokenizer's files or the chat template change
    generation_defaults: dict[str, float | int] = field(default_factory=dict)  # generation_config.json, overridden by `sampling`
    chat_template: str | None = None  # set in the config (a file path or text); None: the checkpoint's
    max_sequences: int = 256
    tool_parser: str | None = None  # named in daemon/text/tool_parsers/registry.py; None: chosen by the chat template
    reasoning_parser: str | None = None
    embedding_size: int = 0  # the size of its embeddings, for an embedding model; else 0
    cut_sizes: Sequence[int] = ()  # smaller sizes to which its embeddings may be cut
    scoring: str = ""  # for a cross-encoder, which only scores pairs of texts: how a score becomes a relevance (ModelShape.scoring)
    architecture: str = ""  # the architecture's name in config.json
    dtype: str = ""  # of the weights in memory
    quantize: str = ""  # weight format (loader/formats) of the layers' matrices if they are quantised; "": they are not
    weights_bytes: int = 0  # bytes in memory, on all devices together
    num_parameters: int = 0
    speculator: str = "none"  # how tokens are drafted for its requests, as in LoadModel.speculator
    head: str = ""  # the name of the EAGLE-3 head that drafts, "" for none
    head_path: str = ""
    has_replicas: bool = False  # whether the settings and devices allow it several replicas
    upstream: str = ""  # host and port of the server that answers for this name; "": this node answers
    adapter: ServedAdapter | None = None  # the adapter with which the model answers; None: it answers without one

    @property
    def own_name(self) -> str:
        """The name that clients see in lists and answers: the adapter's name if there is an adapter, otherwise the model's."""
        return self.name if self.adapter is None else self.adapter.name

    @property
    def own_aliases(self) -> tuple[str, ...]:
        return self.aliases if self.adapter is None else self.adapter.aliases

    @property
    def own_created(self) -> int:
        """The Unix time, in seconds, at which the configuration of the model, or of its adapter, was written."""
        return self.created if self.adapter is None else self.adapter.created

    @property
    def identity(self) -> tuple[str, str]:
        """The name that clients see, and a text (fingerprint) that changes whenever the files from which answers are computed
        change."""
        adapter = self.adapter
        return self.own_name, self.fingerprint if adapter is None else f"{self.fingerprint}+{adapter.fingerprint}"

    @property
    def generates_text(self) -> bool:
        return not self.embedding_size and not self.scoring

    @property
    def does(self) -> str:
        """The model's task in words that complete a sentence about it, such as "generates text". Used in the error for a request
        that asks for another task."""
        if self.scoring:
            return "is a cross-encoder: it scores documents for a query"
        return "makes embeddings" if self.embedding_size else "generates text"

    @property
    def task(self) -> str:
        """The model's task: "generate" (text), "embed" (vectors) or "score" (pairs of texts)."""
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
    form: GroupForm | None = None  # the division over devices; None: the model is on one device
