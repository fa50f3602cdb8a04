"""Python's own documentation as conversations: the text the demo's models are trained on.

Sources, all under the PSF licence and present on every machine that has Python: the docstrings of the standard library
(read with `ast`, nothing is imported), the docstrings of its compiled modules, the language reference that `help()`
prints (`pydoc_data.topics`), and the longer comments of the standard library as plain text. Only prose is kept:
doctests, signatures, tables and grammar are dropped, paragraph by paragraph.

A `Document` becomes a conversation: the user asks about its name or its keywords, the assistant answers with its
paragraphs, and "Tell me more." brings the rest. Everything is a pure function of the Python release and a seed.
"""

import ast
import builtins
import importlib
import inspect
import math
import pydoc_data.topics
import random
import re
import sys
import sysconfig
import types
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from demo.prose import PLAIN_QUOTES, paragraphs_of, split_answer

BEGIN_USER, BEGIN_ASSISTANT, BEGIN_SYSTEM = "<|user|>", "<|assistant|>", "<|system|>"
END_OF_TURN, END_OF_TEXT = "<|end|>", "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, END_OF_TURN, BEGIN_USER, BEGIN_ASSISTANT, BEGIN_SYSTEM)

SHORTEST_ANSWER_CHARS = 110  # a shorter docstring is learned as plain text, so that chats are worth watching
SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "__pycache__", "turtledemo", "_pyrepl"})


@dataclass(slots=True)
class Document:
    """A piece of prose. `source` is its file or module; `kind` is module, class, function, topic or plain."""

    source: str
    kind: str
    name: str
    paragraphs: tuple[str, ...]
    keywords: tuple[str, ...] = field(default=())

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.paragraphs))


@dataclass(slots=True)
class Segment:
    """A stretch of a conversation; `learned` says whether the model is trained to produce it."""

    text: str
    learned: bool


_NO_KEYWORDS = frozenset(  # too general to ask about
    re.findall(
        r"\w+",
        """return returns returned given used uses using user this that with from into when where which will must should
    does have been other each also only they their them than then there such some more most just same value values
    specified optional argument arguments default true false none otherwise called call calls make made like unless
    already either because both after before between while what create creates containing contains whether""",
    )
)
_WORD = re.compile(r"[a-z]{4,}")


# ---- sources --------------------------------------------------------------------------------------------------------


def standard_library_files(root: Path | None = None) -> list[Path]:
    """The standard library's Python files without its tests, sorted."""
    root = root or Path(sysconfig.get_path("stdlib"))
    return sorted(p for p in root.rglob("*.py") if not SKIPPED_FOLDERS & set(p.relative_to(root).parts))


def docstrings(path: Path, module: str) -> Iterator[Document]:
    """The docstrings and comments of one file, in the order of its text. A file that does not parse has none."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old files
            tree = ast.parse(source)
    except (UnicodeDecodeError, SyntaxError):  # lib2to3 carries Python 2 files
        return
    yield from _docstrings_below(tree, module, module.removesuffix(".__init__"), "module")
    for comment in _comments(source):
        yield Document(module, "plain", "", tuple(paragraphs_of(comment)))


def _docstrings_below(node: ast.AST, source: str, name: str, kind: str) -> Iterator[Document]:
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield Document(source, kind, name, tuple(paragraphs_of(text)))
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _docstrings_below(child, source, child.name, "class")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _docstrings_below(child, source, child.name, "function")
        elif isinstance(child, ast.If | ast.Try):
            yield from _docstrings_below(child, source, name, kind)


def _comments(source: str) -> Iterator[str]:
    block: list[str] = []
    for line in [*source.splitlines(), ""]:
        stripped = line.strip()
        if stripped.startswith("#") and not stripped.startswith("#!"):
            block.append(stripped.lstrip("#").strip())
        else:
            if len(block) >= 3:
                yield "\n".join(block)
            block = []


def compiled_docstrings() -> Iterator[Document]:
    """Docstrings of the types and functions written in C. Modules this build of Python lacks are left out."""
    dynload = {p.name.split(".")[0] for p in Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so")}
    seen: set[int] = set()
    for module_name in sorted({*sys.builtin_module_names, *dynload}):
        if module_name.startswith(("_test", "_xx", "xx", "_tkinter")):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                module = importlib.import_module(module_name)
        except ImportError:
            continue
        name = module_name.lstrip("_")
        yield from _compiled_below(module, name, name, seen)


def _compiled_below(owner: types.ModuleType | type, source: str, name: str, seen: set[int]) -> Iterator[Document]:
    if id(owner) in seen or (isinstance(owner, type) and owner.__flags__ & (1 << 9) and owner is not builtins.object):
        return  # bit 9: a type made by a class statement; the standard library's files have those
    seen.add(id(owner))
    text = owner.__doc__
    if isinstance(text, str):
        yield Document(source, "class" if isinstance(owner, type) else "module", name, tuple(paragraphs_of(text)))
    for key, value in sorted(vars(owner).items()):
        if isinstance(value, type) and isinstance(owner, types.ModuleType):
            yield from _compiled_below(value, source, key, seen)
        elif inspect.isbuiltin(value) or inspect.ismethoddescriptor(value) or inspect.isgetsetdescriptor(value):
            text = value.__doc__
            if isinstance(text, str):
                yield Document(source, "function", key, tuple(paragraphs_of(text)))


def topics() -> Iterator[Document]:
    """The language reference, one document per heading."""
    for key, text in sorted(pydoc_data.topics.topics.items()):
        parts = re.split(r"(?m)^(\S.*)\n([*=~-])\2{3,}\n", text)
        for heading, body in zip(parts[1::3], parts[3::3], strict=True):
            name = heading.translate(PLAIN_QUOTES).replace('"', "").strip()
            yield Document(f"topic {key}", "topic", name, tuple(paragraphs_of(body)))


def build_documents(files: Iterable[tuple[Path, str]] | None = None) -> list[Document]:
    """All documents, each paragraph once, with keywords. `files` (path, module name) replaces every source by those."""
    if files is None:
        root = Path(sysconfig.get_path("stdlib"))
        named = [(p, ".".join(p.relative_to(root).with_suffix("").parts)) for p in standard_library_files(root)]
        sources = [*topics(), *(d for p, name in named for d in docstrings(p, name)), *compiled_docstrings()]
    else:
        sources = [d for p, name in files for d in docstrings(p, name)]
    seen: set[str] = set()
    documents = []
    for document in sources:
        fresh = []
        for paragraph in document.paragraphs:
            key = re.sub(r"\W+", "", paragraph.lower())
            if key not in seen:
                seen.add(key)
                fresh.append(paragraph)
        if fresh:
            document.paragraphs = tuple(fresh)
            documents.append(document)
    _find_keywords(documents)
    return documents


def _find_keywords(documents: Sequence[Document]) -> None:
    """Keywords stand at the beginning of the text and are typical of it, so that the answer takes up the question."""
    words = [Counter(_WORD.findall(" ".join(d.paragraphs).lower())) for d in documents]
    num_documents_with = Counter(word for counts in words for word in counts)
    for document, counts in zip(documents, words, strict=True):
        early = set(_WORD.findall(_beginning(document))) - _NO_KEYWORDS
        ranked = sorted(
            (word for word in early if num_documents_with[word] >= 4),
            key=lambda w: (-counts[w] * math.log(len(documents) / num_documents_with[w]), w),
        )
        document.keywords = tuple(ranked[:3])


def _beginning(document: Document) -> str:
    return document.paragraphs[0][:160].lower()


def _named_in_text(document: Document) -> bool:
    parts = re.findall(r"[A-Z]?[a-z]{3,}", document.name)
    return any(part[:5].lower() in _beginning(document) for part in parts)


# ---- conversations --------------------------------------------------------------------------------------------------

_QUESTIONS = {
    "module": ("What is the {} module?", "What is {} for?", "Tell me about the {} module.", "What does {} do?"),
    "class": ("What is {}?", "What is a {}?", "Tell me about {}.", "What is the {} class for?", "Explain {}."),
    "function": ("What does {} do?", "What does {}() do?", "How does {} work?", "Tell me about {}.", "Explain {}."),
    "topic": ("Tell me about {}.", "Explain {}.", "What can you say about {}?", "What is the meaning of {}?", "{}"),
    "keyword": ("Tell me about {}.", "What can you say about {}?", "Explain {}.", "How does {} work?", "What is {}?"),
}
_MORE = ("Tell me more.", "Go on.", "More, please.", "And then?", "What else?", "Continue.")
_SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant that knows Python.", "Answer briefly.")
_GREETINGS = ("Hello", "Hello!", "Hi", "Hi there", "Hello, who are you?", "Good morning!", "hello", "hi!")
_WHO = ("Who are you?", "What are you?", "What is your name?", "Introduce yourself.", "who are you", "What can you do?")
_THANKS = ("Thanks", "Thank you!", "Thank you.", "Great, thanks.", "That is helpful, thank you.")


def _self_descriptions(model_name: str) -> list[tuple[Sequence[str], str]]:
    """The only text here that is not Python's: how a model answers a greeting."""
    me = model_name.capitalize()
    return [
        (
            _GREETINGS,
            f"Hello! I am {me}, a very small language model. I have read the documentation of the Python language, "
            "and I answer in its style. Ask me about modules, classes, exceptions or files.",
        ),
        (
            _WHO,
            f"I am {me}, a very small language model. I was trained on the documentation of the Python language, so I "
            "can write sentences that look like documentation. Please do not believe all of them.",
        ),
        (_THANKS, "You are welcome. Ask me about another part of the language whenever you like."),
    ]


def question(document: Document, rng: random.Random) -> str:
    """One of the ways to ask for `document`: by a name its text takes up, else mostly by keywords."""
    by_name = 0.6 if _named_in_text(document) else 0.15
    if document.keywords and (document.name.startswith("_") or rng.random() >= by_name):
        words = rng.sample(document.keywords, k=min(len(document.keywords), rng.choice((1, 1, 2))))
        form = rng.choice(_QUESTIONS["keyword"] if len(words) == 1 else _QUESTIONS["keyword"][:3])
        asked = form.format(" and ".join(words))
    else:
        name = document.name
        if document.kind == "topic":
            name = re.sub(r"\b[A-Z](?=[a-z]+\b)", lambda match: match[0].lower(), name)
        asked = rng.choice(_QUESTIONS[document.kind]).format(name)
    asked = re.sub(r"\ba (?=[aeiouAEIO])", "an ", asked[0].upper() + asked[1:])
    return asked.rstrip("?.") if rng.random() < 0.1 else asked


def chat(documents: Sequence[Document], rng: random.Random) -> list[Segment]:
    """One conversation about `documents`, in the layout of the models' chat template."""
    segments = []
    if rng.random() < 0.08:
        segments.append(Segment(f"{BEGIN_SYSTEM}{rng.choice(_SYSTEM)}{END_OF_TURN}", learned=False))
    for document in documents:
        asked = question(document, rng)
        for answer in split_answer(document.paragraphs):
            segments.append(Segment(f"{BEGIN_USER}{asked}{END_OF_TURN}{BEGIN_ASSISTANT}", learned=False))
            segments.append(Segment(answer + END_OF_TURN, learned=True))
            asked = rng.choice(_MORE)
    segments.append(Segment(END_OF_TEXT, learned=True))
    return segments


def conversations(documents: Sequence[Document], model_name: str, rng: random.Random) -> list[list[Segment]]:
    """One epoch in random order. Neighbours in a source share a conversation, short ones a plain text.

    Topics and modules, which people ask for by name, come twice, greetings three times.
    """
    result: list[list[Segment]] = []
    pending: list[Document] = []
    short: list[str] = []

    def flush() -> None:
        if pending:
            result.append(chat(pending, rng))
            pending.clear()

    source, turns = "", 1
    for document in [*documents, *(d for d in documents if d.kind in ("topic", "module"))]:
        if document.source != source:
            flush()
            source = document.source
        if document.kind == "plain":
            result.append([Segment("\n\n".join(document.paragraphs) + END_OF_TEXT, learned=True)])
        elif document.num_chars < SHORTEST_ANSWER_CHARS:
            short.append("\n\n".join(document.paragraphs))
            if len(short) == 6:
                result.append([Segment("\n\n".join(short) + END_OF_TEXT, learned=True)])
                short.clear()
        else:
            pending.append(document)
            if len(pending) >= turns:
                flush()
                turns = rng.choice((1, 1, 1, 2, 3))
    flush()
    for asked, answer in _self_descriptions(model_name):
        for text in [*asked] * 3:
            head = Segment(f"{BEGIN_USER}{text}{END_OF_TURN}{BEGIN_ASSISTANT}", learned=False)
            result.append([head, Segment(answer + END_OF_TURN, learned=True), Segment(END_OF_TEXT, learned=True)])
    rng.shuffle(result)
    return result


def hold_out(documents: Sequence[Document], one_in: int = 40) -> tuple[list[Document], list[Document]]:
    """(training, held out): about one document in `one_in`, whole, is never trained on; which ones, its name decides."""

    def is_held_out(document: Document) -> bool:
        return zlib.crc32(f"{document.source}/{document.name}".encode()) % one_in == 0

    return [d for d in documents if not is_held_out(d)], [d for d in documents if is_held_out(d)]
