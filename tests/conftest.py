"""Before anything imports Triton: without a GPU its kernels run by its interpreter, which is chosen at import."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are taken: a worker runs on each

# Checks that tests share hold under `python -O` as well. Told here, before any folder's tests import them.
pytest.register_assert_rewrite("tests.services.api.pipe", "tests.services.api.process", "tests.services.api.shapes")

settings.register_profile("any machine", deadline=None)  # how long a case takes says what else the machine does
settings.load_profile("any machine")
