"""The version both programs report."""

VERSION = "0.1.0"
