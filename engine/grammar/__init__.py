"""Restricts which tokens requests may sample (constrained sampling). A separate process for each model computes which tokens a
grammar allows next; limits by token id (allowed_token_ids, bad_words) are applied in the engine's own process."""
