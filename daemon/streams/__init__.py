"""Answers on their way to clients: text from tokens, frames, who is behind."""
