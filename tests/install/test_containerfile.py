"""The Containerfile, read: what it names exists, and what a container's user relies on is there. tests/image builds it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from config import paths
from config.load import flag_name
from config.schema import NodeConfig
from tests.e2e.node import Node
from tests.install.containerfile import arguments_before, read
from tests.install.environments import PACKAGES, ROOT

TEXT = (ROOT / "Containerfile").read_text()
STAGES = PACKAGES_STAGE, BUILD, FINAL = read(TEXT)
KNOWN = {
    "ARG",
    "ENV",
    "WORKDIR",
    "RUN",
    "COPY",
    "USER",
    "VOLUME",
    "EXPOSE",
    "STOPSIGNAL",
    "HEALTHCHECK",
    "ENTRYPOINT",
    "CMD",
    "LABEL",
}


def tracked() -> set[str]:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if listed.returncode:
        pytest.skip("this is no clone: what git tracks is unknown")
    return set(listed.stdout.split("\n"))


def copied() -> list[tuple[str, str]]:
    """(source, target) of what comes from the clone."""
    pairs = []
    for text in [text for stage in STAGES for text in stage.all("COPY")]:
        if not text.startswith("--from="):
            *sources, target = text.split()
            pairs += [(source, target) for source in sources]
    return pairs


def exec_form(text: str) -> list[str]:
    words = json.loads(text)
    assert all(isinstance(word, str) for word in words)
    return list(words)


def health_command() -> list[str]:
    (text,) = FINAL.all("HEALTHCHECK")
    return exec_form(text.partition(" CMD ")[2])


def test_a_line_that_is_no_instruction_is_noticed() -> None:
    with pytest.raises(ValueError, match="no instruction"):
        read("FROM x\nrun it\n")


def test_instructions_are_known() -> None:
    for stage in STAGES:
        assert {one.name for one in stage.instructions} <= KNOWN


def test_the_base_is_pinned_and_one_for_both_stages() -> None:
    arguments = arguments_before(TEXT)
    assert re.fullmatch(r"3\.\d+-slim-[a-z]+", arguments["PYTHON"]), arguments
    assert PACKAGES_STAGE.image == FINAL.image == "docker.io/library/python:${PYTHON}"
    assert BUILD.image == PACKAGES_STAGE.name
    least = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"].removeprefix(">=")
    assert tuple(map(int, arguments["PYTHON"].partition("-")[0].split("."))) >= tuple(map(int, least.split(".")))


def test_arguments_are_declared_where_they_are_used() -> None:
    for stage in STAGES:
        declared = {text.partition("=")[0] for text in stage.all("ARG")}
        used = {name for text in stage.all("RUN") for name in re.findall(r"\$\{?([A-Z_]+)", text)}
        assert declared == used, stage.name
        assert {text for text in stage.all("ARG") if text.startswith("VARIANT")} <= {"VARIANT=cpu"}


def test_what_is_copied_is_tracked_and_sent_to_the_builder() -> None:
    files = tracked()
    ignored = (ROOT / ".dockerignore").read_text()
    assert ignored == (ROOT / ".containerignore").read_text()
    lines = [line for line in ignored.splitlines() if line and not line.startswith("#")]
    allowed = {line[1:] for line in lines if line.startswith("!")}
    assert lines[0] == "*"
    sources = {source for source, _ in copied()}
    assert sources == allowed, "what is not copied need not be sent"
    for source in sources:
        assert source in files or any(file.startswith(f"{source}/") for file in files), source


def test_all_that_the_build_needs_is_copied() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*PACKAGES, "pyproject.toml", project["project"]["readme"]]
    needed += [file for files in project["tool"]["setuptools"]["data-files"].values() for file in files]
    sources = [source for source, _ in copied()]
    for name in needed:
        assert any(fnmatch(name, source) or name.startswith(f"{source}/") for source in sources), name
    for source, target in copied():
        assert target in ("./", source), "it lies where pyproject.toml looks for it"


def test_what_the_last_stage_copies_is_made_by_the_others() -> None:
    """hearthd is a layer of its own above its packages, in the same virtual environment."""
    packages, own = (text.split() for text in FINAL.all("COPY"))
    assert packages[0] == f"--from={PACKAGES_STAGE.name}"
    assert any(f"-m venv {packages[1]}" in command for command in PACKAGES_STAGE.all("RUN"))
    assert packages[1] == packages[2] == own[2], "a virtual environment does not move"
    assert own[0] == f"--from={BUILD.name}"
    (command,) = BUILD.all("RUN")
    assert command.startswith(f"{packages[1]}/bin/pip install "), "the console scripts start the Python that installed them"
    assert "--no-deps" in command.split()
    assert command.partition(" --prefix ")[2].split()[0] == own[1]


@pytest.mark.parametrize("variant", ["cpu", "cuda"])
def test_the_requirements_are_those_of_the_project(variant: str, tmp_path: Path) -> None:
    """Runs the command of the Containerfile with `echo` in the place of pip."""
    (command,) = [one for one in PACKAGES_STAGE.all("RUN") if "tomllib" in one]
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    script = f"PATH={Path(sys.executable).parent}:$PATH\n{command.replace('/opt/hearthd/bin/pip', 'echo')}"
    environment = {"VARIANT": variant, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(["sh", "-ec", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["install", "-c", "constraints.txt", "-r", "requirements.txt"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for name in ["cpu", "cuda"][: 1 + (variant == "cuda")] for line in project["optional-dependencies"][name]]
    assert (tmp_path / "requirements.txt").read_text().splitlines() == [*project["dependencies"], *extras]


def test_it_runs_as_a_user_of_a_fixed_number() -> None:
    (user,) = FINAL.all("USER")
    assert re.fullmatch(r"[1-9]\d{3,}:[1-9]\d{3,}", user), "a number, so that Kubernetes can tell that it is not root"
    assert f"--uid {user.partition(':')[0]} " in " ".join(FINAL.all("RUN"))
    behind = [one.name for one in FINAL.instructions][[one.name for one in FINAL.instructions].index("USER") :]
    assert "RUN" not in behind
    assert "COPY" not in behind


def test_the_entry_point_is_a_console_script_with_flags_that_exist() -> None:
    (text,) = FINAL.all("ENTRYPOINT")
    program, *words = exec_form(text)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert program in project["scripts"]
    flags = {flag_name(name) for name in NodeConfig.__struct_fields__} | {"--models"}
    assert {word for word in words if word.startswith("--")} <= flags
    assert "--insecure" not in words, "who may use the models is for whoever runs the container to say"
    listen = words[words.index("--listen") + 1]
    assert FINAL.all("EXPOSE") == [listen.rpartition(":")[2]]
    assert words[words.index("--models") + 1] in exec_form(FINAL.all("VOLUME")[0])


def test_its_folders_are_volumes_and_hearthds(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = dict(re.findall(r"(\w+)=(\S+)", " ".join(FINAL.all("ENV"))))
    for name in ("STATE_DIRECTORY", "CACHE_DIRECTORY"):
        monkeypatch.setenv(name, environment[name])
    volumes = exec_form(FINAL.all("VOLUME")[0])
    made = next(command for command in FINAL.all("RUN") if "install -d -o hearthd" in command)
    for folder in (paths.state_dir(), paths.cache_dir(), "/models"):
        assert folder in volumes
        assert folder in made.split()
    assert str(Path(paths.SERVICE_CONTROL).parent) in made.split(), "`hearth` in the container finds the control socket there"
    assert environment["PATH"].startswith("/opt/hearthd/bin:")


def test_the_extras_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = {one for text in re.findall(r"extras=([a-z,]+)", TEXT) for one in text.split(",")}
    assert named == {"cpu", "cuda"}
    assert named <= set(extras)


def test_each_command_is_one_the_shell_can_read() -> None:
    for stage in STAGES:
        for command in stage.all("RUN"):
            result = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, timeout=60)
            assert result.returncode == 0, (command, result.stderr)


def test_the_health_check_asks_a_daemon(tmp_path: Path) -> None:
    """The command itself, with this daemon's port in the place of the container's."""
    program, option, code = health_command()
    assert (program, option) == ("python3", "-c")
    port = FINAL.all("EXPOSE")[0]
    assert code.count(port) == 1
    with Node(tmp_path) as node:
        command = [sys.executable, option, code.replace(port, node.url.rpartition(":")[2])]
        healthy = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"http_proxy": "http://192.0.2.1:9"})
        assert healthy.returncode == 0, healthy.stderr
    assert subprocess.run(command, capture_output=True, timeout=60).returncode == 1, "it is gone"
