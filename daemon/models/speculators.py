"""Chooses for each model how tokens are drafted, that is, guessed ahead and then checked by the model (the key `speculator`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from config.parallel import num_ranks
from config.schema import ModelConfig, NodeConfig
from loader.errors import CheckpointError
from loader.models.catalog import Checkpoint
from loader.models.drafters import joined
from loader.shapes.model_shape import ModelShape

AUTO, NONE, PROMPT_LOOKUP, MTP, EAGLE3 = "auto", "none", "prompt-lookup", "mtp", "eagle3"
KINDS = (AUTO, NONE, PROMPT_LOOKUP, MTP)  # values of the setting that are not the name of a head
_PROVEN_KINDS = frozenset({"cpu"})  # kinds of devices on which predictors have been run; on other kinds the setting must name one


def named_heads(config: NodeConfig, checkpoints: Mapping[str, Checkpoint]) -> dict[str, Checkpoint]:
    """Returns, by name, the EAGLE-3 heads among the checkpoints. Checkpoints that the settings name as a head, but that are
    incomplete or cannot be read, are included, so that their `fault` can be reported; they have no `head`."""
    named = {settings.speculator for settings in config.models.values()}.difference(KINDS)
    return {name: one for name, one in checkpoints.items() if one.head is not None or (name in named and bool(one.fault))}


class MayPredict(Protocol):
    """The facts about the predictor in a model's own checkpoint (implemented by loader.models.catalog.Checkpoint). predicting: the
    model's shape with the predictor, None if there is none that can be used. predictor_error: why the predictor cannot be used, or
    ""."""

    @property
    def predicting(self) -> ModelShape | None: ...
    @property
    def predictor_error(self) -> str: ...


@dataclass(slots=True, frozen=True)
class Speculator:
    """The choice of how tokens are drafted for one model. name: the way of drafting, as in LoadModel.speculator. shape: the model's
    shape, with the predictor that is loaded, if any. fingerprint: the fingerprint of all files that are loaded. head: the EAGLE-3
    head that drafts, or None. why_not: if the model drafts by prompt lookup although it has a predictor or a head, or by its
    predictor although it has a head, the reason; otherwise ""."""

    name: str
    shape: ModelShape
    fingerprint: str
    head: Checkpoint | None = None
    why_not: str = ""

    @property
    def predicts(self) -> bool:
        """Returns whether a predictor is loaded together with the model."""
        return self.shape.predicts


def prompt_lookup(shape: ModelShape, fingerprint: str, why: str = "") -> Speculator:
    """Returns the choice to draft by prompt lookup. shape, fingerprint: those of the model itself. why: why no predictor is used in
    its place, or ""."""
    return Speculator(PROMPT_LOOKUP, shape, fingerprint, why_not=why)


@dataclass(slots=True, frozen=True)
class Choice:
    """Chooses the speculator for one model. settings: the model's settings. own: the facts about the model's own predictor. shape:
    the model's shape without a predictor. kinds: the kinds of devices where it may live. checkpoint: the model's checkpoint; None:
    EAGLE-3 heads are not considered. heads: name -> EAGLE-3 head, for the heads in the models folder and those that the settings
    name."""

    settings: ModelConfig
    own: MayPredict
    shape: ModelShape
    kinds: set[str]
    checkpoint: Checkpoint | None = None
    heads: Mapping[str, Checkpoint] = field(default_factory=dict)

    def chosen(self) -> Speculator:
        """Returns the speculator to use, without regard to the memory that it takes. Called only if the settings can be followed
        (why_not() returns an empty text)."""
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
            return Speculator(MTP, own.predicting, fingerprint, why_not=why)
        return prompt_lookup(shape, fingerprint, why)

    def misfit(self, name: str) -> str:
        """Returns the message with which a model is refused because its setting `speculator` cannot be followed; "" if it can.
        name: the model's name."""
        why = self.why_not()
        return f'models."{name}".speculator: {self.settings.speculator}: {why}; leave it out' if why else ""

    def why_not(self) -> str:
        """Returns why the setting `speculator` cannot be followed for this model; "" if it can."""
        asked, own = self.settings.speculator, self.own
        if asked in (AUTO, NONE):
            return ""
        if (why := _why_no_drafts(self.shape)) or asked == PROMPT_LOOKUP:
            return why
        if asked == MTP and own.predicting is None:
            return own.predictor_error or "its files hold no layer that predicts further tokens"
        named = self.heads.get(asked)
        if asked != MTP and named is None:
            usable = sorted(name for name, head in self.heads.items() if head.head is not None)
            known = f"there are {', '.join(usable)}" if usable else "there is none"
            return f"not mtp, prompt-lookup, none, auto or the name of an EAGLE-3 head in the models folder ({known})"
        if named is not None and named.head is None:
            return named.fault
        if named is None or self.checkpoint is None:
            return ""
        return _misfit_of(self.checkpoint, named)

    def _head_beside(self) -> Checkpoint | None:
        """Returns the EAGLE-3 head that "auto" uses: one in the model's folder, or else one whose files name this model as its
        verifier; the first by name if there are several, None if there is none."""
        if self.checkpoint is None:
            return None
        name = self.checkpoint.name
        heads = [one for one in self.heads.values() if one.head is not None]
        inside = [one for one in heads if one.name.startswith(f"{name}/")]
        made_for = [one for one in heads if one.head is not None and _is_name(one.head.verifier, name)]
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
    """Returns why tokens cannot be drafted by any method for a model of this shape; "" if they can."""
    if shape.pooling:
        return "encoders generate no text"
    return "" if shape.delta is None else "the states of its layers cannot go back behind a token that was guessed wrong"
