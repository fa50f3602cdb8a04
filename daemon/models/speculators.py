"""Chooses what drafts tokens for a model (the key `speculator`)."""

from __future__ import annotations

from dataclasses import dataclass

from config.schema import ModelConfig
from loader.catalog import Checkpoint
from loader.model_shape import ModelShape

AUTO, NONE, PROMPT_LOOKUP, MTP = "auto", "none", "prompt-lookup", "mtp"
_PREDICTING_KINDS = frozenset({"cpu"})  # kinds of devices that run a model's own predictor


@dataclass(slots=True, frozen=True)
class Speculator:
    """What drafts tokens for one model. name: as LoadModel.speculator has it. shape: what is loaded. why_not: why it is not the
    model's own predictor although that would come first, "" if it is or there is none."""

    name: str
    shape: ModelShape
    why_not: str = ""


def chosen(settings: ModelConfig, checkpoint: Checkpoint, shape: ModelShape, kinds: set[str]) -> Speculator:
    """Returns what drafts tokens for a model with this shape, if memory suffices for it. kinds: of the devices that it may live
    on."""
    if settings.speculator == NONE or _why_no_drafts(shape):
        return Speculator(NONE, shape)
    if settings.speculator == PROMPT_LOOKUP:
        return Speculator(PROMPT_LOOKUP, shape)
    if checkpoint.predicting is None:
        return Speculator(PROMPT_LOOKUP, shape, checkpoint.predictor_error)
    if settings.speculator == AUTO and not kinds <= _PREDICTING_KINDS:
        return Speculator(PROMPT_LOOKUP, shape, _where(kinds))
    return Speculator(MTP, checkpoint.predicting)


def misfit(name: str, settings: ModelConfig, checkpoint: Checkpoint, shape: ModelShape, kinds: set[str]) -> str:
    """Returns why the configured speculator cannot be used, or ""."""
    asked, why = settings.speculator, ""
    if asked not in (AUTO, NONE):
        why = _why_no_drafts(shape)
    if asked == MTP and not why:
        if checkpoint.predicting is None:
            why = checkpoint.predictor_error or "its files hold no layer that predicts further tokens"
        elif not kinds <= _PREDICTING_KINDS:
            why = _where(kinds)
    return f'models."{name}".speculator: {asked}: {why}; leave it out' if why else ""


def _where(kinds: set[str]) -> str:
    return f"the model may live on {' and '.join(sorted(kinds))} devices, and predictors are built for cpu devices alone"


def _why_no_drafts(shape: ModelShape) -> str:
    """Returns why tokens cannot be drafted for a model, or ""."""
    if shape.pooling:
        return "encoders generate no text"
    return "" if shape.delta is None else "the states of its layers cannot go back behind a token that was guessed wrong"
