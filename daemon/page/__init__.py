"""Serves the status page: a document that anybody may fetch, and a feed of snapshots for those who may watch the node."""
