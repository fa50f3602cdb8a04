"""Parsers for tool calls in a model's text: one file per dialect. Each reads the text as it arrives, and every character once."""
