"""Defines the errors that a load of a checkpoint can raise. Their messages name the file and, if the error is about a tensor, the
tensor.
"""

from __future__ import annotations

MOST_CHARACTERS = 300  # limit for each part of a message: names and values come from files that may hold anything


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Returns the text or, if it is longer than `most` characters, its first `most` characters followed by its length. Characters
    that can't be printed are escaped, because a terminal would act on them."""
    beginning = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:most])
    return beginning if len(text) <= most else f"{beginning}... ({len(text)} characters)"


class LoaderError(Exception):
    """The base class of the errors of a load. permanent: whether another attempt is pointless until the files change."""

    permanent: bool = True


class CheckpointError(LoaderError):
    """Raised when the checkpoint is at fault. file: path or name of the file at fault. tensor: the name of the tensor at fault;
    None if the error is about no tensor. message: what is wrong."""

    def __init__(self, file: str, tensor: str | None, message: str) -> None:
        self.file, self.tensor = shortened(file), tensor and shortened(tensor)
        self.message = shortened(message, 3 * MOST_CHARACTERS)
        about = f"{self.file}: tensor {self.tensor}" if tensor else self.file
        super().__init__(f"{about}: {self.message}")


class FileTooShort(CheckpointError):
    """Raised when a file is shorter than its header says. It may still be being copied."""


class UnsupportedModel(CheckpointError):
    """Raised for a well-formed checkpoint that this version of hearthd can't run."""


class CheckpointChanged(LoaderError):
    """Raised when a registered checkpoint's files have been replaced or have become incomplete, before or during a load. The next
    scan registers the files as they are then."""

    permanent = False


class ReadFailed(CheckpointError):
    """Raised when the drive or file system returned no data. A later attempt may succeed."""

    permanent = False
