"""Decides which tokens of which sequences run in the next step. Runs in the engine process. Read `batch_scheduler` first."""
