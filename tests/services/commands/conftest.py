"""One server with the embedded model for all commands that talk to one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.server import Server, serving


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server"), "--api-key", "open") as server:
        yield server
