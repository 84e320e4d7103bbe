"""An executor that sleeps: the same process with another program image, which holds no device and little memory.

Nothing but its end frees all that a process has of a GPU, its context included. So an executor that is told to sleep
replaces its image by that of a new interpreter (execve(2)), which waits at the link before it imports torch. The
process stays: whatever supervises it, a launcher, systemd or supervisord, sees no end and starts nothing.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import zmq

from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.links import STEPS, Role, new_incarnation, shared_hash
from penstock.protocol.served_models import several
from penstock.protocol.steps import ExecutorAsleep, Wake
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Joined, Left, Link, level_of
from penstock.services.links.tcp import network_of
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import Stop
from penstock.services.supervisor.sd_notify import Heartbeat
from penstock.services.tracing.startup import PARENT, STATE

log = logging.getLogger(__name__)

ASLEEP = "PENSTOCK_ASLEEP"  # set for the image that waits
LOADER = "penstock.services.executor.startup"  # the module that imports torch, and all that a load needs
TICK = 0.2  # seconds between ticks of the link, and of the heartbeat


def fall_asleep(stop: Stop) -> None:
    """Replace this process's image by one that waits. Returns if the process was told to end; from here on a signal
    ends it at once. Raises OSError when there is no such interpreter any more."""
    logs.info(log, "falling_asleep")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if stop.asked:
        return
    logging.shutdown()
    keep_standard_streams()
    environ = {name: value for name, value in os.environ.items() if name not in (PARENT, STATE)}
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ | {ASLEEP: "1"})


def keep_standard_streams() -> None:
    """Have every other descriptor closed with this image: a library may have left some open, a device's above all."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):  # the listing's own
                os.set_inheritable(number, False)


def sleeps(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this image is one that waits."""
    return ASLEEP in environ


def wait_for_wake(config: Config, index: int, stop: Stop, heartbeat: Heartbeat) -> bool:
    """Wait at the scheduler's link, now or whenever it comes up, until it says `Wake`; False: this process was told to
    end. Raises LinkError when the scheduler refuses this process."""
    os.environ.pop(ASLEEP, None)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    me = Identity(Role.EXECUTOR, index, new_incarnation(), shared_hash(config.model))
    replica = groups.place(index, config.model).replica
    link = Link.connect(context, STEPS, me, Path(config.run.run_dir), replica, network_of(context, config.links))
    heartbeat.tell("READY=1", "STATUS=sleeping")
    logs.info(log, "asleep")
    next_tick, imports = time.monotonic(), several(config)
    try:
        while not stop.asked:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK
                heartbeat.tick(now)
                link.tick(now)
            if woken(link):
                return True
            if imports and link.peers:
                imports = False
                with beating(heartbeat):
                    importlib.import_module(LOADER)
                continue
            # A tick may have begun another connection, to a scheduler on another host.
            zmq.select([link.socket, stop.fileno()], [], [], max(0.0, next_tick - time.monotonic()))
        return False
    finally:
        link.close()
        context.term()


def woken(link: Link) -> bool:
    """Take what has arrived; whether the scheduler said `Wake`."""
    for arrival in link.receive():
        match arrival.message:
            case Joined():
                link.send(arrival.peer, ExecutorAsleep())
            case Left(reason):
                fields: dict[str, object] = {"pid": arrival.peer.pid, "reason": reason}
                logs.write(log, level_of(arrival.peer, reason), "scheduler_left", fields)
            case Wake():
                return True
    return False


@contextmanager
def beating(heartbeat: Heartbeat | None) -> Iterator[None]:
    """Send heartbeats from a thread while a process that was ready before loads again: its supervisor would take
    silence for a hang. Does nothing without one."""
    if heartbeat is None:
        yield
        return
    done = Event()

    def beat() -> None:
        while not done.wait(TICK):
            heartbeat.tick(time.monotonic())

    thread = Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
