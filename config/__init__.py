"""The node's settings: what may be set, its default and unit, and reading it from TOML and flags. Imports nothing of ours."""
