"""What the docs say is held to the code: commands exist, files linked exist, paths and figures are where they say."""

from __future__ import annotations

import ast
import json
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("demo/**/*.md")])
# Words that begin no sentence about what a function or a class is or does.
FRAGMENTS = re.compile(
    r"(whether|what|why|where|when|how|if|with|without|for|like|as|by|in|of|from|to|then|at|on|between|behind|beside|after|before|up"
    r"|it|they|this|these|those|who|nothing|nobody|everything)\b",
    re.IGNORECASE,
)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def ids(page: pathlib.Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target in LINK.findall(page.read_text()):
        if not target.startswith(("http://", "https://", "mailto:")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=ids)
def test_make_targets_exist(page: pathlib.Path) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for target in re.findall(r"`make ([a-z]+)", page.read_text()):
        assert target in targets, f"{page.name}: make {target}"


def test_every_cli_command_named_in_the_readme_exists() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "daemon.cli", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    named = set(re.findall(r"^\$? ?hearth ([a-z]+)", (ROOT / "README.md").read_text(), re.M))
    assert named, "the README shows no command of hearth"
    for command in named:
        assert re.search(rf"\b{command}\b", out), command


def test_every_flag_named_in_the_docs_exists() -> None:
    out = subprocess.run(
        [sys.executable, "-m", "daemon", "--help"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    for page in PAGES:
        for line in re.findall(r"^\s*\$? ?(?:\.venv/bin/)?hearthd .*$", page.read_text(), re.M):
            for flag in re.findall(r"(--[a-z-]+)", line):
                assert flag in out, f"{page.name}: {flag}"


def test_sizes_of_published_models_are_those_that_the_plan_says() -> None:
    from benchmarks.sizes import table

    assert table() in (ROOT / "docs/reference/sizes.md").read_text(), "python -m benchmarks.sizes prints the table"


def test_aims_of_the_gpu_are_those_that_its_figures_are_held_to() -> None:
    from benchmarks.gpu_aims import table

    assert table() in (ROOT / "docs/gpu.md").read_text(), "python -m benchmarks.gpu_aims prints the table"


def test_figures_are_those_of_the_newest_result_file() -> None:
    """The tables are written by `make bench` together with the result file; a figure typed by hand would not be in it."""
    from benchmarks import aims
    from benchmarks.run import AIMS, MEASURED, SPLIT_AIMS, between_marks, highlights, report

    newest = max((ROOT / "benchmarks" / "results").glob("*-cpu.jsonl"))
    lines = [json.loads(line) for line in newest.read_text().splitlines()]
    for page, made in (("docs/performance.md", report), ("README.md", highlights)):
        assert between_marks(ROOT / page, MEASURED) == made(lines), page
    assert between_marks(ROOT / "docs" / "performance.md", AIMS) == aims.table(aims.results())
    assert between_marks(ROOT / "docs" / "performance.md", SPLIT_AIMS) == aims.split_table()


MOST_PAGES, MOST_WORDS = 14, 1200  # of docs/design beside its README and its glossary; words of one


def test_pages_of_the_design_are_few_and_listed() -> None:
    """Whoever comes anew reads them all: a new subject belongs to a page that is there, or takes the place of another."""
    folder = ROOT / "docs" / "design"
    pages = {page.name for page in folder.glob("*.md")} - {"README.md", "glossary.md"}
    assert len(pages) <= MOST_PAGES, pages
    listed = set(LINK.findall((folder / "README.md").read_text()))
    assert pages | {"glossary.md"} <= listed, pages - listed
    rule = re.search(r"at most (\d+) pages of ([\d,]+) words", (ROOT / "CONTRIBUTING.md").read_text())
    assert rule
    assert [int(number.replace(",", "")) for number in rule.groups()] == [MOST_PAGES, MOST_WORDS]


def test_pages_of_the_design_stay_readable() -> None:
    """A page answers one question: 1,200 words at most, no paragraph of more than 120, one glossary of 40 terms."""
    pages = {page.name: page.read_text() for page in (ROOT / "docs" / "design").glob("*.md")}
    assert {"README.md", "glossary.md", "processes.md", "request.md", "models.md", "memory.md", "steps.md", "loading.md"} <= set(
        pages
    )
    assert len(re.findall(r"^\| (?!term|---)", pages.pop("glossary.md"), re.M)) <= 40
    for name, text in pages.items():
        assert len(text.split()) <= (400 if name == "README.md" else MOST_WORDS), name
        for paragraph in text.split("\n\n"):
            is_prose = not paragraph.startswith(("|", "```", "- ", "1. "))
            assert not is_prose or len(paragraph.split()) <= 120, f"{name}: {paragraph[:60]}"


@pytest.mark.parametrize("folder", ["daemon", "scheduler", "engine", "loader", "config", "benchmarks", "demo"])
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    """CONTRIBUTING.md says so. Words that begin a question or a part of a sentence are found here."""
    fragments = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node) or ""
                if FRAGMENTS.match(text):
                    fragments.append(f"{path.relative_to(ROOT)}: {getattr(node, 'name', 'the file')}: {text[:40]}")
    assert not fragments


def test_changelog_names_the_version() -> None:
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)
    assert version
    assert f"## {version[1]}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_list_of_what_only_a_gpu_runs_is_whole() -> None:
    from tests.gpu.cuda_only import found, table

    assert {"engine/cuda/memory.py", "engine/cuda/graphs.py", "daemon/gpu/nvml.py"} <= set(found())
    section = (ROOT / "docs/gpu.md").read_text().partition("## Not yet run on a GPU")[2].partition("\n## ")[0]
    assert table() in section, "python -m tests.gpu.cuda_only prints the table"
