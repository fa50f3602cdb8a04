"""The training text: prose only, questions before answers, the same every time."""

import os
import random
from pathlib import Path

import pytest

from demo import corpus, prose

SUBSET = ("argparse", "queue", "threading", "tempfile")
FILES = [(Path(os.__file__).parent / f"{name}.py", name) for name in SUBSET]

MODULE = '''
"""Reads small boxes from a file, one after the other, until the file ends.

>>> read_box(stream)
Box(1)

Arguments:

    stream    the file
    size      how much

An error in a box is *raised* when ``read`` reaches it, and not before that.
"""

def read_box(stream):
    """read_box(stream) -> Box

    Return the next box of the file, or None at the end. It is used so::

        box = read_box(stream)
    """

# A comment of three lines is taken as plain text, because it
# usually explains why something is the way it is, in whole
# sentences that are worth reading.
'''


def test_only_prose_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "boxes.py"
    path.write_text(MODULE)
    module, function, comment = corpus.build_documents([(path, "boxes")])
    assert (module.kind, module.name) == ("module", "boxes")
    assert module.paragraphs == (
        "Reads small boxes from a file, one after the other, until the file ends.",
        "An error in a box is raised when read reaches it, and not before that.",
    )
    assert (function.kind, function.name) == ("function", "read_box")
    assert function.paragraphs[0].startswith("Return the next box of the file, or None at the end.")
    assert comment.kind == "plain"


@pytest.mark.parametrize(
    "text",
    [
        ">>> a prompt of the interpreter, not a sentence.",
        "name -> the type of the name that is returned.",
        "x = y + 1; z = x * 2; w = f(z)",
        "no capital letter at the beginning of this one.",
        "Too short.",
        'An opening quote " that is never closed by another one.',
        "Une phrase écrite dans une autre langue que l'anglais.",
    ],
)
def test_what_is_not_prose_is_dropped(text: str) -> None:
    assert prose.paragraphs_of(text) == []


def test_lines_are_joined_and_hyphens_healed() -> None:
    assert prose.paragraphs_of("When a comma-\nseparated list of values is\ngiven, its elements are used.") == [
        "When a comma-separated list of values is given, its elements are used."
    ]


def test_answers_are_cut_between_sentences_and_nothing_is_lost() -> None:
    paragraph = " ".join(f"This is the sentence with the number {i} in it." for i in range(40))
    answers = prose.split_answer([paragraph])
    assert " ".join(answers) == paragraph
    assert len(answers) > 1
    assert all(answer.endswith("in it.") and len(answer) <= prose.ANSWER_CHARS + 100 for answer in answers)


def test_the_standard_library_yields_conversations_that_end() -> None:
    documents = corpus.build_documents(FILES)
    assert {d.source for d in documents} == set(SUBSET)
    assert sum(d.num_chars for d in documents) > 10_000
    for conversation in corpus.conversations(documents, "ember", random.Random(1)):
        assert conversation[-1].text.endswith(corpus.END_OF_TEXT)
        assert conversation[-1].learned
        for segment in conversation:
            assert segment.learned == (not segment.text.startswith((corpus.BEGIN_USER, corpus.BEGIN_SYSTEM)))
            assert ">>>" not in segment.text


def test_the_same_seed_gives_the_same_text() -> None:
    def text(seed: int) -> str:
        chats = corpus.conversations(corpus.build_documents(FILES), "ember", random.Random(seed))
        return "".join(segment.text for chat in chats for segment in chat)

    assert text(3) == text(3)
    assert text(3) != text(4)


def test_held_out_documents_are_not_trained_on() -> None:
    documents = corpus.build_documents(FILES)
    training, held_out = corpus.hold_out(documents, one_in=8)
    assert 1 <= len(held_out) < len(documents) / 4
    assert not {d.paragraphs for d in training} & {d.paragraphs for d in held_out}
    assert len(training) + len(held_out) == len(documents)
