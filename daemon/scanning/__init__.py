"""Looking through the models folder in a process of its own, which may hang or run out of memory without harm to the daemon."""
