"""Describes RoBERTa as a cross-encoder, which scores a pair of texts: the same as XLM-RoBERTa with another vocabulary."""

from __future__ import annotations

from loader.architectures.bert import Encoder

_HEAD = ("classifier.dense", "classifier.out_proj")

ARCHITECTURE = Encoder("RobertaForSequenceClassification", "", body="roberta.", pad_token_id=1, score_head=_HEAD)
