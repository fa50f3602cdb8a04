"""The service: units, and installing it."""
