"""Parses tool calls in a model's text, by a parser for each dialect (syntax of tool calls), in a file of its own. A parser reads
the text as it arrives, and every character once."""
