"""An executor that sleeps: the same process with another program image, which holds no device and little memory.

Nothing but its end frees all that a process has of a GPU, its context included. So an executor that is told to sleep
replaces its image by that of a new interpreter (execve(2)), which waits at the link and imports meanwhile what a load
needs, torch above all. The process stays: whatever supervises it, a launcher, systemd or supervisord, sees no end and
starts nothing.

What the next image need not find out again is handed over in the environment (`EarlierLife`), and the weights, where
they are kept, as an open file.
"""

from __future__ import annotations

import gc
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Thread

import msgspec
import zmq

from penstock.protocol import groups
from penstock.protocol.config import Config
from penstock.protocol.links import STEPS, Role, new_incarnation, shared_hash
from penstock.protocol.steps import ExecutorAsleep, Sleep, Wake
from penstock.services.executor.kept_weights import NOT_KEPT, KeptWeights
from penstock.services.links.handshake import Identity
from penstock.services.links.link import Joined, Left, Link, level_of
from penstock.services.links.tcp import network_of
from penstock.services.supervisor import logs
from penstock.services.supervisor.process import Stop
from penstock.services.supervisor.sd_notify import Heartbeat
from penstock.services.tracing.startup import PARENT, STATE

log = logging.getLogger(__name__)

ASLEEP = "PENSTOCK_ASLEEP"  # set for the image that waits: an EarlierLife
LOADERS = tuple(f"penstock.services.executor.{name}" for name in (
    "startup", "steps", "crash_report", "image_encoding", "weight_updates",
))  # fmt: skip
KERNELS = "penstock.kernels."
TICK = 0.2  # seconds between ticks of the link, and of the heartbeat
JOIN_TICK = 0.02  # the same until a scheduler has been met


class Measured(msgspec.Struct, frozen=True):
    """Memory of a GPU that trial steps took."""

    peak: int  # bytes that the largest steps take beyond what lasts
    lasting: int  # bytes that steps leave behind: libraries' workspaces, kernels


class EarlierLife(msgspec.Struct, frozen=True):
    """What an image hands over to the one that takes its place."""

    key: str = ""  # of the model and the options that the rest holds for
    weights: int = NOT_KEPT  # descriptor of the file that they are kept in
    measured: Measured | None = None
    verified: str = ""  # stamp of weight files whose hashes have been checked; empty: none has been
    files: str = ""  # digest of those that were read, in hex, where blocks on disk are named by it
    kernels: tuple[str, ...] = ()  # names of modules of kernels that it had imported


FIRST_LIFE = EarlierLife()  # of an image that none was before


def fall_asleep(stop: Stop, life: EarlierLife) -> None:
    """Replace this process's image by one that waits. Returns if the process was told to end; from here on a signal
    ends it at once. Raises OSError when there is no such interpreter any more."""
    logs.info(log, "falling_asleep")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    if stop.asked:
        return
    logging.shutdown()
    keep_open(life.weights)
    environ = {name: value for name, value in os.environ.items() if name not in (PARENT, STATE)}
    life = msgspec.structs.replace(life, kernels=imported(KERNELS))
    environ[ASLEEP] = msgspec.json.encode(life).decode()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environ)


def imported(prefix: str) -> tuple[str, ...]:
    """The modules of this process whose names begin so."""
    return tuple(name for name, module in sys.modules.items() if name.startswith(prefix) and module is not None)


def keep_open(kept: int) -> None:
    """Have all descriptors but the standard streams and this one closed with this image: a library may have left some
    open, a device's above all."""
    for number in map(int, os.listdir("/proc/self/fd")):
        if number > 2:
            with suppress(OSError):  # the listing's own
                os.set_inheritable(number, number == kept)


def sleeps(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this image is one that waits."""
    return ASLEEP in environ


def earlier_life() -> EarlierLife:
    """What the image before this one has handed over; of the first one nothing."""
    found = os.environ.pop(ASLEEP, "")
    if not found:
        return FIRST_LIFE
    life = msgspec.json.decode(found, type=EarlierLife)
    if life.weights != NOT_KEPT:
        os.set_inheritable(life.weights, False)
    return life


def wait_for_wake(
    config: Config, index: int, stop: Stop, heartbeat: Heartbeat, kept: KeptWeights, kernels: Sequence[str] = ()
) -> bool:
    """Wait at the scheduler's link, now or whenever it comes up, until it says `Wake`; False: this process was told to
    end. Raises LinkError when the scheduler refuses this process. kernels: modules to import meanwhile."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    me = Identity(Role.EXECUTOR, index, new_incarnation(), shared_hash(config.model))
    replica = groups.place(index, config.model).replica
    link = Link.connect(context, STEPS, me, Path(config.run.run_dir), replica, network_of(context, config.links))
    heartbeat.tell("READY=1", "STATUS=sleeping")
    logs.info(log, "asleep")
    next_tick, imports = time.monotonic(), True
    try:
        while not stop.asked:
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + (TICK if link.peers else JOIN_TICK)
                heartbeat.tick(now)
                link.tick(now)
            if woken(link, kept):
                return True
            if imports and link.peers:
                imports = False
                with beating(heartbeat):
                    import_all(kernels)
                    gc.freeze()
                    gc.disable()  # until it serves: a load is short, and makes many objects that stay
                continue
            # A tick may have begun another connection, to a scheduler on another host.
            zmq.select([link.socket, stop.fileno()], [], [], max(0.0, next_tick - time.monotonic()))
        return False
    finally:
        link.close()
        context.term()


def import_all(kernels: Sequence[str]) -> None:
    """Import what a load needs. Triton is among it where kernels of it were."""
    for name in LOADERS:
        importlib.import_module(name)
    for name in kernels:
        with suppress(ImportError):  # other code than the last image ran
            importlib.import_module(name)
    if "triton" in sys.modules:
        from penstock.kernels.triton_names import import_compiler

        import_compiler()


def woken(link: Link, kept: KeptWeights) -> bool:
    """Take what has arrived; whether the scheduler said `Wake`."""
    for arrival in link.receive():
        match arrival.message:
            case Joined():
                link.send(arrival.peer, ExecutorAsleep(kept.nbytes))
            case Sleep(discard=True):
                kept.drop()
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
