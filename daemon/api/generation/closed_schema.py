"""Closes object schemas against undeclared properties, because a function cannot use properties that a model invents.

An object schema that declares `properties` and says nothing about others gets `additionalProperties: false`, at any depth, but only
where it is the only schema of its value. Several schemas may describe one value: through allOf, `if`, an anyOf beside properties,
or a definition that is also used below one of these. If each of them were closed, it would forbid the properties that the others
declare, so they stay open. Objects below oneOf stay open, too, unless its branches exclude each other: a value that fits two
branches is invalid, and closing one branch could make it valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Schema = dict[str, Any]

# keywords whose schemas describe the same value as the schema that contains them
_SAME_VALUE = ("$ref", "allOf", "anyOf", "oneOf", "if", "then", "else", "not", "dependentSchemas")
_OWN = ("items", "prefixItems", "additionalItems", "unevaluatedItems", "additionalProperties", "unevaluatedProperties", "contains")
_MAPS = ("properties", "patternProperties")  # name -> schema
# keywords that allow properties other than the declared ones, or list whole objects
_OPENERS = (
    "additionalProperties", "patternProperties", "unevaluatedProperties", "propertyNames", "dependentRequired", "dependencies",
    "const", "enum",
)  # fmt: skip
_DESCRIBING = frozenset([*_OWN, *_MAPS, *_OPENERS, "required", "minProperties"])


class _UnknownPlace(Exception):
    """Raised for a schema with references that cannot be resolved: one that is no JSON pointer into the schema, a dynamic or
    recursive one, or any below an inner `$id`, where references have another base."""


def close(schema: Schema) -> None:
    """Closes object schemas, in place: adds `additionalProperties: false` to each object schema inside `schema` that is the only
    schema of its value. If `schema` has a reference that cannot be resolved, nothing is changed."""
    try:
        found = _sole_objects(schema)
    except _UnknownPlace:
        return
    for node in found:
        node["additionalProperties"] = False


def _sole_objects(root: Schema) -> list[Schema]:
    """Returns the object schemas inside `root` that are the only schema of their value wherever they are used, so that
    `additionalProperties: false` may be added to them. A schema is visited at most twice: once as the only schema of its value, and
    once as one of several. Raises _UnknownPlace for a reference that cannot be resolved."""
    sole: dict[int, Schema] = {}
    shared: set[int] = set()
    seen: set[tuple[int, bool]] = set()
    open_: list[tuple[Any, bool]] = [(root, True)]
    while open_:
        node, is_alone = open_.pop()
        if not isinstance(node, dict) or (id(node), is_alone) in seen:
            continue
        seen.add((id(node), is_alone))
        if (node is not root and "$id" in node) or "$dynamicRef" in node or "$recursiveRef" in node:
            raise _UnknownPlace  # below an $id, references start from that place
        if not is_alone:
            shared.add(id(node))
            open_ += [(each, False) for each in (*_same_value(node, root), *_own_values(node))]
            continue
        forms = [key for key in _SAME_VALUE if key in node]
        if all(_only_requires(node, key) for key in forms):
            if _is_closable(node, forms):
                sole[id(node)] = node
            overlap = "patternProperties" in node or "contains" in node  # these apply to the same values as properties, or items
            open_ += [(each, not overlap) for each in _own_values(node)]
        else:
            passes = len(forms) == 1 and not _DESCRIBING & node.keys() and _is_choice(node, forms[0], root)
            open_ += [(each, passes) for each in _same_value(node, root)]
            open_ += [(each, False) for each in _own_values(node)]
    return [node for key, node in sole.items() if key not in shared]


def _is_closable(node: Schema, forms: list[str]) -> bool:
    properties, least = node.get("properties"), node.get("minProperties", 0)
    if not isinstance(properties, dict) or any(key in node for key in _OPENERS):
        return False
    needed = [node, *(branch for key in forms for branch in node[key])]
    names = [name for each in needed for name in (each.get("required") if isinstance(each.get("required"), list) else ())]
    return all(isinstance(name, str) and name in properties for name in names) and (
        not isinstance(least, int | float) or least <= len(properties)
    )


def _only_requires(node: Schema, key: str) -> bool:
    """Returns whether node[key] only says which of the properties that `node` declares are required, as in "a or b": `node` has
    `properties`, and node[key] is an anyOf or allOf whose branches have no other keyword than `required` and `type`."""
    branches = node[key]
    return (
        key in ("anyOf", "allOf")
        and "properties" in node
        and isinstance(branches, list)
        and all(isinstance(each, dict) and each.keys() <= {"required", "type"} for each in branches)
    )


def _is_choice(node: Schema, key: str, root: Schema) -> bool:
    """Returns whether each branch of node[key] describes a whole value by itself, so that `additionalProperties: false` in one
    branch does not affect the others. That is so for $ref, anyOf, allOf with a single branch, and oneOf whose branches exclude each
    other. root: the schema in which references are resolved."""
    branches = node[key]
    if key == "$ref":
        return True
    if not isinstance(branches, list):
        return False
    if key == "oneOf":
        return _told_apart([_referred(each, root) for each in branches])
    return key == "anyOf" or (key == "allOf" and len(branches) == 1)


def _told_apart(branches: list[Any]) -> bool:
    """Returns whether no value can fit two of the branches: they have different types, and those for objects all require a property
    whose only allowed text differs between them."""
    kinds = [each.get("type") if isinstance(each, dict) else None for each in branches]
    if not all(isinstance(kind, str) for kind in kinds) or {"integer", "number"} <= set(kinds):
        return False
    others = [kind for kind in kinds if kind != "object"]
    objects = [each for each in branches if each.get("type") == "object"]
    if len(set(others)) < len(others):
        return False
    if len(objects) < 2:
        return True
    constants = [_constants(each) for each in objects]
    common = set(constants[0]).intersection(*constants[1:])
    return any(len({each[name] for each in constants}) == len(objects) for name in common)


def _constants(schema: Schema) -> dict[str, str]:
    """Returns the required properties for which the schema allows a single text as the value: name -> text."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict) or not isinstance(required, list):
        return {}
    found = {}
    for name in required:
        one = properties.get(name) if isinstance(name, str) else None
        if isinstance(one, dict):
            values = [one["const"]] if "const" in one else one.get("enum")
            if isinstance(values, list) and len(values) == 1 and isinstance(values[0], str):
                found[name] = values[0]
    return found


def _same_value(node: Schema, root: Schema) -> Iterator[Any]:
    for key in _SAME_VALUE:
        value = node.get(key)
        if key == "$ref" and key in node:
            yield _target(value, root)
        elif isinstance(value, list):
            yield from value
        elif key == "dependentSchemas" and isinstance(value, dict):
            yield from value.values()
        else:
            yield value


def _own_values(node: Schema) -> Iterator[Any]:
    """Yields the schemas inside `node` that describe parts of its value, such as properties and items. Schemas that describe the
    value as a whole, such as allOf, are left out."""
    for key in _MAPS:
        if isinstance(node.get(key), dict):
            yield from node[key].values()
    for key in _OWN:
        value = node.get(key)
        if isinstance(value, list):
            yield from value
        else:
            yield value


def _referred(node: Any, root: Schema) -> Any:
    """Returns `node`, or, if it consists only of a `$ref`, the schema to which that refers. root: the schema that references point
    into."""
    return _target(node["$ref"], root) if isinstance(node, dict) and node.keys() == {"$ref"} else node


def _target(reference: Any, root: Schema) -> Any:
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        raise _UnknownPlace
    node: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and name in node:
            node = node[name]
        elif isinstance(node, list) and name.isdecimal() and int(name) < len(node):
            node = node[int(name)]
        else:
            raise _UnknownPlace
    return node
