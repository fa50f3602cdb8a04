"""Sends answers to clients: makes text of tokens, writes it as frames of a stream, and waits for clients that read slowly."""
