"""Completion in a real bash, with a `hearth` that answers as the daemon does; zsh and fish read their scripts if they are there."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from daemon.cli.completion import SHELLS, commands_of, script
from daemon.cli.main import make_parser

NAMES = ["meta/llama-3.2-1b", "qwen3"]


def complete(tmp_path: Path, *words: str) -> list[str]:
    """What bash offers for the last of `words`."""
    answers = json.dumps([{"name": name, "state": "cold", "reason": "name"} for name in NAMES], indent=1)
    (tmp_path / "script").write_text(script("bash", make_parser()))
    (tmp_path / "answers").write_text(answers)
    code = f"""
        hearth() {{ echo "$*" >> {tmp_path}/asked; cat {tmp_path}/answers; }}
        source {tmp_path}/script
        COMP_WORDS=(hearth "$@"); COMP_CWORD=$#
        _hearth
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    result = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True, timeout=30, check=True)
    assert result.stderr == ""
    return result.stdout.split()


def test_bash(tmp_path: Path) -> None:
    every = [command.name for command in commands_of(make_parser())]
    assert complete(tmp_path, "") == every
    assert complete(tmp_path, "un") == ["unload", "unpin"]
    assert complete(tmp_path, "load", "") == NAMES
    assert complete(tmp_path, "--json", "--control", "/x.sock", "pin", "me") == ["meta/llama-3.2-1b"]
    assert (tmp_path / "asked").read_text().splitlines()[-1] == "--control /x.sock models --json"
    assert "--no-wait" in complete(tmp_path, "load", "--")
    assert complete(tmp_path, "completion", "") == list(SHELLS)
    assert complete(tmp_path, "load", "qwen3", "") == [], "nothing follows the model"
    assert complete(tmp_path, "status", "") == []


@pytest.mark.parametrize("shell", SHELLS)
def test_scripts_know_every_command_and_flag(shell: str) -> None:
    text = script(shell, make_parser())
    for command in commands_of(make_parser()):
        assert command.name in text
        for option in command.options:
            for flag in option.flags:
                assert (flag if shell != "fish" else flag.lstrip("-")) in text


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_read_their_scripts(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed here")
    path = tmp_path / "script"
    path.write_text(script(shell, make_parser()))
    result = subprocess.run([shell, "-n", str(path)], capture_output=True, text=True, timeout=30)
    assert (result.returncode, result.stderr) == (0, "")


def test_fish(tmp_path: Path) -> None:
    if shutil.which("fish") is None:
        pytest.skip("fish is not installed here")
    (tmp_path / "script").write_text(script("fish", make_parser()))
    (tmp_path / "answers").write_text(json.dumps([{"name": name, "state": "cold"} for name in NAMES], indent=1))
    code = f"function hearth; cat {tmp_path}/answers; end; source {tmp_path}/script; "
    code += "complete -C 'hearth load '; complete -C 'hearth unl'"
    result = subprocess.run(
        ["fish", "-c", code], capture_output=True, text=True, timeout=30, env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    )
    assert [line.split("\t")[0] for line in result.stdout.splitlines()] == [*NAMES, "unload"]
