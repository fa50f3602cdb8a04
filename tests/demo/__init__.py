"""Tests of the demo: its models, and the text they were made from."""
