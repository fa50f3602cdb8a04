"""The interfaces between the parts of an engine."""
