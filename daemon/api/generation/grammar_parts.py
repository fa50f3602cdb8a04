"""Parts of grammars (Lark, as llguidance reads it) that several forms of tool calls have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from daemon.api.generation.inexpressible import Inexpressible

UNDECLARED_KEY = "/[A-Za-z_][0-9A-Za-z_]{0,63}/"  # the name of an argument that no schema declares
ANY_LENGTH = "*"  # the repetition of a text of any length, also an empty one
_MOST_LENGTH = 4096  # the longest string length in a schema that a grammar can enforce


def escaped(tag: str) -> str:
    """Returns a tag as a part of a regular expression."""
    return "".join(f"\\{char}" if char in "[]|/" else char for char in tag)


def without(terminal: str, repetition: str, tag: str) -> str:
    """Returns the rule of a text that does not contain a tag, neither as a special token nor as plain characters. terminal: the
    rule's name. repetition: the quantifier of a regular expression for the text's length, such as "*" or "{2,5}"."""
    return f"{terminal}: /(?s:.{repetition})/ & ~/(?s:.*){escaped(tag)}(?s:.*)/"


def repetition_of(schema: Mapping[str, Any], path: str) -> str:
    """Returns the quantifier of a regular expression for the length of a string, such as "*" or "{2,5}". schema: the string's JSON
    schema. path: the schema's path, for errors. Raises Inexpressible for a length that no grammar can enforce."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if max(least, most or 0) > _MOST_LENGTH:
        raise Inexpressible(f"{path}.{'minLength' if least > _MOST_LENGTH else 'maxLength'}")
    return ANY_LENGTH if not least and most is None else f"{{{least},{'' if most is None else most}}}"


def in_order(of: str, required: Sequence[bool], comma: str) -> list[str]:
    """Returns the grammar rules of a sequence of items in a fixed order, separated by commas. of: a word that makes the rules'
    names unique: the first rule is `first_{of}_0`, and the caller writes the rule `item_{of}_{n}` of each item number n. required:
    for each item, whether it must be there. comma: the separator, in the grammar's syntax."""
    rules = []
    for number, must in enumerate(required):
        here, following = f"{of}_{number}", f"{of}_{number + 1}"
        # rules first_*: nothing was written before; other_*: something was, so a comma precedes the next
        rules += [
            f"first_{here}: item_{here} other_{following}{'' if must else f' | first_{following}'}",
            f"other_{here}: ({comma} item_{here}){'' if must else '?'} other_{following}",
        ]
    end = f"{of}_{len(required)}"
    return [*rules, f'first_{end}: ""', f'other_{end}: ""']
