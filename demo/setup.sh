#!/bin/sh
# Makes the virtual environment: setup.sh PYTHON VENV. Says first what it will do; leaves nothing outside VENV but pip's own cache.
set -eu
python=$1
venv=$2

"$python" - <<'PY' || exit 1
import sys
if sys.version_info < (3, 11):
    sys.exit(f"hearthd needs Python 3.11 or newer; {sys.executable} is {sys.version.split()[0]}. Try: make PYTHON=python3.11 demo")
PY

recent='import sys, torch; sys.exit(tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11))'

if "$python" -c "$recent" 2>/dev/null; then
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
echo "\$ $venv/bin/python -m pip install -c $constraints -e '.[cpu]'"
"$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" -e '.[cpu]'
echo "\$ $venv/bin/python -m engine.warm .demo/cache float32   # compiles the CPU kernels, once"
"$venv/bin/python" -m engine.warm .demo/cache float32
