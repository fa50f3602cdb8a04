"""Chat templates and tokenizers, run in helper processes so that their work never blocks the event loop."""
