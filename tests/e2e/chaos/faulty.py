"""Penstock's entry with an executor that fails, or takes its time, at will: for tests of what others make of it.

Run in place of penstock/__main__.py. A prompt that holds token CRASH ends the executor's process with an exception when
its first token is computed; one that holds HANG makes a step last for ever, once, as a file of $FAULTS says. While that
folder has a file SLOW, every step takes STEP longer: no request ends before a test has done something to it.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

CRASH, HANG = 4090, 4091  # of the embedded model's vocabulary, where no text leads
FAULTS = "FAULTS"  # the environment's name of a folder
HUNG, SLOW = "hung", "slow"  # its files
STEP = 0.25  # seconds


@contextmanager
def slow(folder: Path) -> Iterator[None]:
    """Executors with this folder take long for each step, so that what runs does not end by itself."""
    (folder / SLOW).touch()
    try:
        yield
    finally:
        (folder / SLOW).unlink()


class Faulty:
    """A runner that looks at prompts before it runs them."""

    def __init__(self, runner: Any, folder: Path) -> None:
        self._runner = runner
        self._hung, self._slow = folder / HUNG, folder / SLOW

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, plan: Any) -> Any:
        if self._slow.exists():
            threading.Event().wait(STEP)
        for start in plan.starts:
            tokens = memoryview(start.token_ids).cast("i")[: start.prompt_tokens]
            if CRASH in tokens:
                raise RuntimeError("an injected fault")
            if HANG in tokens and not self._hung.exists():
                self._hung.touch()
                threading.Event().wait()
        return self._runner.begin(plan)


def executor() -> None:
    """Have executors started with such a runner."""
    from penstock.services.executor import startup as starting

    real = starting.start

    def start(*arguments: Any) -> Any:
        engine = real(*arguments)
        return dataclasses.replace(engine, runner=Faulty(engine.runner, Path(os.environ[FAULTS])))

    starting.start = start


if __name__ == "__main__":
    from penstock.services import cli
    from penstock.services.supervisor import launcher as launch

    if sys.argv[1] == "executor":
        executor()
    served = launch.serve
    launch.serve = lambda config: served(config, Path(__file__))
    launch.ENTRY = Path(__file__)  # of an engine
    sys.exit(cli.main(sys.argv[1:]))
