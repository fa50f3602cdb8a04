"""Sends answers to clients: text from tokens, frames of streams, and clients that read slowly."""
