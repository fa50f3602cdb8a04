"""BERT as a cross-encoder (ms-marco-MiniLM): its pooler and one output score a pair of texts."""

from __future__ import annotations

from loader.architectures.bert import Encoder

ARCHITECTURE = Encoder("BertForSequenceClassification", "", score_head=("{}pooler.dense", "classifier"))
