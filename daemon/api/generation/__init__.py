"""Code that the endpoints which generate text share: from a request's body to sequences, and from sequences to an answer."""
