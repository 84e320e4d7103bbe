"""`penstock engine`: what `penstock serve` starts, less HTTP. Its one client is the program that started it.

The program connects as the api does; when it ends, in whatever way, so does the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.protocol.parts import OPTION, parts_of
from penstock.services.supervisor import logs, process
from penstock.services.supervisor.launcher import ENTRY, Launch, placed, resolved
from penstock.services.supervisor.options import sized, usable_cores
from penstock.services.supervisor.run_directory import RunDirectory
from penstock.services.supervisor.topology import check_topology


def engine(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """Run an engine until SIGTERM, SIGINT, a failure or the end of the program; the exit code.

    Raises ConfigError, ModelError before anything is started.
    """
    with logs.nonblocking_output():
        logs.setup("launcher", config.run.log_level, config.run.log_format)
        return run(config, environ)


def run(config: Config, environ: Mapping[str, str]) -> int:
    """As `engine`, with output and log set up."""
    if not config.run.run_dir:
        raise ConfigError("--run-dir", "", "an engine needs the directory in which its client finds it")
    config = resolved(sized(config, usable_cores()))
    parts = dict(parts_of(config))
    if parts.pop(Role.API, None) is None:
        raise ConfigError(OPTION, config.run.parts, "the program that starts an engine is its api, which is a part too")
    check_topology(config, parts)
    directory = RunDirectory.open(config.run.run_dir)
    try:
        owner = process.parent(environ)
        try:
            launch = Launch(placed(config, directory), directory, ENTRY, parts, owner=owner, chat=False)
            try:
                return launch.run()
            finally:
                launch.close()
        finally:
            if owner is not None:
                os.close(owner)
    finally:
        directory.close()
