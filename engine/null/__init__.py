"""A device without weights, for tests of everything around it."""
