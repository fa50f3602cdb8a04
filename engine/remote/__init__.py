"""Runs stages of pipelines that this host leads on engines of other hosts (docs/hosts.md). On this host a proxy process takes the
place of such an engine; on the other host a lender runs the engine."""
