"""Runs chat templates and tokenizers in helper processes, so that their work never blocks the event loop."""
