"""Which of several models are loaded: a decision from what each takes of the devices, and who has requests.

Models that fit together stay together. One that has requests and is not loaded waits for its memory, and those that
wait are served in the order in which they began to. To make room, models without requests leave first, the one that has
been idle longest before the others. One that has requests leaves once it has had its turn: `turn` seconds, counted from
when it was loaded or from when the other began to wait, whichever was later. So a model that is always busy holds up no
other one for ever, and two that are always busy swap no more often than every `turn` seconds.

While the first of those that wait lacks memory, no later one takes any of the same devices: what is freed is for the
first. One model loads at a time on a device, so that each knows what the others there have taken.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

import msgspec

TOGETHER = 0.95  # of a device that several loaded models may take in all; one alone may take what it likes
LINGER = 0.5  # seconds without a request after which a loaded model counts as idle
ROUNDING = 1e-9  # of shares that are added


class State(enum.StrEnum):
    """Of a model, as `/v1/models` has it but for `leaving`."""

    LOADED = "loaded"
    ASLEEP = "asleep"  # it holds no device, and has said so
    LOADING = "loading"
    LEAVING = "leaving"  # it finishes what runs, then gives its devices back
    FAILED = "failed"  # it does not come back by itself, and holds nothing


class ModelView(msgspec.Struct, frozen=True):
    """What is known of one model now."""

    state: State
    requests: int  # that have not ended, wherever they are


class Decision(msgspec.Struct, frozen=True):
    """Models to be told, by number."""

    leave: tuple[int, ...] = ()
    load: tuple[int, ...] = ()


class Residency:
    """Remembers since when models are loaded, idle or waited for. Times are monotonic seconds.

    `shares`: for each model the share that it takes of each device, by the device's number.
    """

    def __init__(self, shares: Sequence[Mapping[int, float]], turn: float) -> None:
        self._shares = tuple(shares)
        self._turn = turn
        self._loaded: dict[int, float] = {}  # since when
        self._idle: dict[int, float] = {}  # since when, of those that are loaded and have no requests
        self._wanted: dict[int, float] = {}  # since when, of those that are not loaded and have requests

    def first(self) -> tuple[int, ...]:
        """Models to load before anybody asks: in their order, each that fits beside those before it."""
        found: list[int] = []
        for model in range(len(self._shares)):
            if self._fits(model, found):
                found.append(model)
        return tuple(found)

    def decide(self, views: Sequence[ModelView], now: float) -> Decision:
        """Who is to leave, and who to load. Called again and again."""
        self._note(views, now)
        held = [model for model, view in enumerate(views) if view.state not in (State.ASLEEP, State.FAILED)]
        leave: list[int] = []
        load: list[int] = []
        taken: set[int] = set()  # devices whose memory is spoken for
        for model in sorted(self._wanted, key=lambda each: (self._wanted[each], each)):
            devices = self._shares[model].keys()
            if not taken & devices and views[model].state is State.ASLEEP:
                loads = [self._shares[one].keys() for one, view in enumerate(views) if view.state is State.LOADING]
                if not self._fits(model, held):
                    leave += [one for one in self._victims(model, views, held, now) if one not in leave]
                elif not any(devices & others for others in loads):
                    load.append(model)
                    held.append(model)
            taken |= devices
        return Decision(tuple(leave), tuple(load))

    def waited(self, model: int, now: float) -> float:
        """Seconds for which requests have waited for this model to be loaded."""
        return now - self._wanted.get(model, now)

    def _note(self, views: Sequence[ModelView], now: float) -> None:
        for model, view in enumerate(views):
            if view.state is State.LOADED:
                self._loaded.setdefault(model, now)
            else:
                self._loaded.pop(model, None)
            if view.state is State.LOADED and not view.requests:
                self._idle.setdefault(model, now)
            else:
                self._idle.pop(model, None)
            if view.requests and view.state in (State.ASLEEP, State.LEAVING):
                self._wanted.setdefault(model, now)
            else:
                self._wanted.pop(model, None)

    def _fits(self, model: int, beside: Sequence[int]) -> bool:
        """Whether there is room for a model beside others on each of its devices."""
        for device, share in self._shares[model].items():
            others = [self._shares[one][device] for one in beside if device in self._shares[one]]
            if others and sum(others) + share > TOGETHER + ROUNDING:
                return False
        return True

    def _victims(self, model: int, views: Sequence[ModelView], held: Sequence[int], now: float) -> tuple[int, ...]:
        """Models whose leaving makes room, beyond those that leave already; none where there is not enough yet."""
        devices = self._shares[model].keys()
        staying = [one for one in held if views[one].state is not State.LEAVING]
        if self._fits(model, staying):
            return ()
        idle = [(since, one) for one, since in self._idle.items() if now >= since + LINGER]
        turn = self._wanted[model]
        busy = [(since, one) for one, since in self._loaded.items() if now >= max(since, turn) + self._turn]
        ordered = dict.fromkeys([one for _, one in sorted(idle)] + [one for _, one in sorted(busy)])
        chosen: list[int] = []
        for one in ordered:
            if one in staying and self._shares[one].keys() & devices:
                chosen.append(one)
                staying.remove(one)
                if self._fits(model, staying):
                    break
        else:
            return ()
        for one in tuple(chosen):  # those that turn out not to be needed
            if self._fits(model, [*staying, one]):
                chosen.remove(one)
                staying.append(one)
        return tuple(chosen)
