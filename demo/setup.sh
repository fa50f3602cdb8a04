#!/bin/sh
# Makes the virtual environment: setup.sh PYTHON VENV [test]. Says first what it will do; leaves nothing outside VENV but pip's own
# cache. With `test`: also what the test suite needs.
set -eu
python=$1
venv=$2
what=${3:-run}

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"hearthd needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11 demo")
PY

recent='import sys, torch; sys.exit(tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11))'

# of a virtual environment's python only the packages below it would be seen
own='import sys; sys.exit(sys.prefix != sys.base_prefix)'
if "$python" -c "$own" && "$python" -c "$recent" 2>/dev/null; then
    [ -x "$venv/bin/python" ] || "$python" -m venv --system-site-packages "$venv"
else
    [ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
fi
constraints=constraints.txt
if "$venv/bin/python" -c "$recent" 2>/dev/null; then
    echo "Setting up $venv with the torch that is there already (about 200 MB of disk, half a minute)."
    # it stays, whichever version it is
    constraints=$venv/constraints.txt
    "$venv/bin/python" -c 'import torch; print("torch==" + torch.__version__)' >"$constraints"
else
    echo "Setting up $venv: torch and a dozen smaller packages (about 1.2 GB of disk with a CPU build of torch, several more with"
    echo "a CUDA build; about a minute where packages arrive at 20 MB/s)."
fi
extras=cpu
if [ "$what" = test ]; then
    echo "And what tests and checks need: pytest, transformers, triton, mypy, ruff and others (about 1 GB of disk)."
    extras=test,cpu
fi
echo "\$ $venv/bin/python -m pip install -c $constraints -e '.[$extras]'"
# what takes its time is shown: downloads of megabytes, and the unpacking at the end; errors arrive as they are
failed=$venv/.failed
{
    "$venv/bin/python" -m pip install --no-compile --progress-bar off --disable-pip-version-check \
        -c "$constraints" -e ".[$extras]" || echo >"$failed"
} | awk '
    /Downloading .* MB\)/ { sub(/^ */, "  "); print; fflush() }
    /^Installing collected packages/ { print "  Installing " NF - 3 " packages"; fflush() }'
if [ -e "$failed" ]; then
    rm -f "$failed"
    {
        echo
        echo "$venv could not be set up: what pip says is above. Where PyPI cannot be reached, pip can be told of a mirror or of a folder"
        echo "of wheels: PIP_INDEX_URL=https://mirror/simple, or PIP_NO_INDEX=1 PIP_FIND_LINKS=/folder, before the same command."
    } >&2
    exit 1
fi
# pip would compile what it installs on one core. A few files do not compile: they are for newer Pythons, and are never imported.
# Two fifths of the rest are left out: few of those are imported, and are compiled then.
left='site-packages/(networkx|mypy|torch/_inductor|torch/testing|transformers/models|.*/tests)/'
"$venv/bin/python" -W ignore -m compileall -qq -j 0 -x "$left" "$venv/lib" || true
