"""For trainers that update a server's weights: see docs/features/weight-updates.md."""

from penstock.engine_core.loading.digests import checksum
from penstock.engine_core.loading.shared_memory import share

__all__ = ["checksum", "share"]
