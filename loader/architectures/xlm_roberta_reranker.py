"""Describes XLM-RoBERTa as a cross-encoder (bge-reranker-v2-m3), which scores a pair of texts by two matrices."""

from __future__ import annotations

from loader.architectures.bert import Encoder

_HEAD = ("classifier.dense", "classifier.out_proj")

ARCHITECTURE = Encoder("XLMRobertaForSequenceClassification", "", body="roberta.", pad_token_id=1, score_head=_HEAD)
