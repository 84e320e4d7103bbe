"""`penstock serve`: starts the processes of a server that run on this host, watches them, and ends them in order.

They are all of them unless `--parts` names some (protocol/parts.py). The others are for a launcher on another host; the
two never talk, as the processes themselves meet. Everything that can be checked is checked before the first process
starts. The processes start side by side and find one another by themselves; the launcher hears of their readiness
through NOTIFY_SOCKET. When it is told to stop, the api drains first, or who comes next where it is elsewhere. A process
that dies unasked is started again, and so is one that hangs, once the server has been ready; before that its death ends
the server: see `Launch._died`, the one place that decides so. However the launcher itself ends, its children end too
(services/supervisor/process.py).
"""

from __future__ import annotations

import json
import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.engine_core import folder
from penstock.engine_core.models.sharding import check_ranks
from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import ApiConfig, Config
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.protocol.parts import ORDER, Parts, parts_of, spelled
from penstock.services.http import listener as listening
from penstock.services.http.api_keys import Keys
from penstock.services.supervisor import address, banner, logs, options, process
from penstock.services.supervisor.child import Child
from penstock.services.supervisor.options import sized, usable_cores
from penstock.services.supervisor.process import ExitCode, StartupPhases, Stop
from penstock.services.supervisor.restart_policy import Restarts
from penstock.services.supervisor.run_directory import RunDirectory
from penstock.services.supervisor.sd_notify import (
    ERROR_FIELD,
    NOTIFY_SOCKET,
    WATCHDOG_USEC,
    NoticeSocket,
    crash_line,
    notify,
)
from penstock.services.supervisor.topology import check_topology, elsewhere, executor_config
from penstock.services.tracing import names
from penstock.services.tracing.startup import PARENT, STATE, Start, environment
from penstock.services.tracing.tracer import tracer_of

log = logging.getLogger(__name__)

ENTRY = Path(__file__).absolute().parents[2] / "__main__.py"  # by path: nothing in the working directory hides it
END_ORDER = ORDER  # whoever still serves somebody goes first
START_ORDER = ORDER[::-1]  # the slowest first
LAUNCHER = "launcher"
END_SECONDS = 5.0  # from SIGTERM to SIGKILL, beyond draining
SILENCE_SECONDS = 6.0  # without a heartbeat, of a process that has begun to send them: it hangs and is killed
BUSY_SECONDS = 30.0  # the same for one that computes meanwhile: it is late, a crowd has come at once perhaps
MISTAKES = (ExitCode.CONFIG, ExitCode.MODEL, ExitCode.ADDRESS, ExitCode.LINK)
SUPERVISORS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def serve(config: Config, entry: Path = ENTRY) -> int:
    """Run a server until SIGTERM, SIGINT or a failure; the exit code.

    Raises ConfigError, AddressError, ModelError before anything is started.
    """
    with logs.nonblocking_output():
        logs.setup("launcher", config.run.log_level, config.run.log_format)
        return run(config, entry)


def run(config: Config, entry: Path) -> int:
    """As `serve`, with output and log set up."""
    config = resolved(sized(config, usable_cores()))
    parts = parts_of(config)
    if Role.API in parts:
        check_listening(config.api)
    check_topology(config, parts)
    directory = RunDirectory.open(config.run.run_dir)
    held = address.hold(config.api) if Role.API in parts else None
    try:
        config = msgspec.structs.replace(
            config,
            api=msgspec.structs.replace(config.api, port=held.getsockname()[1] if held else config.api.port),
        )
        chat = has_template(Path(config.model.model), config.tokenizer.chat_template)
        owner = process.parent()
        launch = Launch(placed(config, directory), directory, entry, parts, chat=chat, owner=owner)
        try:
            return launch.run()
        finally:
            launch.close()
            if owner is not None:
                os.close(owner)
    finally:
        if held:
            held.close()
        directory.close()


def resolved(config: Config) -> Config:
    """`config` with its model as a folder that is there and its names filled in.

    Raises ConfigError and ModelError for what would end a process when it starts.
    """
    model = folder.resolve(config.model.model, config.model.revision)
    names = folder.served_names(model, config.model)
    spec = read_spec(model)
    folder.model_length(spec, config.model)
    check_ranks(spec, config.model.tensor_parallel_size, expert_parallel=config.model.expert_parallel)
    check_template(config.tokenizer.chat_template)
    found = msgspec.structs.replace(config.model, model=str(model), served_model_name=",".join(names))
    return msgspec.structs.replace(config, model=found)


def placed(config: Config, directory: RunDirectory) -> Config:
    """`config` with the run directory that the processes share."""
    return msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, run_dir=str(directory.path)))


class Launch:
    """The processes of one server on this host. One thread, one selector: signals, notices, output and ends of
    children.

    `owner` is a descriptor that turns readable when nobody needs the server any more; the caller's to close.
    """

    def __init__(
        self,
        config: Config,
        directory: RunDirectory,
        entry: Path,
        parts: Parts,
        *,
        chat: bool,
        owner: int | None = None,
    ) -> None:
        self._config = config
        self._entry = entry
        self._chat = chat
        self._parts = parts
        self._owner = owner
        self._stop = Stop(once=False, numbers=stop_signals())
        self._notices = NoticeSocket(directory.path / "notify.sock")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._selector.register(self._notices, selectors.EVENT_READ)
        if owner is not None:
            self._selector.register(owner, selectors.EVENT_READ)
        self._stages = StartupPhases()
        self._tracer = tracer_of(config.trace, LAUNCHER, 0)
        self._trace = Start(self._tracer, LAUNCHER, self._stages)
        self._environ = child_environment(config, directory, self._notices.path)
        self._environ |= environment(self._trace.context)
        self._children: list[Child] = []  # those that run
        self._restarts = Restarts(directory.path)
        self._ready = False  # it has been, once
        self._whole = False  # every process is there and ready
        self._ending: list[Role] | None = None  # roles that have yet to be told to end; None while serving
        self._drained = False  # the first role that was told to end has drained; the others have nothing left to do
        self._told: list[Child] = []  # to end, last
        self._deadline = float("inf")  # monotonic seconds at which those are killed
        self._code = ExitCode.ORDERLY
        self._progress = banner.Progress()

    def run(self) -> int:
        """Start everything, then wait for the end of everything."""
        self._stages.note("waiting for the processes")
        if self._config.run.parts:
            logs.info(log, "parts", here=spelled(self._parts), **elsewhere(self._config, self._parts))
        for role in START_ORDER:
            for index in self._parts.get(role, ()):
                if self._ending is None:
                    self._start(role, index)
        self._progress.open()
        self._progress.update(self._children)
        while self._children or self._restarts.waiting:
            wait = min(self._deadline, self._restarts.next, self._silent_at()) - time.monotonic()
            for key, _ in self._selector.select(min(max(0.0, wait), 3600.0)):
                if key.data is not None:
                    self._heard(key.data, key.fd)
                elif key.fileobj is self._notices:
                    self._noticed()
                elif key.fd == self._owner:
                    self._abandoned()
                else:
                    self._told_to_stop()
            now = time.monotonic()
            if now >= self._deadline:
                self._kill(self._told)
            if now >= self._silent_at():
                self._noticed()  # what stands in the socket was said in time: we are late, not they
                self._kill_silent(time.monotonic())
            for role, index in self._restarts.due(now):
                self._start(role, index)
        return self._code

    def close(self) -> None:
        """Kill what is left, which is nothing after an orderly end, and give everything back."""
        self._progress.close()
        for child in tuple(self._children):
            child.signal(signal.SIGKILL)
            child.wait()
            self._forget(child)
        self._restarts.close()
        self._selector.close()
        self._notices.close()
        self._stop.close()
        self._tracer.close()

    def _start(self, role: Role, index: int) -> None:
        config = self._config if role is not Role.EXECUTOR else executor_config(self._config, self._parts, index)
        command = [sys.executable, str(self._entry), role.value, f"--index={index}", *options.arguments(config)]
        try:
            child = Child(role, index, command, self._environ)
        except OSError as error:  # no process, memory or descriptor left, which may pass
            self._not_started(f"{role}-{index}", role, index, str(error))
            return
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.output, selectors.EVENT_READ, child)
        logs.debug(log, "started", process=child.name, pid=child.pid)

    def _heard(self, child: Child, descriptor: int) -> None:
        if child not in self._children:
            return  # its end was dealt with earlier in this round
        if descriptor == child.output:
            for line in child.read():
                self._progress.write(line)
            if not child.speaking:
                self._selector.unregister(child.output)
        elif child.reap():
            self._noticed()  # its last words
            for line in child.rest():
                self._progress.write(line)
            self._forget(child)
            self._ended(child)

    def _noticed(self) -> None:
        for notice in self._notices.receive():
            for child in self._children:
                if child.pid == notice.pid:
                    before = child.status
                    child.notice(notice.fields, notice.received)
                    if child.ready:
                        self._restarts.recovered(child.role, child.index)
                    starting = not self._ready and self._ending is None
                    if child.status != before and starting and not self._progress.shown:
                        logs.info(log, "status", process=child.name, status=child.status)
        self._progress.update(self._children)
        if self._ending is None and not self._whole and self._complete():
            self._whole = True
            if self._ready:
                self._serving_again()
            else:
                self._serving()

    def _complete(self) -> bool:
        """Whether every process is there and has been ready since its start."""
        wanted = sum(len(numbers) for numbers in self._parts.values())
        return len(self._children) == wanted and all(child.ready for child in self._children)

    def _serving_again(self) -> None:
        """What died is back."""
        logs.info(log, "serving_again")
        notify("STATUS=serving")

    def _serving(self) -> None:
        """Every process is ready: tell the person and the supervisor."""
        self._ready = True
        self._progress.close()
        self._tell_start()
        if Role.API not in self._parts:
            here = spelled(self._parts)
            if self._config.run.parts:
                banner.show(banner.part(here, elsewhere(self._config, self._parts), process.age()))
            logs.info(log, "serving", run_dir=self._config.run.run_dir, parts=here)
            notify("READY=1", f"STATUS=serving {here}")
            return
        name = self._config.model.served_model_name.split(",")[0]
        facts = banner.serving(self._config, self._children, name, self._chat, process.age())
        port = 0 if self._config.api.uds else urlsplit(facts.url).port
        if port:  # clients know it: whoever is started again listens there, too
            api = msgspec.structs.replace(self._config.api, port=port)
            self._config = msgspec.structs.replace(self._config, api=api)
        banner.show(banner.banner(facts))
        logs.info(log, "serving", url=facts.url, model=facts.model, blocks=facts.blocks, seconds=facts.seconds)
        notify("READY=1", f"STATUS=serving {facts.model} on {facts.url}", f"X_PENSTOCK_URL={facts.url}")

    def _tell_start(self) -> None:
        """The start is over; what is started again begins a trace of its own."""
        self._trace.ready(time.monotonic(), {names.PROCESSES: len(self._children)})
        self._environ = {name: value for name, value in self._environ.items() if name not in (PARENT, STATE)}

    def _told_to_stop(self) -> None:
        self._stop.drain()
        self._progress.close()
        if self._stop.count > 1:
            logs.warning(log, "ending_at_once")
            self._code = ExitCode.FAILED
            self._ending = []
            self._restarts.give_up(Role)
            self._kill(self._children)
        elif self._stop.asked and self._ending is None:
            logs.info(log, "draining", limit=self._config.run.drain_timeout, again="ends at once")
            notify("STOPPING=1", "STATUS=draining")
            self._ending = list(END_ORDER)
            self._end_next()

    def _abandoned(self) -> None:
        """The program that the engine was started for has ended."""
        assert self._owner is not None
        self._selector.unregister(self._owner)
        logs.info(log, "abandoned")
        if self._ending is None:
            self._ending = []
            self._tell(self._children, END_SECONDS)

    def _ended(self, child: Child) -> None:
        if self._ending is None:
            self._died(child)
        elif child.role in self._ending:
            self._again(child)  # what drains may still need it
        elif not any(other.role is child.role for other in self._children):
            self._end_next()

    def _died(self, child: Child) -> None:
        """A process ended that nobody told to. It is started again if the server has ever been ready; otherwise nobody
        waits for anything yet, and the server ends, at once and as a failure.

        A child's exit code that names the operator's mistake becomes the launcher's, so that a supervisor does not try
        again.
        """
        if child.code == ExitCode.GROUP:  # somebody else's death, which is dealt with in its own right
            self._whole = False
            logs.warning(log, "group_broken", process=child.name, pid=child.pid)
            self._restarts.left(child.role, child.index, time.monotonic())
            return
        self._progress.close()
        last = "\n".join(child.tail)
        logs.error(log, "process_died", process=child.name, pid=child.pid, **child.ending(), last=last)
        if self._ready:
            self._again(child)
            return
        self._code = ExitCode(child.code) if child.code in MISTAKES else ExitCode.FAILED
        told = child.fields.get(ERROR_FIELD)
        reason = f"{ERROR_FIELD}={told}" if told else crash_line(child.name, ending(child), last)
        notify("STOPPING=1", f"STATUS={child.name} died", reason)
        self._ending = []
        self._tell(self._children, END_SECONDS)

    def _not_started(self, name: str, role: Role, index: int, reason: str) -> None:
        """The system refused a process: a failed start, and treated as a death is."""
        self._progress.close()
        logs.error(log, "process_not_started", process=name, reason=reason)
        if self._ready:
            self._retry(name, role, index, f"a start that failed: {reason}", f"cannot be started ({reason})")
            return
        self._code = ExitCode.FAILED
        notify("STOPPING=1", f"STATUS={name} cannot be started: {reason}")
        self._ending = []
        self._tell(self._children, END_SECONDS)

    def _again(self, child: Child) -> None:
        """Have a process that died started again."""
        self._retry(child.name, child.role, child.index, ending(child), "died")

    def _retry(self, name: str, role: Role, index: int, how: str, told: str) -> None:
        """Have a process started again, now or when its last failures are longer ago. `how` it failed is for the
        reason that it is beyond hope, `told` for the status."""
        self._whole = False
        failure = self._restarts.died(role, index, how, time.monotonic())
        if failure is not None:
            logs.error(log, "beyond_hope", process=name, reason=failure.reason)
        notify(f"STATUS={failure.reason if failure else f'{name} {told} and is started again'}")

    def _silent_at(self) -> float:
        """When the next process will have been silent for too long."""
        if self._ending is not None:
            return float("inf")
        return min(map(look_at, self._children), default=float("inf"))

    def _kill_silent(self, now: float) -> None:
        """A process that no longer turns is as good as dead, and what waits for it waits for its successor. One that is
        stopped or waits for itself has no processor between two looks; one that has some may be slow."""
        for child in self._children:
            if now < look_at(child):
                continue
            first, child.looked = child.looked == float("-inf"), now
            runs, silent = child.runs(), now - child.beat
            if not first and silent >= (BUSY_SECONDS if runs else SILENCE_SECONDS):
                logs.error(log, "process_hangs", process=child.name, pid=child.pid, seconds=now - child.beat)
                child.beat = float("inf")
                child.signal(signal.SIGKILL)

    def _end_next(self) -> None:
        """Tell the next role that has processes to end."""
        assert self._ending is not None
        while self._ending:
            role = self._ending.pop(0)
            told = [child for child in self._children if child.role is role]
            self._restarts.give_up((role,))
            if told:
                drains, self._drained = not self._drained, True
                self._tell(told, END_SECONDS + (self._config.run.drain_timeout if drains else 0.0))
                return

    def _tell(self, children: Sequence[Child], seconds: float) -> None:
        """Ask processes to end; after so many seconds they are killed."""
        if not self._ending:
            self._restarts.give_up(Role)  # the last ones
        self._told = list(children)
        self._deadline = time.monotonic() + seconds
        for child in self._told:
            child.signal(signal.SIGTERM)

    def _kill(self, children: Sequence[Child]) -> None:
        """Their time is over."""
        self._deadline = float("inf")
        for child in children:
            if child in self._children:
                logs.warning(log, "killed", process=child.name, pid=child.pid)
                child.signal(signal.SIGKILL)

    def _forget(self, child: Child) -> None:
        self._children.remove(child)
        watched = self._selector.get_map()
        for descriptor in (child.pidfd, child.output):
            if descriptor in watched:
                self._selector.unregister(descriptor)
        child.close()


def look_at(child: Child) -> float:
    """When its silence is to be looked at next: shortly before it is too long, from then on three times as often."""
    return max(child.beat + SILENCE_SECONDS * 2 / 3, child.looked + SILENCE_SECONDS / 3)


def ending(child: Child) -> str:
    """How a process ended, in words."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in child.ending().items())


def stop_signals() -> tuple[int, ...]:
    """A closed terminal ends the server in order, unless nohup was asked for."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def child_environment(config: Config, directory: RunDirectory, notices: Path) -> dict[str, str]:
    """The environment of every child: ours, less what a supervisor meant for the launcher, plus what is secret."""
    environ = {name: value for name, value in os.environ.items() if name not in SUPERVISORS}
    environ = options.environment(config, environ)
    environ |= {NOTIFY_SOCKET: str(notices), process.PARENT: str(os.getpid()), **directory.environment()}
    environ[WATCHDOG_USEC] = str(int(SILENCE_SECONDS * 1e6))
    if sys.flags.optimize:
        environ["PYTHONOPTIMIZE"] = str(sys.flags.optimize)
    return environ


def check_listening(options: ApiConfig) -> None:
    """Raise ConfigError or AddressError for what would end every api process when it starts."""
    if options.uds:
        address.check_file(Path(options.uds))
    else:
        address.check(options.host, options.port)
    listening.tls(options)
    Keys(options)


def check_template(path: str) -> None:
    if path and not Path(path).is_file():
        raise ConfigError("--chat-template", path, "it must be a file with a jinja template")


def has_template(model: Path, given: str) -> bool:
    """Whether the server can answer chats."""
    if given or (model / "chat_template.jinja").is_file():
        return True
    try:
        tokenizer: Mapping[str, object] = json.loads((model / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False
    return bool(tokenizer.get("chat_template"))
