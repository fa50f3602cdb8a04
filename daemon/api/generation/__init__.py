"""Contains the code that all endpoints which generate text use: it makes sequences of a request's body, and an answer of the
sequences' tokens."""
