"""XLM-RoBERTa (BGE-M3, multilingual E5): BERT whose positions begin after the id of padding."""

from __future__ import annotations

from loader.architectures.bert import Encoder

ARCHITECTURE = Encoder("XLMRobertaModel", "xlm-roberta", body="roberta.", pad_token_id=1)
