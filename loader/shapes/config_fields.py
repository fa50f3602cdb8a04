"""Looks up typed values in the JSON objects of a checkpoint's configuration files. Every error names the file and the key."""

from __future__ import annotations

from typing import Any

import msgspec

from loader.errors import CheckpointError, UnsupportedModel

MAX_FLOAT32 = float.fromhex("0x1.fffffep127")  # in kernels a larger number is infinite
MAX_IDS = 1024  # most ids under one key, such as the ids that end a text


class Fields:
    """One JSON object of a configuration file. Its methods return typed values by key and raise CheckpointError for a value of
    another type. file: the file's name in errors. prefix: put before keys in errors, for example "rope_scaling."."""

    def __init__(self, values: dict[str, Any], file: str, prefix: str = "") -> None:
        self.values, self.file, self.prefix = values, file, prefix

    def fail(self, key: str, message: str) -> CheckpointError:
        return CheckpointError(self.file, None, f"key {self.prefix}{key}: {message}")

    def unsupported(self, key: str, message: str) -> UnsupportedModel:
        return UnsupportedModel(self.file, None, f"key {self.prefix}{key}: {message}")

    def has(self, key: str) -> bool:
        return self.values.get(key) is not None

    def is_null(self, key: str) -> bool:
        """Returns whether the object has the key with the value null. For some keys null has another meaning than a missing key."""
        return key in self.values and self.values[key] is None

    def integer(self, key: str, default: int | None = None, at_least: int = 1, at_most: int = 1 << 40) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "missing")
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.fail(key, f"{value!r} is not a whole number")
        if not at_least <= value <= at_most:
            raise self.fail(key, f"{value} is out of range (from {at_least} to {at_most})")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if value is None:
            raise self.fail(key, "missing")
        return self._number(key, value)

    def positive(self, key: str, default: float | None = None) -> float:
        value = self.number(key, default)
        if not value > 0:
            raise self.fail(key, f"{value} is not positive")
        if value > MAX_FLOAT32:
            raise self.fail(key, f"{value} is out of range (at most {MAX_FLOAT32:.2e})")
        return value

    def numbers(self, key: str, length: int) -> tuple[float, ...]:
        """Returns the list of `length` positive numbers under a key. Raises CheckpointError for any other value."""
        values = self.values.get(key)
        if not isinstance(values, list) or len(values) != length:
            raise self.fail(key, f"not a list of {length} numbers")
        numbers = tuple(self._number(key, value) for value in values)
        if not all(0 < number < float("inf") for number in numbers):
            raise self.fail(key, "holds a number that is not positive")
        return numbers

    def _number(self, key: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fail(key, f"{value!r} is not a number")
        try:
            return float(value)
        except OverflowError:  # a whole number of hundreds of digits
            raise self.fail(key, "is out of range") from None

    def boolean(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fail(key, f"{value!r} is not true or false")
        return value

    def ids(self, key: str) -> tuple[int, ...]:
        """Returns the token ids under a key, without repetitions. The value may be one id, a list of ids, or null; null and a
        missing key give (). Any other value raises CheckpointError."""
        value = self.values.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if len(values) > MAX_IDS:
            raise self.fail(key, f"holds {len(values)} token ids (at most {MAX_IDS})")
        if any(isinstance(v, bool) or not isinstance(v, int) or not 0 <= v < 1 << 31 for v in values):
            raise self.fail(key, f"{value!r} is neither a token id nor a list of token ids")
        return tuple(dict.fromkeys(values))

    def mapping(self, key: str) -> Fields | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fail(key, f"{value!r} is not an object")
        return Fields(value, self.file, f"{self.prefix}{key}.")


def json_fields(text: bytes, file: str) -> Fields:
    """Parses a configuration file that holds a JSON object, and returns the object. text: the file's content. file: the file's
    name, for errors. Raises CheckpointError if the text is not a JSON object."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(file, None, f"not valid JSON: {error}") from None
    except RecursionError:
        raise CheckpointError(file, None, "not valid JSON: lists or objects lie in each other too deeply") from None
    if not isinstance(value, dict):
        raise CheckpointError(file, None, "not a JSON object")
    return Fields(value, file)
