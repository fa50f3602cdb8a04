"""Finds the prose in docstrings and cleans it: markup removed, code, tables and grammar dropped."""

import inspect
import re
from collections.abc import Sequence

ANSWER_CHARS = 480  # where an answer ends and "Tell me more." takes over: about 150 tokens
_MARKUP = (
    (re.compile(r":[a-z:]+:`~?([^`<]+)(?: <[^`]*>)?`"), r"\1"),  # :class:`list`
    (re.compile(r"``([^`]+)``"), r"\1"),
    (re.compile(r"(?<![\w*`'])[`*]([^\s`*'](?:[^`*']*[^\s`*'])?)[`*'](?![\w*])"), r"\1"),  # *emphasis*, `name', `name`
    (re.compile(r"\*\*([A-Za-z][^*]*)\*\*"), r"\1"),
    (re.compile(r"(?<![\w\"'])[\"']([\w.]+(?:\(\))?)[\"'](?![\w\"'])"), r"\1"),  # 'name', "name"
    (re.compile(r"\s*\[\d+\]"), ""),  # footnote marks
    (re.compile(r"\s*\((?:bpo-|issue ?#?)\d+\)", re.I), ""),
    (re.compile(r"(?<=[a-z])- (?!and |or |to )(?=[a-z])"), "-"),  # "comma-" at the end of a line, "separated" on the next
    (re.compile(r"\s+"), " "),
)
PLAIN_QUOTES = str.maketrans({"“": '"', "”": '"', "‘": "'", "’": "'", "–": "-", "—": "-", "…": "...", "\u00a0": " "})
_NOT_PROSE = re.compile(
    r">>>|::=|->|=>|==|<=|\|\||&&|\\|@param|@return|https?:|\$Id|XXX|TODO|Traceback"
    r"|(?:Args|Arguments|Returns|Raises|Input|Output):|<[a-z]+>|[{}|~^]|__\w+__ *="
)
_SIGNATURE = re.compile(r"^[\w.]+\s?\([^)]*\)?[\]\[, .\w=*()]*\)?(\s*->.*|\s*--.*)?:?$")
_SENTENCE_END = re.compile(r"(?<=[a-z0-9)\"'][.!?]) (?=[A-Z\"'(])")
_BULLET = re.compile(r"(?:[*+-]|\d+[.)]) +")
_POINTS_AT_CODE = re.compile(r"follow|example|like this|these|such as|below", re.I)


def paragraphs_of(text: str) -> list[str]:
    """The paragraphs of `text` (a docstring, a topic, a comment) that are prose, unwrapped, markup removed."""
    kept = []
    for block in re.split(r"\n[ \t]*\n", inspect.cleandoc(text.translate(PLAIN_QUOTES))):
        lines = [line.strip() for line in block.splitlines() if line.strip()]
        while lines and (_SIGNATURE.match(lines[0]) or not any(c.isalpha() for c in lines[0])):
            lines.pop(0)
        bullets = [i for i, line in enumerate(lines) if _BULLET.match(line)]
        if bullets == [0]:
            lines[0] = _BULLET.sub("", lines[0])  # one item of a list, a paragraph by itself
        elif bullets:
            lines = lines[: bullets[0]]  # a whole list: keep what introduces it, if that is a sentence
        prose = clean_sentence(" ".join(lines))
        if prose:
            kept.append(prose)
    return kept


def clean_sentence(text: str) -> str:
    """`text` on one line without markup, or "" when it is not prose."""
    for pattern, replacement in _MARKUP:
        text = pattern.sub(replacement, text)
    text = text.strip()
    sentences = _SENTENCE_END.split(text)
    if text.endswith(":") and len(sentences[-1].split()) > 5 and not _POINTS_AT_CODE.search(sentences[-1]):
        text = text[:-1] + "."
    elif text.endswith(":") or (len(sentences) > 1 and text[-1:].isalnum()):  # it introduced code that is not kept
        text = " ".join(sentences[:-1])
    if len(text) < 25 or not text.isascii() or not (text[0].isupper() or text[0] == '"') or _NOT_PROSE.search(text):
        return ""
    if text[-1].isalnum() and len(text) < 100:  # a one-line docstring without its full stop
        text += "."
    if text[-1] not in ".!?)" or text.count("(") != text.count(")") or text.count('"') not in (0, 2):
        return ""
    if text.count("__") > 4 or text.count("()") > 4 or text.count("'") > 6:
        return ""
    words = text.split()
    plain = sum(1 for word in words if re.fullmatch(r"[\"'(]?[A-Za-z][a-z]*(?:[-'][a-z]+)*[\"')]?[.,;:!?]?\)?", word))
    return text if len(words) >= 5 and plain >= 0.78 * len(words) and text.count("=") <= 1 else ""


def split_answer(paragraphs: Sequence[str], limit_chars: int = ANSWER_CHARS) -> list[str]:
    """Answers of about `limit_chars`, cut between sentences, paragraphs kept apart by a blank line."""
    answers: list[str] = []
    current = ""
    for paragraph in paragraphs:
        separator = "\n\n"
        for sentence in _SENTENCE_END.split(paragraph):
            if current and len(current) + len(sentence) > limit_chars:
                answers.append(current)
                current = ""
            current += (separator if current else "") + sentence
            separator = " "
    if current:
        if answers and len(current) < 90:
            answers[-1] += " " + current
        else:
            answers.append(current)
    return answers
