"""A device whose models have no weights, for tests of everything around a model."""
