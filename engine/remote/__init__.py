"""Lets engines of other hosts run stages of the pipelines that this host leads (docs/hosts.md). On this host a proxy process takes
the place of such an engine; on the other host a lender runs the engine."""
