"""penstock/__init__.py: the names of the Python API."""

from __future__ import annotations

import subprocess
import sys

import pytest

import penstock


def test_every_name_is_listed_and_there() -> None:
    assert dir(penstock) == sorted(penstock.__all__)
    assert {"LLM", "AsyncLLM", "SamplingParams", "RequestOutput", "Logprob", "ToolCall"} <= set(dir(penstock))
    for name in dir(penstock):
        assert getattr(penstock, name).__name__ == name


def test_a_name_that_there_is_not() -> None:
    with pytest.raises(AttributeError, match="LLMEngine"):
        penstock.LLMEngine  # noqa: B018


def test_listing_the_names_loads_none_of_them() -> None:
    """Every process of a server imports this package."""
    code = "import sys, penstock; dir(penstock); print('penstock.services' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "False\n"
