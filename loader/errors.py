"""What can be wrong with a checkpoint. Every error names the file and, where one is concerned, the tensor."""

from __future__ import annotations

MOST_CHARACTERS = 300  # of each part of a message: names and values come from files that may hold anything


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """The text, or its beginning and how long it is; what can't be printed is escaped, as a terminal would act on it."""
    beginning = "".join(one if one.isprintable() else ascii(one)[1:-1] for one in text[:most])
    return beginning if len(text) <= most else f"{beginning}... ({len(text)} characters)"


class LoaderError(Exception):
    """Base. `permanent`: trying again is pointless until the files change."""

    permanent: bool = True


class CheckpointError(LoaderError):
    """The checkpoint is at fault. file: path or name of the file; tensor: its name in the file, or None."""

    def __init__(self, file: str, tensor: str | None, message: str) -> None:
        self.file, self.tensor = shortened(file), tensor and shortened(tensor)
        self.message = shortened(message, 3 * MOST_CHARACTERS)
        about = f"{self.file}: tensor {self.tensor}" if tensor else self.file
        super().__init__(f"{about}: {self.message}")


class FileTooShort(CheckpointError):
    """The file ends before its header says: perhaps still being copied."""


class UnsupportedModel(CheckpointError):
    """A well-formed checkpoint of a kind this build can't run."""


class CheckpointChanged(LoaderError):
    """Files were replaced between registration and load; the next scan will see them."""

    permanent = False


class ReadFailed(CheckpointError):
    """The drive or file system gave no data; another time it may."""

    permanent = False
