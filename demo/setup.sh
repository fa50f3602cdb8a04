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

if "$python" -c 'import sys, torch; sys.exit(tuple(int(x) for x in torch.__version__.split("+")[0].split(".")[:2]) < (2, 11))' 2>/dev/null; then
    echo "Setting up $venv with the torch that $python already has (about 150 MB of disk, half a minute)."
    site=--system-site-packages
else
    echo "Setting up $venv: torch and a dozen smaller packages (about 1.2 GB of disk with a CPU build of torch; about a minute where packages arrive at 20 MB/s)."
    site=
fi

[ -x "$venv/bin/python" ] || "$python" -m venv $site "$venv"
echo "\$ $venv/bin/python -m pip install -c constraints.txt -e '.[cpu]'"
constraints=constraints.txt
if [ -n "$site" ]; then
    # The torch that is there stays, whichever version it is.
    constraints=$venv/constraints.txt
    "$python" -c 'import torch; print("torch==" + torch.__version__)' >"$constraints"
fi
"$venv/bin/python" -m pip install -q --disable-pip-version-check -c "$constraints" -e '.[cpu]'
echo "\$ $venv/bin/python -m engine.warm .demo/cache float32   # compiles the CPU kernels, once"
"$venv/bin/python" -m engine.warm .demo/cache float32
