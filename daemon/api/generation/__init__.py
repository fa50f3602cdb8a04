"""What the endpoints that generate text share: from a body to sequences, and from sequences to an answer."""
