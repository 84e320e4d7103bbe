"""Penstock's entry with an executor that fails at will: for tests of what others make of it.

Run in place of penstock/__main__.py. A prompt that holds token CRASH ends the executor's process with an exception when
its first token is computed; one that holds HANG makes a step last for ever, once, as the file of $FAULT_MARK says.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

CRASH, HANG = 4090, 4091  # of the embedded model's vocabulary, where no text leads


class Faulty:
    """A runner that looks at prompts before it runs them."""

    def __init__(self, runner: Any, mark: Path) -> None:
        self._runner = runner
        self._mark = mark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def begin(self, plan: Any) -> Any:
        for start in plan.starts:
            tokens = memoryview(start.token_ids).cast("i")[: start.prompt_tokens]
            if CRASH in tokens:
                raise RuntimeError("an injected fault")
            if HANG in tokens and not self._mark.exists():
                self._mark.touch()
                threading.Event().wait()
        return self._runner.begin(plan)


def executor() -> None:
    """Have executors started with such a runner."""
    from penstock.services.executor import startup as starting

    real = starting.start

    def start(*arguments: Any) -> Any:
        engine = real(*arguments)
        return dataclasses.replace(engine, runner=Faulty(engine.runner, Path(os.environ["FAULT_MARK"])))

    starting.start = start


if __name__ == "__main__":
    from penstock.services import cli
    from penstock.services.supervisor import launcher as launch

    if sys.argv[1] == "executor":
        executor()
    served = launch.serve
    launch.serve = lambda config: served(config, Path(__file__))
    sys.exit(cli.main(sys.argv[1:]))
