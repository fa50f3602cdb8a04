"""Chooses what drafts tokens for a model (the key `speculator`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from config.parallel import num_ranks
from config.schema import ModelConfig
from loader.catalog import Checkpoint
from loader.drafters import joined
from loader.errors import CheckpointError
from loader.model_shape import ModelShape

AUTO, NONE, PROMPT_LOOKUP, MTP, EAGLE3 = "auto", "none", "prompt-lookup", "mtp", "eagle3"
KINDS = (AUTO, NONE, PROMPT_LOOKUP, MTP)  # values of the setting that name no head
_PROVEN_KINDS = frozenset({"cpu"})  # of devices on which predictors have run; on others they must be asked for


class MayPredict(Protocol):
    """What is known of a checkpoint's own predictor: loader.catalog.Checkpoint has the meanings."""

    @property
    def predicting(self) -> ModelShape | None: ...
    @property
    def predictor_error(self) -> str: ...


@dataclass(slots=True, frozen=True)
class Speculator:
    """What drafts tokens for one model. name: as LoadModel.speculator has it. shape: what is loaded; fingerprint: of its files.
    head: the head that does. why_not: why it is not the predictor that would come first, "" if it is or there is none."""

    name: str
    shape: ModelShape
    fingerprint: str
    head: Checkpoint | None = None
    why_not: str = ""

    @property
    def predicts(self) -> bool:
        """Whether something is loaded beside the model."""
        return self.shape.predicts


def prompt_lookup(shape: ModelShape, fingerprint: str, why: str = "") -> Speculator:
    """Returns the choice of prompt lookup. shape, fingerprint: the model's own. why: the reason that no predictor is loaded."""
    return Speculator(PROMPT_LOOKUP, shape, fingerprint, why_not=why)


@dataclass(slots=True, frozen=True)
class Choice:
    """What there is to choose from for one model of this shape. own: what is known of its own predictor. kinds: of the devices that
    it may live on. checkpoint: the model's; None: it has no heads. heads: all that there are, by name."""

    settings: ModelConfig
    own: MayPredict
    shape: ModelShape
    kinds: set[str]
    checkpoint: Checkpoint | None = None
    heads: Mapping[str, Checkpoint] = field(default_factory=dict)

    def chosen(self) -> Speculator:
        """Returns what drafts tokens for the model, if memory suffices for it. Called where `why_not` finds nothing."""
        asked, own, shape = self.settings.speculator, self.own, self.shape
        fingerprint = "" if self.checkpoint is None else self.checkpoint.fingerprint
        if asked == NONE or _why_no_drafts(shape):
            return Speculator(NONE, shape, fingerprint)
        if asked == PROMPT_LOOKUP:
            return prompt_lookup(shape, fingerprint)
        head = self._head_beside() if asked == AUTO else self.heads.get(asked)
        if head is None and own.predicting is None:
            return prompt_lookup(shape, fingerprint, own.predictor_error)
        if num_ranks(self.settings) > 1:
            return prompt_lookup(shape, fingerprint, "models that are split over devices have none")
        if asked == AUTO and not self.kinds <= _PROVEN_KINDS:
            return prompt_lookup(shape, fingerprint, "on cuda devices, where predictors have never run, they must be named")
        why = ""
        if head is not None and self.checkpoint is not None:
            try:
                both = joined(self.checkpoint, head)
                return Speculator(EAGLE3, both.shape, both.fingerprint, head)
            except CheckpointError as error:
                why = str(error)
        if own.predicting is not None:
            return Speculator(MTP, own.predicting, fingerprint)
        return prompt_lookup(shape, fingerprint, why)

    def misfit(self, name: str) -> str:
        """Returns why the speculator that the settings for the model of this name ask for cannot be used, or ""."""
        why = self.why_not()
        return f'models."{name}".speculator: {self.settings.speculator}: {why}; leave it out' if why else ""

    def why_not(self) -> str:
        """Returns why the speculator that is asked for cannot be used, or ""."""
        asked, own = self.settings.speculator, self.own
        if asked in (AUTO, NONE):
            return ""
        if (why := _why_no_drafts(self.shape)) or asked == PROMPT_LOOKUP:
            return why
        if asked == MTP and own.predicting is None:
            return own.predictor_error or "its files hold no layer that predicts further tokens"
        if asked != MTP and asked not in self.heads:
            known = f"there are {', '.join(sorted(self.heads))}" if self.heads else "there is none"
            return f"not mtp, prompt-lookup, none, auto or the name of an EAGLE-3 head in the models folder ({known})"
        if asked == MTP or self.checkpoint is None:
            return ""
        return _misfit_of(self.checkpoint, self.heads[asked])

    def _head_beside(self) -> Checkpoint | None:
        """Returns a head in the model's folder, or else one that says that it was made for a model of this name, the first by
        name."""
        if self.checkpoint is None:
            return None
        name = self.checkpoint.name
        inside = [head for at, head in self.heads.items() if at.startswith(f"{name}/")]
        made_for = [one for one in self.heads.values() if one.head is not None and _is_name(one.head.verifier, name)]
        return min((*inside, *(() if inside else made_for)), key=lambda head: head.name, default=None)


def _is_name(verifier: str, name: str) -> bool:
    return bool(verifier) and (verifier == name or os.path.basename(verifier) == os.path.basename(name))


def _misfit_of(checkpoint: Checkpoint, head: Checkpoint) -> str:
    try:
        joined(checkpoint, head)
    except CheckpointError as error:
        return str(error)
    return ""


def _why_no_drafts(shape: ModelShape) -> str:
    """Returns why tokens cannot be drafted for a model, or ""."""
    if shape.pooling:
        return "encoders generate no text"
    return "" if shape.delta is None else "the states of its layers cannot go back behind a token that was guessed wrong"
