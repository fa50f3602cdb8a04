"""Describes BERT as a cross-encoder (ms-marco-MiniLM), which scores a pair of texts by its pooler and a matrix with one output."""

from __future__ import annotations

from loader.architectures.bert import Encoder

ARCHITECTURE = Encoder("BertForSequenceClassification", "", score_head=("{}pooler.dense", "classifier"))
