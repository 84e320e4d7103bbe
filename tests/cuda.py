"""What tests on a GPU share."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_synchronization() -> Iterator[None]:
    """While inside, an operation that waits for the device raises RuntimeError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns that the mode does not know every operation that waits
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
