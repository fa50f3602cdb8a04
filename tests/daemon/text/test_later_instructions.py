"""System and developer messages behind the first, for chat templates that take them, refuse them or leave them out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from daemon.errors import BadRequest
from daemon.text.checkpoint_text import CheckpointText
from daemon.text.job_parts import rendered
from tests.daemon.text.test_plain_calls import LLAMA2, NO_SYSTEM
from tests.daemon.text.tokenizers_made import CHATML, byte_level, checkpoint

REFUSES_LATER = """\
{% for message in messages %}{% if message.role == 'system' and not loop.first %}
{{ raise_exception('System message must be at the beginning.') }}{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}"""
LEAVES_OUT_LATER = """\
{% for message in messages %}{% if loop.first or message.role != 'system' %}
[{{ message.role }}]{{ message.content }}{% endif %}{% endfor %}"""
KIND = {"role": "system", "content": "Be kind."}
BRIEF = {"role": "developer", "content": "Be brief.\n"}
HI, ANSWER, WHY = ({"role": role, "content": text} for role, text in (("user", "Hi"), ("assistant", "Yes?"), ("user", "Why?")))


def render(folder: Path, template: str, *messages: Any) -> str:
    checkpoint(folder, byte_level(), chat_template=template)
    options = {"add_generation_prompt": True, "tools": b""}
    return rendered(CheckpointText("m", str(folder), None), msgspec.msgpack.encode(messages), options)


def test_a_template_that_shows_them_in_their_place_is_left_alone(tmp_path: Path) -> None:
    text = render(tmp_path / "m", CHATML, KIND, HI, BRIEF, ANSWER, WHY)
    places = [text.index(each) for each in ("Be kind.", "Hi", "Be brief.", "Yes?", "Why?")]
    assert places == sorted(places)


@pytest.mark.parametrize("template", [REFUSES_LATER, LEAVES_OUT_LATER])
def test_they_become_one_with_the_first_elsewhere(tmp_path: Path, template: str) -> None:
    together = "[system]Be kind.\n\nBe brief.\n"
    assert render(tmp_path / "a", template, KIND, BRIEF, HI) == together + "[user]Hi"
    assert render(tmp_path / "b", template, KIND, HI, BRIEF, ANSWER, WHY) == together + "[user]Hi[assistant]Yes?[user]Why?"
    # Claude Code's place for them; nothing else comes first
    assert render(tmp_path / "c", template, HI, BRIEF) == "[system]Be brief.\n[user]Hi"
    assert render(tmp_path / "d", template, HI, BRIEF, WHY) == "[system]Be brief.\n[user]Hi\n\nWhy?"


def test_roles_alternate_without_them(tmp_path: Path) -> None:
    text = render(tmp_path / "m", LLAMA2, HI, BRIEF, WHY, ANSWER, KIND, WHY)
    assert "<<SYS>>Be brief.\n\n\nBe kind.<</SYS>>Hi\n\nWhy? [/INST]" in text


def test_a_template_without_instructions_says_why(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        render(tmp_path / "m", NO_SYSTEM, HI, ANSWER, BRIEF)
