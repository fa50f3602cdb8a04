"""Names the keys of config.json by which some families scale what others leave as it is."""

from __future__ import annotations

from dataclasses import dataclass

from loader.config_fields import Fields


@dataclass(slots=True, frozen=True)
class Factors:
    """Keys of config.json; "": the family has no such factor. A key that config.json leaves out stands for 1.

    embeddings: of what the embedding gives. branches: of what attention and the MLP add. scores: of attention's, in place of the
    one that follows from the heads' size. logits: of the logits, logits_default if the key is absent. logits_divisor: what the
    logits are divided by."""

    embeddings: str = ""
    branches: str = ""
    scores: str = ""
    logits: str = ""
    logits_default: float = 1.0
    logits_divisor: str = ""

    def logit_scale(self, fields: Fields) -> float:
        return factor(fields, self.logits, self.logits_default) / factor(fields, self.logits_divisor)


def factor(fields: Fields, key: str, default: float = 1.0) -> float:
    """Returns the factor that the key holds. Raises CheckpointError if it is not a positive number."""
    return fields.positive(key, default) if key else default
