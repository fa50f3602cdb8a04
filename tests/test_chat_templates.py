"""The benchmark that reads back what chat templates write, on a template that can be read, one that cannot, and a silent one."""

from __future__ import annotations

from pathlib import Path

from benchmarks.chat_templates import TURNS, checked
from tests.daemon.text.test_tool_templates import HERMES_TEMPLATE


def test_a_template_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "model.jinja"
    path.write_text(HERMES_TEMPLATE.replace("<|end|>", "<|im_end|>"))
    row = checked(path)
    assert (row["template"], row["calls"], row["reasoning"], row["read back"]) == ("model", "hermes", "think", len(TURNS))
    path.write_text(HERMES_TEMPLATE.replace("<|end|>", "<|im_end|>").replace('"name": "', '"function": "'))
    broken = checked(path)
    assert broken["differs"] == ["call", "values", "no arguments", "two calls", "text and call", "thought and call"]
    path.write_text("{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}{# tools #}")
    assert set(checked(path)["not written"]) == set(TURNS) - {"text"}
