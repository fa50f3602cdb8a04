"""Describes RoBERTa: the same as XLM-RoBERTa with another vocabulary."""

from __future__ import annotations

from loader.architectures.bert import Encoder

ARCHITECTURE = Encoder("RobertaModel", "roberta", body="roberta.", pad_token_id=1)
