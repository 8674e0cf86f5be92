"""`python -m orchestrator` is the command `linkcpp`."""

from __future__ import annotations

from orchestrator.cli.app import main

if __name__ == "__main__":
    main(prog_name="linkcpp")
