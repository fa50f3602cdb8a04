"""Where Numba keeps what it has compiled, and how that is called without looking at the arguments again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def keep_in(cache_dir: str) -> None:
    """To be called before a kernel is imported. cache_dir: "" for the user's own. The folder's name has a digest of the kernels'
    sources in it, because Numba looks only at the file of the kernel itself."""
    import numba

    digest = hashlib.blake2b(digest_size=6)
    for source in sorted(Path(__file__).parent.glob("cpu*.py")):
        digest.update(source.read_bytes())
    base = Path(cache_dir) if cache_dir else Path.home() / ".cache" / "hearthd"
    numba.config.CACHE_DIR = str(base / f"numba-{digest.hexdigest()}")


def direct(kernel: Callable[..., Any], args: Sequence[Any]) -> Callable[..., Any]:
    """What a call of the kernel comes to as long as its arguments are these: of its forms (`due`) the one, of its machine code that
    for these types, entered past Numba's choice between types (about 1 us). The kernel itself where it is no compiled one."""
    due = getattr(kernel, "due", None)
    if due is not None:
        kernel = due(args)
    overloads = getattr(kernel, "overloads", None)
    if overloads is None:
        return kernel
    import numba

    found = overloads.get(tuple(numba.typeof(arg) for arg in args))
    return kernel if found is None else found.entry_point
