"""`python -P -m engine` runs one engine process; engine/main.py has its arguments."""

from __future__ import annotations

from hearthd.start import require

if __name__ == "__main__":
    require("engine", warns=False)
    from engine.main import run

    run()
