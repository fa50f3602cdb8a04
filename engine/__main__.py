"""`python -P -m engine` runs one engine process; engine/main.py has its arguments. With --fork-server it runs the process that
forks engines (engine/forks/server.py).
"""

from __future__ import annotations

import sys

from hearthd.start import require

if __name__ == "__main__":
    require("engine", warns=False)
    if "--fork-server" in sys.argv:
        from engine.forks.server import main

        main()
    else:
        from engine.main import run

        run()
