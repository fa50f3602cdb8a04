"""Describes ModernBERT as a cross-encoder (gte-reranker-modernbert), which scores a pair of texts by a matrix, GELU, a norm and a
matrix with one output.
"""

from __future__ import annotations

from loader.architectures.modernbert import ModernEncoder

ARCHITECTURE = ModernEncoder("ModernBertForSequenceClassification", "", scores=True)
