"""A frontend of a tokenizer process and a client of it, without sockets."""

from __future__ import annotations

import pytest

from penstock.engine_core.text.frontend import Frontend
from tests.engine_core.text.streams import Client, make_frontend


@pytest.fixture
def frontend() -> Frontend:
    return make_frontend()


@pytest.fixture
def client(frontend: Frontend) -> Client:
    return Client(frontend)
