"""What the run in the virtual machine reads out of the docs, and of what the machine tells."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.vm import documents, image, results
from tests.vm.results import Result

PAGE = """
**The address** is the socket unit's:

```
$ sudo systemctl edit hearthd.socket
[Socket]
ListenStream=10.0.0.5:8000
$ sudo systemctl restart hearthd.socket    # both
```

In a drop-in `LoadCredential=keys:/etc/hearthd/keys.toml`, in `node.toml` `keys_file =
"credential:keys"`; and `LogsDirectory=hearthd`.
"""
RESULT = Result("restart", "streams", "they go on", True, 3.2, "8 of 8")


def test_what_is_typed_into_an_editor() -> None:
    shown = documents.block(PAGE, "10.0.0.5")
    assert documents.typed_after(shown, "systemctl edit") == "[Socket]\nListenStream=10.0.0.5:8000\n"
    assert documents.commands(shown) == ["systemctl edit hearthd.socket", "systemctl restart hearthd.socket"]


def test_what_is_said_in_the_text() -> None:
    assert documents.spans(PAGE, "In a drop-in")[2] == 'keys_file = "credential:keys"'
    with pytest.raises(documents.NotFound, match="there are 0"):
        documents.block(PAGE, "TLS")


def test_lines_of_the_machine() -> None:
    line = RESULT.to_json()
    assert results.parse(line) == RESULT
    assert results.parse(line[:-9]) is None, "cut off"
    assert not results.has_ended(line)
    assert results.has_ended(json.dumps({"end": True}))


def test_the_table_names_what_failed() -> None:
    table = results.table([RESULT, replace(RESULT, ok=False, detail="a|b"), replace(RESULT, ok=None, detail="")])
    assert [row.split(" | ")[2] for row in table.splitlines()[2:]] == ["ok: 8 of 8", "FAILED: a/b", "left out"]


def test_the_null_runner_needs_no_torch() -> None:
    assert image.wanted(["numpy>=1.26", "torch>=2.11"]) == ["numpy>=1.26"]
