"""Interprets the setting `chat_template` of models, whose value is the path of a file or the text of a template."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from config.schema import NodeConfig


def is_template_text(chat_template: str) -> bool:
    """Returns whether the value of the setting `chat_template` is the text of a Jinja template; if not, it is the path of a
    file."""
    return "{" in chat_template or "\n" in chat_template


def template_files(config: NodeConfig, names: Iterable[str]) -> list[str]:
    """Returns the absolute paths of the chat templates that the settings of the models `names` give as files. Models that have no
    settings, no template, or the text of one are left out."""
    settings = [config.models[name].chat_template for name in names if name in config.models]
    return [os.path.abspath(each) for each in settings if each is not None and not is_template_text(each)]
