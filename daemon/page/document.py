"""The document of the status page, which contains its style and its script, and the content security policy that allows nothing
else.

The parts are three files (index.html, style.css, page.js), which are put together once, when this module is imported.
"""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

_FOLDER = Path(__file__).parent
_STYLE, _SCRIPT = "/*{style}*/", "/*{script}*/"


def _source(csp_text: str) -> str:
    """Returns the source expression for a content security policy (CSP) that allows this inline script or style and no other."""
    return "'sha256-" + base64.b64encode(hashlib.sha256(csp_text.encode()).digest()).decode() + "'"


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _assemble(style: str, script: str) -> bytes:
    """Returns the HTML document with style and script inserted in place of their marks. Raises ValueError if a part contains the
    end tag of its element, or if its mark does not occur exactly once in the document."""
    text = _read("index.html")
    for mark, part in ((_STYLE, style), (_SCRIPT, script)):
        if text.count(mark) != 1 or "</" + ("style" if mark == _STYLE else "script") in part.lower():
            raise ValueError(f"daemon/page/index.html: {mark}")
        text = text.replace(mark, part)
    return text.encode()


def _policy(style: str, script: str) -> str:
    """Returns the content security policy of the page. It allows the page's own style and script, and requests to this server. It
    forbids turning strings into markup, so that a model's name cannot become an element even if the script is faulty."""
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {_source(script)}",
            f"style-src {_source(style)}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",
            "trusted-types 'none'",
        )
    )


_style, _script = _read("style.css"), _read("page.js")
BODY = _assemble(_style, _script)
# a page that is open when the daemon is upgraded sees another id and reloads itself
ID = hashlib.sha256(BODY).hexdigest()[:16]
HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": _policy(_style, _script),
    "Cache-Control": "no-cache",
    "ETag": f'"{ID}"',
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
