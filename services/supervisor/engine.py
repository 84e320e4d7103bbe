"""`penstock engine`: `penstock serve` without HTTP. Its only client is the program that started it.

The program connects as the api does; when it ends, in whatever way, so does the engine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.protocol.parts import OPTION, parts_of
from penstock.services.supervisor import logs
from penstock.services.supervisor.launcher import ENTRY, LAUNCHER, launch
from penstock.services.supervisor.options import sized, usable_cores
from penstock.services.supervisor.preflight import resolved


def engine(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """Run an engine until SIGTERM, SIGINT, a failure or the end of the program; returns the exit code.

    Raises ConfigError, ModelError before anything is started.
    """
    with logs.nonblocking_output():
        logs.setup(LAUNCHER, config.run.log_level, config.run.log_format)
        if not config.run.run_dir:
            raise ConfigError("--run-dir", "", "an engine needs the directory in which its client finds it")
        config = resolved(sized(config, usable_cores()))
        parts = dict(parts_of(config))
        if parts.pop(Role.API, None) is None:
            why = "the program that starts an engine is its api, which is a part too"
            raise ConfigError(OPTION, config.run.parts, why)
        return launch(config, parts, ENTRY, environ)
