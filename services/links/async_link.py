"""A link on an asyncio loop: the loop watches its descriptor and calls its ticks, without a future per message."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable

from penstock.protocol.message import Message
from penstock.services.links.link import Arrival, Joined, Left, Link, Peer, SocketStatistics

TICK = 0.2  # seconds between ticks without a peer
TICK_WITH_PEERS = 1.0  # hellos are rare, and the end of a peer's process wakes the loop by itself


class AsyncLink:
    """Delivers a link's arrivals to one callback, on the running loop, in order.

    ZeroMQ's descriptor is edge-triggered and a send can swallow the edge of an arrival. So each send is followed by a
    receive in the same iteration of the loop.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._loop = asyncio.get_running_loop()
        self._deliver: Callable[[list[Arrival]], None] | None = None
        self._socket = link.socket  # whose descriptor, the next attribute, the loop watches
        self._descriptor = -1
        self._pidfds: dict[Peer, int] = {}  # a duplicate of each peer's
        self._draining: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def peers(self) -> tuple[Peer, ...]:
        return self._link.peers

    def start(self, deliver: Callable[[list[Arrival]], None]) -> None:
        """From now on pass arrivals to `deliver`, which must not block."""
        assert self._deliver is None
        self._deliver = deliver
        self._read()
        self._tick()

    def send(self, peer: Peer, message: Message) -> bool:
        """As `Link.send`."""
        return self.send_each((peer,), message)

    def send_each(self, peers: Iterable[Peer], message: Message) -> bool:
        """As `Link.send_each`."""
        sent = self._link.send_each(peers, message)
        if self._draining is None:
            self._draining = self._loop.call_soon(self._drain)
        return sent

    def statistics(self) -> SocketStatistics:
        return self._link.statistics()

    def close(self) -> None:
        """Stop watching and close the link."""
        self._loop.remove_reader(self._descriptor)
        for handle in (self._timer, self._draining):
            if handle is not None:
                handle.cancel()
        for peer in tuple(self._pidfds):
            self._unwatch(peer)
        self._link.close()

    def _drain(self) -> None:
        self._draining = None
        arrivals = self._link.receive()
        if arrivals:
            assert self._deliver is not None
            for arrival in arrivals:
                if isinstance(arrival.message, Joined):
                    self._watch(arrival.peer)
                elif isinstance(arrival.message, Left):
                    self._unwatch(arrival.peer)
            if not self._link.peers:
                self._schedule_tick()  # without peers, ticks are more frequent
            self._deliver(arrivals)

    def _tick(self) -> None:
        self._link.tick(self._loop.time())
        if self._link.socket is not self._socket:
            self._loop.remove_reader(self._descriptor)
            self._read()
        self._schedule_tick()
        self._drain()

    def _schedule_tick(self) -> None:
        """Set the timer of the next tick."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(TICK_WITH_PEERS if self._link.peers else TICK, self._tick)

    def _read(self) -> None:
        self._socket, self._descriptor = self._link.socket, self._link.fileno()
        self._loop.add_reader(self._descriptor, self._drain)

    def _watch(self, peer: Peer) -> None:
        if peer.pidfd is not None:
            try:
                pidfd = os.dup(peer.pidfd)
            except OSError:  # no descriptor is left: the link's ticks find its end, a little later
                return
            self._pidfds[peer] = pidfd
            self._loop.add_reader(pidfd, self._ended, peer)

    def _unwatch(self, peer: Peer) -> None:
        pidfd = self._pidfds.pop(peer, None)
        if pidfd is not None:
            self._loop.remove_reader(pidfd)
            os.close(pidfd)

    def _ended(self, peer: Peer) -> None:
        """A peer's process has ended, which the next tick finds."""
        self._unwatch(peer)
        self._tick()
