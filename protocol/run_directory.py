"""What travels through the run directory: every file that one process of a server writes there and another one reads.

Links and notices carry messages; a file holds what must outlive its writer, or what a reader looks up by itself. The
directory has mode 0700. services/supervisor/run_directory.py makes it and removes what is left over.
"""

from __future__ import annotations

import msgspec


class RunFile(msgspec.Struct, frozen=True):
    """One row of the table."""

    pattern: str  # glob(7)
    writer: str
    readers: str
    holds: str
    kept: bool = False  # after the end of a server whose directory the operator named


RUN_FILES: tuple[RunFile, ...] = (
    RunFile("lock", "launcher", "launcher, api", "the lock of the launcher that runs here", kept=True),
    RunFile("*.sock", "binders, launcher", "their peers", "sockets of links and of sd_notify"),
    RunFile("*.store", "executors of a group", "the same", "torch's FileStore of one generation of a group"),
    RunFile("*.metrics", "every process", "api", "a snapshot of its metrics"),
    RunFile("*.starts", "every process", "its next start", "how often it was started since it ended in order"),
    RunFile("*.starts.new", "every process", "nobody", "the next *.starts, before its rename"),
    RunFile("*.kv", "executor of a prefill replica", "executors of others", "a link to its memory for KV blocks"),
    RunFile("*.kv.new", "the same", "nobody", "the next *.kv, before its rename"),
    RunFile("adapters.json", "api", "api", "LoRA adapters that were loaded and unloaded at run time"),
    RunFile("adapters.lock", "api", "api", "held while that is replaced"),
    RunFile("failures.*", "launcher", "api, scheduler", "processes in a crash loop"),
    RunFile("crashes/*.json", "executor", "the operator", "reports of executors that failed", kept=True),
)
