"""What the fake executors of a group have of LoRA adapters: read into the host's memory, and copied to places."""

from __future__ import annotations

import random

from penstock.engine_core.scheduling.scheduler import Scheduler
from penstock.protocol.messages import Adapter
from penstock.protocol.steps import AdapterLoaded, DropAdapter, LoadAdapter

GROUP = 2  # executors that read
BAD = "bad"  # name of an adapter that the last of them cannot read
REASON = "adapter_model.safetensors ends early"


def adapter(name: str) -> Adapter:
    return Adapter(name, f"/adapters/{name}", "0")


class Hosts:
    """The memory of all executors, which get the same messages."""

    def __init__(self, places: int, memory: int) -> None:
        self.memory = memory
        self.places = [""] + [""] * places  # the adapter that each holds; place 0 is the model
        self.read: dict[int, str] = {}
        self.reading: dict[int, tuple[str, list[int]]] = {}  # who has yet to say so
        self.loads: list[str] = []

    def take(self, scheduler: Scheduler) -> bool:
        """Everything that the scheduler has to say; whether there was anything."""
        messages = scheduler.adapter_messages()
        for message in messages:
            match message:
                case LoadAdapter(number, path):
                    assert number not in self.read.keys() | self.reading.keys(), "a number that was given before"
                    name = path.rpartition("/")[2]
                    self.reading[number] = name, list(range(GROUP))
                    self.loads.append(name)
                case DropAdapter(number):
                    assert (self.read.pop(number, None) or self.reading.pop(number, None)) is not None
            assert len(self.read) + len(self.reading) <= self.memory, "more than the host's memory holds"
        found = bool(messages)
        messages.clear()
        return found

    def say(self, scheduler: Scheduler, now: float, rng: random.Random | None = None) -> bool:
        """One executor has read one adapter; whether any was being read."""
        if not self.reading:
            return False
        number = next(iter(self.reading)) if rng is None else rng.choice(list(self.reading))
        name, missing = self.reading[number]
        executor = missing.pop(0)
        if not missing:
            if name != BAD:
                self.read[number] = name
                del self.reading[number]
            else:
                scheduler.adapter_loaded(AdapterLoaded(number, REASON), executor, now)
                return True
        scheduler.adapter_loaded(AdapterLoaded(number), executor, now)
        return True

    def copy(self, number: int, place: int) -> None:
        assert 1 <= place < len(self.places)
        self.places[place] = self.read[number]  # every executor has said that it has it
