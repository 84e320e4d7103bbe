"""What every endpoint works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.protocol.config import Config
from penstock.services.api.accepting import Room
from penstock.services.api.figures import Figures
from penstock.services.api.keys import Keys
from penstock.services.api.ledger import Ledger
from penstock.services.api.metrics import Traffic
from penstock.services.api.pipeline import Pipeline
from penstock.services.api.responses.store import ResponseStore
from penstock.services.api.served import ServedModel
from penstock.services.tracing.tracer import Tracer


@dataclass(frozen=True)
class Service:
    """The parts of one api process."""

    config: Config
    index: int
    model: ServedModel
    pipeline: Pipeline
    traffic: Traffic
    ledger: Ledger
    keys: Keys
    responses: ResponseStore
    figures: Figures
    tracer: Tracer | None = None  # None: no traces are told
    room: Room = field(default_factory=Room)
