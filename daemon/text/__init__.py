"""Templates and tokenizers, run in a helper process so that parsing never holds the event loop."""
