"""A registered model as requests and loads see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class ModelEntry:
    """A registered model as requests see it. One object per name; the registry replaces it when files or config change."""

    name: str
    path: str
    aliases: tuple[str, ...]
    max_model_len: int
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    created: int  # Unix seconds: mtime of config.json
    fingerprint: str
    generation_defaults: dict[str, float | int] = field(default_factory=dict)  # generation_config.json, then config `sampling`
    chat_template: str | None = None  # config's own (a file path or text); None: the checkpoint's
    max_sequences: int = 256
    tool_parser: str | None = None  # daemon/text/tool_parsers/registry.py; None: told by the chat template
    reasoning_parser: str | None = None
    embedding_size: int = 0  # of an encoder, which does nothing but embeddings; 0: it generates text
    cut_sizes: Sequence[int] = ()  # what its embeddings may be cut to, beside that


@dataclass(slots=True, frozen=True)
class LoadSource:
    """What LoadModel says beside the scheduler's figures."""

    path: str
    dtype: str
    entry: ModelEntry
    quantize: str = ""
    kv_cache_dtype: str = ""
