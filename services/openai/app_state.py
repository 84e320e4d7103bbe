"""What every endpoint works with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from penstock.protocol.config import Config
from penstock.services.client.engine_client import EngineClient
from penstock.services.client.model_info import ModelInfo
from penstock.services.client.model_switcher import ModelSwitcher
from penstock.services.http.security import Keys
from penstock.services.http.server import ConnectionLimiter
from penstock.services.metrics.exporter import Exporter
from penstock.services.metrics.requests import Traffic
from penstock.services.openai.media_fetcher import MediaFetcher
from penstock.services.openai.responses.store import ResponseStore
from penstock.services.tracing.tracer import Tracer

if TYPE_CHECKING:  # it works with what is below
    from penstock.services.openai.responses.endpoint import BackgroundWork


@dataclass(frozen=True)
class AppState:
    """The parts of one api process. Of several models an endpoint gets those of the one that is asked for; `config`,
    `model` and `engine_client` of the whole are the first one's."""

    config: Config
    index: int
    model: ModelInfo
    engine_client: EngineClient
    traffic: Traffic
    exporter: Exporter
    keys: Keys
    responses: ResponseStore
    background: BackgroundWork
    media: MediaFetcher
    tracer: Tracer = field(default_factory=Tracer)
    operators: Keys | None = None  # of --operator-key-file; None without --admin-address
    limiter: ConnectionLimiter = field(default_factory=ConnectionLimiter)
    models: tuple[AppState, ...] = ()  # of each of several models; empty: there is one
    switcher: ModelSwitcher | None = None  # of several models, in the process that listens to the operator

    @property
    def each(self) -> tuple[AppState, ...]:
        """Of each model."""
        return self.models or (self,)
