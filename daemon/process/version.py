"""The version that both programs report."""

VERSION = "0.1.0"
