"""A file to which lines are appended. After an incomplete write, the next line begins on a line of its own."""

from __future__ import annotations

import contextlib
import os


class LineFile:
    """A file that is open for appending lines. problem: the error of the last write, "" if there was none."""

    def __init__(self, path: str) -> None:
        """Opens the file at `path`, and creates it with mode 0600 if it does not exist. Raises OSError."""
        self.path, self.problem = path, ""
        # without O_NONBLOCK, opening a pipe without a reader would block
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, 0o600)
        self._is_torn = _ends_within_line(path)  # the last line may be incomplete because the disk was full

    def write(self, lines: list[bytes]) -> int:
        """Appends the lines, each with its line break, and returns how many of them, counted from the first, were written
        completely. An error is not raised but kept in `problem`."""
        data, num_bytes = memoryview(b"\n" * self._is_torn + b"".join(lines)), 0
        self.problem = ""
        try:
            while num_bytes < len(data):
                num_bytes += os.write(self._fd, data[num_bytes:])
        except OSError as error:
            self.problem = error.strerror or str(error)
        num_bytes -= self._is_torn
        if num_bytes < 0:
            return 0
        num_lines = 0
        while num_lines < len(lines) and num_bytes >= len(lines[num_lines]):
            num_bytes -= len(lines[num_lines])
            num_lines += 1
        self._is_torn = num_bytes > 0
        return num_lines

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._fd)


def _ends_within_line(path: str) -> bool:
    """Returns whether the file ends with an incomplete line. False if the file cannot be read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    except OSError:
        return False
