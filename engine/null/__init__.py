"""Implements a kind of device whose models have no weights and compute nothing, for tests of all code around a model."""
