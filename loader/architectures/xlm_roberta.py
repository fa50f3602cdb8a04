"""Describes XLM-RoBERTa (BGE-M3, multilingual E5): BERT in which a text's first position is the id of padding plus 1."""

from __future__ import annotations

from loader.architectures.bert import Encoder

ARCHITECTURE = Encoder("XLMRobertaModel", "xlm-roberta", body="roberta.", pad_token_id=1)
