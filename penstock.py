"""Penstock's public face: `from penstock import ...` and `python -m penstock`."""

from __future__ import annotations

from protocol.config import Config
from protocol.errors import ConfigError, LinkError, ModelError, PenstockError

__all__ = ["Config", "ConfigError", "LinkError", "ModelError", "PenstockError"]

if __name__ == "__main__":
    import sys

    from services.cli import main

    sys.exit(main())
