"""Lets an engine on another host run stages of pipelines that this host leads (docs/hosts.md)."""
