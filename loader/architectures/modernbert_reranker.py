"""ModernBERT as a cross-encoder (gte-reranker-modernbert): a matrix, GELU, a norm and one output score a pair of texts."""

from __future__ import annotations

from loader.architectures.modernbert import ModernEncoder

ARCHITECTURE = ModernEncoder("ModernBertForSequenceClassification", "", scores=True)
