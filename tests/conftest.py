"""Before anything imports Triton: without a GPU, or where it is hidden as in `make test`, its kernels run by its
interpreter, which is chosen at import."""

from __future__ import annotations

import atexit
import gc
import os
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.sweeps import shorten

if os.environ.get("CUDA_VISIBLE_DEVICES") == "" or not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# Below a long TMPDIR the addresses of tests' Unix sockets would be longer than the 107 bytes that Linux takes.
if len(tempfile.gettempdir()) > 16 and os.access("/tmp", os.W_OK):
    os.environ["TMPDIR"] = tempfile.tempdir = "/tmp"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the cores are taken: a worker runs on each

# Checks that tests share hold under `python -O` as well. Told here, before any folder's tests import them.
pytest.register_assert_rewrite(
    "tests.services.client.fake_engine", "tests.services.http.process", "tests.services.openai.shapes"
)

# How long a case takes, or how long it takes to make one, says what else the machine does. Cases are the same in every
# run, so that a change and nothing else makes a test fail; `--hypothesis-profile=search` looks for new ones.
settings.register_profile("search", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("any machine", settings.get_profile("search"), derandomize=True)
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is collected stays: to look for garbage among it costs each worker a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """For `--dist loadfile`: see tests/units.py."""
    if config.getoption("dist") == "loadfile":
        from tests.units import Units

        return Units(config, log)
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A GPU, where a case costs nothing, takes all of a sweep."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        from tests.units import ordered, unit_of

        places = {unit: at for at, unit in enumerate(ordered(item.nodeid for item in items))}
        items.sort(key=lambda item: places[unit_of(item.nodeid)])
    if os.environ.get("TRITON_INTERPRET") == "1":
        shorten(items)


# What is frozen ends with the process as anything else does. Not before: pytest looks for garbage when it ends.
atexit.register(gc.unfreeze)


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What earlier files left and did not let go: whoever collects garbage need not look at it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Numbers drawn by torch are the same whichever tests this process ran before."""
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)
