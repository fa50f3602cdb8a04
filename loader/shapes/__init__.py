"""Defines the facts about a model that other code computes with: its sizes, positions, KV and dtypes, and the checked fields of its
configuration.
"""
