"""Gets the wheels that an offline machine may lack to run `make gpu`.

`--get FOLDER` downloads wheels for Python 3.12 on x86-64 Linux; `--use FOLDER` installs those that the running python has no
package for, into FOLDER/site. torch, triton, numpy, tokenizers and transformers are the machine's own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import pathlib
import re
import subprocess
import sys

# Each with what it needs; torch, triton, numpy and transformers are large, and there already.
PACKAGES = [
    "aiohttp",
    "aiohappyeyeballs",
    "aiosignal",
    "attrs",
    "frozenlist",
    "multidict",
    "propcache",
    "yarl",
    "idna",
    "jinja2",
    "markupsafe",
    "llguidance",
    "msgspec",
    "nvidia-ml-py",
    "prometheus-client",
    "psutil",
    "rich",
    "markdown-it-py",
    "mdurl",
    "pygments",
    "uvloop",
    "watchfiles",
    "anyio",
    "sniffio",
    "typing-extensions",
    "safetensors",
    "cuda-bindings",
    "cuda-pathfinder",
    "pytest",
    "pytest-asyncio",
    "pytest-timeout",
    "pytest-xdist",
    "execnet",
    "iniconfig",
    "packaging",
    "pluggy",
]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)] + ["manylinux2014_x86_64", "any"]
MAX_BYTES = 60 << 20
WHEELS_FOR = (3, 12)


def get(folder: pathlib.Path) -> int:
    """Each package by itself: one that has no such wheel is named, and the others come."""
    folder.mkdir(exist_ok=True)
    platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
    missing = []
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
        command += [
            "--python-version",
            ".".join(map(str, WHEELS_FOR)),
            "--implementation",
            "cp",
            "--abi",
            "cp312",
            "--abi",
            "abi3",
            "--abi",
            "none",
        ]
        done = subprocess.run([*command, *platforms, "-d", str(folder), package], capture_output=True, text=True, check=False)
        if done.returncode:
            missing.append(package)
            print(f"{package}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
    wheels = sorted(folder.glob("*.whl"))
    num_bytes = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{folder}: {len(wheels)} wheels, {num_bytes / 2**20:.1f} MiB" + (f"; without {', '.join(missing)}" if missing else ""))
    if num_bytes > MAX_BYTES:
        print(f"{num_bytes} bytes are more than the {MAX_BYTES} a folder to carry may have", file=sys.stderr)
        return 1
    return 1 if missing else 0


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def use(folder: pathlib.Path) -> int:
    there = {normal(found.metadata["Name"]) for found in importlib.metadata.distributions() if found.metadata["Name"]}
    wheels = [wheel for wheel in sorted(folder.glob("*.whl")) if normal(wheel.name.split("-")[0]) not in there]
    if not wheels:
        return 0
    if sys.version_info[:2] != WHEELS_FOR:
        running, made = (".".join(map(str, version)) for version in (sys.version_info[:2], WHEELS_FOR))
        print(f"{folder}: wheels for Python {made}, of no use to {sys.executable}, which is {running}", file=sys.stderr)
        return 0
    print(f"installing into {folder}/site: {', '.join(wheel.name.split('-')[0] for wheel in wheels)}", flush=True)
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-index",
        "--no-deps",
        "--no-compile",
    ]
    command += ["--upgrade", "--target", str(folder / "site")]
    return subprocess.run([*command, *map(str, wheels)], check=False).returncode


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu_wheels", description=__doc__)
    parser.add_argument("--get", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--use", type=pathlib.Path, metavar="FOLDER")
    options = parser.parse_args()
    if options.get:
        return get(options.get)
    if options.use:
        return use(options.use)
    parser.error("one of --get and --use")
    return 2


if __name__ == "__main__":
    sys.exit(main())
