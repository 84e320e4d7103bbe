"""The table of the run directory's files is true to the modules that write them."""

from __future__ import annotations

from fnmatch import fnmatch

import pytest

from penstock.protocol.links import LINKS
from penstock.protocol.run_directory import RUN_FILES
from penstock.services.executor.crash_report import FOLDER
from penstock.services.metrics.snapshot import SUFFIX
from penstock.services.supervisor.restart_policy import FILE
from penstock.services.supervisor.run_directory import LOCK

NAMES = (LOCK, FILE, f"api-0{SUFFIX}", f"{FOLDER}/report.json", *(f"{link.name}-0.sock" for link in LINKS))


@pytest.mark.parametrize("name", NAMES)
def test_every_file_stands_in_the_table_once(name: str) -> None:
    assert [row.pattern for row in RUN_FILES if fnmatch(name, row.pattern)] != []
    assert len({row.pattern for row in RUN_FILES}) == len(RUN_FILES)
