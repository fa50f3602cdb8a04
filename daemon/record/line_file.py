"""A file to which lines are added, whole ones wherever the disk takes them."""

from __future__ import annotations

import contextlib
import os


class LineFile:
    """An open file, made with mode 0600. problem: the last write's, "" if it had none."""

    def __init__(self, path: str) -> None:
        """Raises OSError."""
        self.path, self.problem = path, ""
        # without O_NONBLOCK a pipe without a reader would be waited for
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK, 0o600)
        self._is_torn = _ends_within_line(path)  # a disk that is nearly full takes a part of a line

    def write(self, lines: list[bytes]) -> int:
        """Returns how many of the lines are in the file, from the first on."""
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
    """Returns whether something was written to the file that did not end its line. False if the file cannot be read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            return file.seek(0, os.SEEK_END) > 0 and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"
    except OSError:
        return False
