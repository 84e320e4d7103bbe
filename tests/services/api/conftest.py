"""The checks that these tests share hold under `python -O` as well."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.services.api.pipe", "tests.services.api.process", "tests.services.api.shapes")
