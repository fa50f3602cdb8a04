"""`python -P -m engine` runs one engine process; engine/main.py has its arguments. With --fork-server it runs the process that
forks engines (engine/forks/server.py).
"""

from __future__ import annotations

import gc
import sys

from hearthd.start import require

if __name__ == "__main__":
    gc.disable()  # imported objects stay, and collecting garbage takes a fifth of the imports' time; the engine's loop does it
    require("engine", warns=False)
    if "--fork-server" in sys.argv:
        from engine.forks.server import main

        main()
    else:
        from engine.main import run

        run()
