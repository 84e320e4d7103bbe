"""What every endpoint works with."""

from __future__ import annotations

from dataclasses import dataclass, field

from protocol.config import Config
from services.api.accepting import Room
from services.api.figures import Figures
from services.api.keys import Keys
from services.api.ledger import Ledger
from services.api.metrics import Traffic
from services.api.pipeline import Pipeline
from services.api.responses.store import ResponseStore
from services.api.served import ServedModel
from services.tracing.tracer import Tracer


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
