"""What several files share: processes of one machine."""

from tests.engine_core.execution.conftest import few_ranks

__all__ = ("few_ranks",)
