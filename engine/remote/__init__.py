"""Lets an engine on another host run stages of pipelines that this host leads (docs/hosts.md). A proxy process stands in for that
engine here; a lender runs the engine there."""
