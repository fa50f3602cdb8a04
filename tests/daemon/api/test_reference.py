"""docs/reference/http.md is made from the code; what the code does not say is complete and true."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, cast

from daemon import errors
from daemon.api import reference
from daemon.api.endpoints.registry import ENDPOINTS
from daemon.api.error_codes import CODES
from daemon.operate.control import make_control_app

ROOT = Path(__file__).resolve().parents[3]
FAMILIES = {kind.__name__: kind for kind in errors.HearthError.__subclasses__()}


def raised() -> dict[str, set[int]]:
    """Code -> the HTTP statuses it is raised with, read from the sources."""
    found: dict[str, set[int]] = {code: {status} for code, (_, status) in errors._REFUSALS.items()}
    for path in (ROOT / "daemon").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in FAMILIES and node.args):
                continue
            if isinstance(node.args[0], ast.Constant):
                given = [word.value for word in node.keywords if word.arg == "status"]
                status = cast(Any, given[0]).value if given else FAMILIES[node.func.id].status
                found.setdefault(str(node.args[0].value), set()).add(status)
    return found


def test_the_committed_page_is_current() -> None:
    page = ROOT / "docs/reference/http.md"
    assert page.read_text() == reference.reference(), "run: python -m daemon.api.reference > docs/reference/http.md"


def test_every_path_and_field_is_explained() -> None:
    for endpoint in ENDPOINTS:
        assert endpoint.about, endpoint.name
    tables = reference.tables()
    assert len(tables) >= 6
    for table in tables:
        fields = set(reference.body_fields(table.type))
        assert fields == set(table.meanings), f"{table.type.__module__}.MEANINGS"


def test_every_code_is_explained_with_its_status() -> None:
    codes = raised()
    assert set(codes) == set(CODES), "daemon/api/error_codes.py"
    for code, (status, meaning, do) in CODES.items():
        assert status in codes[code], code
        assert meaning, code
        assert do, code


def test_every_control_route_is_listed() -> None:
    routes = make_control_app(cast(Any, None)).router.routes()
    found = {f"{route.method} {route.resource.canonical}" for route in routes if route.resource and route.method != "HEAD"}
    assert found == set(reference.CONTROL)
    reading = make_control_app(cast(Any, None), read_only=True).router.routes()
    allowed = {f"{route.method} {route.resource.canonical}" for route in reading if route.resource and route.method != "HEAD"}
    assert allowed - {"POST /{path}"} == {request for request in found if request.startswith("GET ")}


def test_operations_has_the_table_of_codes() -> None:
    assert reference.codes_table() in (ROOT / "docs/operations.md").read_text(), "run: python -m daemon.api.reference codes"
