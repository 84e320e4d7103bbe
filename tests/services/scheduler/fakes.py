"""A port without a socket and an executor without a model, for tests of the scheduler's loop."""

from __future__ import annotations

from concurrent.futures import Executor, Future

import numpy as np

from penstock.protocol.links import PROTOCOL_VERSION, Hello, Role
from penstock.protocol.message import Message
from penstock.protocol.messages import Finish
from penstock.protocol.outputs import TokenBatch
from penstock.protocol.steps import ExecutorReady, StepPlan, StepResult
from penstock.services.links.link import Arrival, Joined, Left, Peer, SocketStatistics
from penstock.services.scheduler.bitmask_filler import BitmaskFiller
from penstock.services.scheduler.grammar_queue import GrammarQueue

WINDOW = 64


class Inline(Executor):
    """Does what it is given at once."""

    def submit(self, fn, /, *args, **kwargs):
        future = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def without_grammars() -> tuple[GrammarQueue, BitmaskFiller]:
    return GrammarQueue(None, Inline()), BitmaskFiller(None, Inline(), Inline(), 1)


class FakePort:
    """What was sent stands in `sent`; what `arrives` is received in the next iteration."""

    def __init__(self, role: Role) -> None:
        self.epoch = 100
        self.role = role
        self.sent: list[tuple[Peer, Message]] = []
        self.arrivals: list[Arrival] = []
        self.ticks = 0
        self.joined = 0
        self._peers: list[Peer] = []

    @property
    def peers(self):
        return tuple(self._peers)

    def join(self, index=0) -> Peer:
        self.joined += 1
        hello = Hello(version=PROTOCOL_VERSION, role=self.role, index=index, incarnation=self.joined, pid=0, config=0)
        peer = Peer(f"{self.role}-{index}-{hello.incarnation}".encode(), hello, WINDOW, 0.0)
        self._peers.append(peer)
        self.arrives(peer, Joined())
        return peer

    def leave(self, peer: Peer) -> None:
        self._peers.remove(peer)
        self.arrives(peer, Left("process ended"))

    def give_up(self, peer: Peer, reason: str) -> None:
        self._peers.remove(peer)
        self.arrives(peer, Left(reason))

    def arrives(self, peer: Peer, message) -> None:
        self.arrivals.append(Arrival(peer, message))

    def send(self, peer, message) -> bool:
        return self.send_each((peer,), message)

    def send_each(self, peers, message) -> bool:
        sent = True
        for peer in peers:
            if peer.credit and peer in self._peers:
                peer.credit -= 1
                self.sent.append((peer, message))
            else:
                sent = False
        return sent

    def receive(self):
        arrivals, self.arrivals = self.arrivals, []
        return arrivals

    def tick(self, now):
        self.ticks += 1

    def statistics(self):
        return SocketStatistics(len(self._peers), 1, 2, 3, 4, 5, 6)

    def take(self, kind, peer=None):
        """Messages of a kind that were sent (to one peer), taken off."""
        found = [pair for pair in self.sent if isinstance(pair[1], kind) and peer in (None, pair[0])]
        self.sent = [pair for pair in self.sent if pair not in found]
        return [message for _, message in found]


class FakeExecutor:
    """Answers plans with tokens that tell their step: 1000 + step."""

    def __init__(self, port: FakePort, index=0) -> None:
        self.port = port
        self.peer = port.join(index)
        self.decoding: set[int] = set()
        self.epoch = 0
        self.plans: list[StepPlan] = []

    def ready(self, blocks=64, epoch=0, mask_slots=0, plans=0) -> None:
        self.decoding.clear()
        self.port.arrives(self.peer, ExecutorReady(
            epoch=epoch, blocks=blocks, block_size=16, step_tokens=64, device="cpu", dtype="float32",
            weight_bytes=1, cache_bytes=1, load_seconds=0.5, mask_slots=mask_slots, plans=plans))  # fmt: skip

    def collect(self) -> list[StepPlan]:
        """Plans that came since."""
        fresh = self.port.take(StepPlan, self.peer)
        self.peer.credit += len(fresh)
        self.plans += fresh
        return fresh

    def answer(self, plan: StepPlan, busy: float = 0.0) -> None:
        if plan.epoch != self.epoch:
            self.epoch = plan.epoch
            self.decoding.clear()
        self.decoding |= set(np.frombuffer(plan.decode_on, np.int32).tolist())
        self.decoding -= set(np.frombuffer(plan.decode_off, np.int32).tolist())
        chunks = np.frombuffer(plan.chunks, np.int32).reshape(-1, 4)
        rows = len(self.decoding) + int(chunks[:, 3].sum())
        tokens = np.full(rows, 1000 + plan.step % 1000, np.int32)
        self.port.arrives(
            self.peer, StepResult(step=plan.step, epoch=plan.epoch, token_ids=tokens.tobytes(), busy=busy)
        )


class Transcript:
    """What one tokenizer got, by request."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, list[Finish]] = {}
        self.errors: list[str | None] = []
        self.batches = 0

    def read(self, batches: list[TokenBatch]) -> None:
        for batch in batches:
            self.batches += 1
            tokens = np.frombuffer(batch.token_ids, np.int32).tolist()
            counts = np.frombuffer(batch.counts, np.int32).tolist()
            ids = np.frombuffer(batch.ids, np.int64).tolist()
            for number, count, finish in zip(ids, counts, batch.finish, strict=True):
                self.tokens.setdefault(number, []).extend(tokens[:count])
                tokens = tokens[count:]
                if finish:
                    self.ends.setdefault(number, []).append(Finish(finish))
            self.errors += [extra.error for extra in batch.extras if extra.error]
