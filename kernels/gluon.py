"""Which kernels in Gluon there are: Triton's experimental lower language, whose names change between releases.

Each of these modules has a general kernel in Triton that computes the same. It takes over where the module cannot be
imported, or where a kernel of it does not compile: the module is then given up for as long as the process lives, and
its import fails as if it were not there (Python's import system: None in `sys.modules`).
"""

from __future__ import annotations

import importlib
import logging
import sys
from functools import lru_cache
from types import ModuleType

log = logging.getLogger(__name__)

MODULES = frozenset(
    f"penstock.kernels.{name}"
    for name in ("attention_hopper", "experts_hopper", "grouped_hopper", "linear_hopper", "scaled_hopper")
)


@lru_cache(maxsize=len(MODULES))
def load(name: str) -> ModuleType | None:
    """The module `penstock.kernels.<name>`, or None where the general kernel has to do."""
    module = f"penstock.kernels.{name}"
    assert module in MODULES
    if sys.modules.get(module, log) is None:
        return None
    try:
        return importlib.import_module(module)
    except Exception as error:  # guard: design 7, a name that is gone fails as it is read or called
        give_up(module, name, error)
        return None


def give_up(module: str, kernel: str, error: BaseException) -> None:
    """Have the general kernel take over from now on, and say why."""
    cause = f"{type(error).__name__}: {error}".partition("\n")[0]
    fields = {"kernel": kernel, "cause": cause, "instead": "a general Triton kernel"}
    log.warning("kernel_unavailable", extra={"fields": fields})
    sys.modules[module] = None  # type: ignore[assignment]  # as documented, though its stub has modules alone
    load.cache_clear()
