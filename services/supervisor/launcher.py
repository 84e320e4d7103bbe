"""`penstock serve` and `penstock engine`: start the processes of a server on this host, watch them, end them in order.

`--parts` limits them to some (protocol/parts.py); a launcher on another host has the rest. Launchers never talk to each
other: the processes connect directly. Everything that can be checked is checked before the first process starts. The
processes start in parallel and report their readiness through NOTIFY_SOCKET.

On SIGTERM the api drains first, or the next role in line on a host without one. Once the server has been ready, a
process that dies or hangs is started again; before that, its death ends the server (`Launcher._died`). However the
launcher itself ends, its children end too (services/supervisor/process.py).

The launcher relays its children's output rather than letting them inherit stderr, for three reasons. A terminal that
takes nothing must not block a child, not even native code that writes to descriptor 2. The last lines of a dead process
are part of its error. And log lines have to scroll above the progress display.
"""

from __future__ import annotations

import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

from penstock.engine_core.models.spec import read_spec
from penstock.protocol.config import Config, adjusted
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role
from penstock.protocol.parts import OPTION, ORDER, Parts, count, parts_of, spelled
from penstock.protocol.served_models import engines, names, several
from penstock.services.supervisor import address, banner, logs, options, process
from penstock.services.supervisor.child import Child
from penstock.services.supervisor.options import sized, usable_cores
from penstock.services.supervisor.preflight import checked, elsewhere, executor_config, has_template
from penstock.services.supervisor.process import ExitCode, StartupPhases, Stop
from penstock.services.supervisor.restart_policy import RestartPolicy
from penstock.services.supervisor.run_directory import RunDirectory, prepared
from penstock.services.supervisor.sd_notify import (
    ERROR_FIELD,
    NOTIFY_SOCKET,
    WATCHDOG_USEC,
    NoticeSocket,
    crash_line,
    notify,
    read_error,
)
from penstock.services.supervisor.shutdown import Shutdown
from penstock.services.tracing import names as span_names
from penstock.services.tracing.startup import PARENT, STATE, Start, environment, tracer_of

log = logging.getLogger(__name__)

ENTRY = Path(__file__).absolute().parents[2] / "__main__.py"  # by path: nothing in the working directory hides it
START_ORDER = ORDER[::-1]  # the slowest first
LAUNCHER = "launcher"
SILENCE_SECONDS = 6.0  # without a heartbeat, after the first one: the process hangs and is killed
BUSY_SECONDS = 30.0  # the same while it uses a processor: it may just be late
MISTAKES = (ExitCode.CONFIG, ExitCode.MODEL, ExitCode.ADDRESS, ExitCode.LINK)
SUPERVISORS = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES")


def serve(config: Config, entry: Path = ENTRY) -> int:
    """Run a server until SIGTERM, SIGINT or a failure; returns the exit code.

    Raises ConfigError, AddressError, ModelError before anything is started.
    """
    with logs.nonblocking_output():
        logs.setup(LAUNCHER, config.run.log_level, config.run.log_format)
        config = sized(config, usable_cores())
        code, cause = launch(config, parts_of(config), entry)
        if cause and process.PARENT not in os.environ:  # a program that started this one raises it
            print(f"penstock: {cause}", file=sys.stderr)  # below what the other processes said while they ended
        return code


def engine(config: Config, environ: Mapping[str, str] = os.environ) -> int:
    """`penstock engine`: a server without HTTP, for the program that started it and connects as the api does. When that
    program ends, in whatever way, so does the engine.

    Raises ConfigError, ModelError before anything is started.
    """
    with logs.nonblocking_output():
        logs.setup(LAUNCHER, config.run.log_level, config.run.log_format)
        if not config.run.run_dir:
            raise ConfigError("--run-dir", "", "an engine needs the directory in which its client finds it")
        config = sized(config, usable_cores())
        parts = dict(parts_of(config))
        if parts.pop(Role.API, None) is None:
            why = "the program that starts an engine is its api, which is a part too"
            raise ConfigError(OPTION, config.run.parts, why)
        return launch(config, parts, ENTRY, environ)[0]


def launch(
    config: Config, parts: Parts, entry: Path = ENTRY, environ: Mapping[str, str] = os.environ
) -> tuple[int, str]:
    """Start the processes `parts` and stay until they have ended. Returns the exit code and, of a start that failed,
    the cause."""
    config = checked(config, parts)
    with ExitStack() as held:
        directory = RunDirectory.open(config.run.run_dir)
        held.callback(directory.close)
        port = address.hold(config.api) if Role.API in parts else None
        if port is not None:
            held.callback(port.close)
            config = adjusted(config, port=port.getsockname()[1])
        owner = process.parent(environ)
        if owner is not None:
            held.callback(os.close, owner)
        config = adjusted(config, run_dir=str(directory.path))
        for each in engines(config):
            prepared(Path(each.run.run_dir))
        launcher = Launcher(config, directory, entry, parts, owner)
        held.callback(launcher.close)
        return launcher.run(), launcher.cause


class Launcher:
    """The processes of one server on this host. One thread with one selector waits for signals, notices, output, and
    the ends of processes.

    `owner` is a descriptor that is readable once nobody needs the server any more; the caller closes it.
    """

    def __init__(
        self, config: Config, directory: RunDirectory, entry: Path, parts: Parts, owner: int | None = None
    ) -> None:
        self._config = config
        self._entry = entry
        self._parts = parts
        self._engines = dict(zip(names(config), engines(config), strict=True))
        self._owner = owner
        self._stop = Stop(once=False, numbers=stop_signals())
        self._notices = NoticeSocket(directory.path / "notify.sock")
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._stop, selectors.EVENT_READ)
        self._selector.register(self._notices, selectors.EVENT_READ)
        if owner is not None:
            self._selector.register(owner, selectors.EVENT_READ)
        self._phases = StartupPhases()
        self._tracer = tracer_of(config.trace, LAUNCHER, 0)
        self._trace = Start(self._tracer, LAUNCHER, self._phases)
        self._environ = child_environment(config, directory, self._notices.path)
        self._environ |= environment(self._trace.context)
        self._children: list[Child] = []  # that run
        self._restarts = {"": RestartPolicy(directory.path)}  # by model; empty: the api's, and a server's only one
        if several(self._config):
            self._restarts |= {name: RestartPolicy(Path(each.run.run_dir)) for name, each in self._engines.items()}
        self._shutdown = Shutdown(self._restarts.values(), config.run.drain_timeout)
        self._was_ready = False  # all processes have been ready at the same time at least once
        self._all_ready = False  # they are now
        self._code = ExitCode.ORDERLY
        self.cause = ""  # why the start failed
        self._progress = banner.Progress()

    def run(self) -> int:
        """Start everything, then wait until everything has ended."""
        self._phases.note("waiting for the processes")
        if self._config.run.parts:
            logs.info(log, "parts", here=spelled(self._parts), **elsewhere(self._config, self._parts))
        for role, index, model in self._wanted():
            if not self._shutdown.begun:
                self._start(role, index, model)
        self._progress.open()
        self._progress.update(self._children)
        while self._children or any(policy.waiting for policy in self._restarts.values()):
            restart = min(policy.next for policy in self._restarts.values())
            wait = min(self._shutdown.deadline, restart, self._next_silence_check()) - time.monotonic()
            for key, _ in self._selector.select(min(max(0.0, wait), 3600.0)):
                if key.data is not None:
                    self._on_child(key.data, key.fd)
                elif key.fileobj is self._notices:
                    self._read_notices()
                elif key.fd == self._owner:
                    self._on_owner_end()
                else:
                    self._on_signal()
            now = time.monotonic()
            if now >= self._shutdown.deadline:
                self._kill(self._shutdown.asked)
            if now >= self._next_silence_check():
                self._read_notices()  # heartbeats that wait in the socket were in time
                self._kill_silent(time.monotonic())
            for model, policy in self._restarts.items():
                for role, index in policy.due(now):
                    self._start(role, index, model)
        return self._code

    def close(self) -> None:
        """Kill the remaining processes (none after an orderly end) and release everything."""
        self._progress.close()
        for child in tuple(self._children):
            child.signal(signal.SIGKILL)
            child.wait()
            self._forget(child)
        for policy in self._restarts.values():
            policy.close()
        self._selector.close()
        self._notices.close()
        self._stop.close()
        self._tracer.close()

    def _wanted(self) -> list[tuple[Role, int, str]]:
        """The processes of this host, in the order in which they start: role, number, and the model of several."""
        if not several(self._config):
            return [(role, index, "") for role in START_ORDER for index in self._parts.get(role, ())]
        found: list[tuple[Role, int, str]] = []
        for role in START_ORDER:
            for model, config in self._engines.items() if role is not Role.API else [("", self._config)]:
                found += [(role, index, model) for index in range(count(role, config))]
        return found

    def _start(self, role: Role, index: int, model: str) -> None:
        config = self._config
        if role is Role.EXECUTOR and not model:
            config = executor_config(config, self._parts, index)
        if model:
            config = adjusted(config, for_model=model)
        command = [sys.executable, str(self._entry), role.value, f"--index={index}", *options.arguments(config)]
        try:
            child = Child(role, index, command, self._environ, model)
        except OSError as error:  # no process, memory or descriptor left, which may pass
            self._not_started(role, index, model, str(error))
            return
        self._children.append(child)
        self._selector.register(child.pidfd, selectors.EVENT_READ, child)
        self._selector.register(child.output, selectors.EVENT_READ, child)
        logs.debug(log, "started", child=child.name, pid=child.pid)

    def _on_child(self, child: Child, descriptor: int) -> None:
        if child not in self._children:
            return  # its end was handled earlier in this round
        if descriptor == child.output:
            for line in child.read():
                self._progress.write(line)
            if not child.speaking:
                self._selector.unregister(child.output)
        elif child.reap():
            self._read_notices()  # its last ones
            for line in child.rest():
                self._progress.write(line)
            self._forget(child)
            self._on_end(child)

    def _read_notices(self) -> None:
        for notice in self._notices.receive():
            for child in self._children:
                if child.pid == notice.pid:
                    before = child.status
                    child.notice(notice.fields, notice.received)
                    if child.ready:
                        self._restarts[child.model].recovered(child.role, child.index)
                    starting = not self._was_ready and not self._shutdown.begun
                    if child.status != before and starting and not self._progress.shown:
                        logs.info(log, "status", child=child.name, status=child.status)
        self._progress.update(self._children)
        if not self._shutdown.begun and not self._all_ready and self._complete():
            self._all_ready = True
            if self._was_ready:
                logs.info(log, "serving_again")
                notify("STATUS=serving")
            else:
                self._serving()

    def _complete(self) -> bool:
        """Whether every process runs and is ready."""
        return len(self._children) == len(self._wanted()) and all(child.ready for child in self._children)

    def _serving(self) -> None:
        """Every process is ready for the first time: inform the user and the supervisor."""
        self._was_ready = True
        self._progress.close()
        self._end_start_trace()
        if Role.API not in self._parts:
            here = spelled(self._parts)
            if self._config.run.parts:
                banner.show(banner.part(here, elsewhere(self._config, self._parts), process.age()))
            logs.info(log, "serving", run_dir=self._config.run.run_dir, parts=here)
            notify("READY=1", f"STATUS=serving {here}")
            return
        if several(self._config):
            self._serving_several()
            return
        name = self._config.model.served_model_name.split(",")[0]
        model = Path(self._config.model.model)
        chat = has_template(model, self._config.tokenizer.chat_template)
        spec = read_spec(model, self._config.model.quantization)
        facts = banner.serving(self._config, self._children, name, process.age(), spec, chat=chat)
        self._keep_port(facts.url)
        banner.show(banner.banner(facts))
        logs.info(log, "serving", url=facts.url, model=facts.model, blocks=facts.engine.blocks, seconds=facts.seconds)
        notify("READY=1", f"STATUS=serving {facts.model} on {facts.url}", f"X_PENSTOCK_URL={facts.url}")

    def _serving_several(self) -> None:
        url = next(child.fields["X_PENSTOCK_URL"] for child in self._children if "X_PENSTOCK_URL" in child.fields)
        self._keep_port(url)
        banner.show(banner.several_models(self._config, url, process.age()))
        called = ",".join(self._engines)
        logs.info(log, "serving", url=url, models=called, seconds=process.age())
        notify("READY=1", f"STATUS=serving {called} on {url}", f"X_PENSTOCK_URL={url}")

    def _keep_port(self, url: str) -> None:
        """Clients know it, so an api process that is started again must listen there."""
        port = 0 if self._config.api.uds else urlsplit(url).port
        if port:
            self._config = adjusted(self._config, port=port)

    def _end_start_trace(self) -> None:
        """A process that is started again begins a trace of its own."""
        self._trace.ready(time.monotonic(), {span_names.PROCESSES: len(self._children)})
        self._environ = {name: value for name, value in self._environ.items() if name not in (PARENT, STATE)}

    def _on_signal(self) -> None:
        self._stop.drain()
        self._progress.close()
        if self._stop.count > 1:
            logs.warning(log, "ending_at_once")
            self._code = ExitCode.FAILED
            self._shutdown.cancel()
            self._kill(self._children)
        elif self._stop.asked and not self._shutdown.begun:
            logs.info(log, "draining", limit=self._config.run.drain_timeout, again="ends at once")
            notify("STOPPING=1", "STATUS=draining")
            self._shutdown.begin(self._children)

    def _on_owner_end(self) -> None:
        """The program that the engine was started for has ended."""
        assert self._owner is not None
        self._selector.unregister(self._owner)
        logs.info(log, "abandoned")
        if not self._shutdown.begun:
            self._shutdown.all_at_once(self._children)

    def _on_end(self, child: Child) -> None:
        remaining = self._shutdown.remaining
        if remaining is None:
            self._died(child)
        elif child.role in remaining:
            self._restart(child)  # the roles that drain may still need it
        elif not any(other.role is child.role for other in self._children):
            self._shutdown.next_role(self._children)

    def _died(self, child: Child) -> None:
        """A process ended by itself. It is started again if the server has ever been ready. Otherwise there are no
        clients yet, and the server ends at once as a failure.

        An exit code that means a mistake of the operator becomes the launcher's own, so that its supervisor does not
        try again.
        """
        if child.code == ExitCode.GROUP:  # another process failed, which is handled by itself
            self._all_ready = False
            logs.warning(log, "group_broken", child=child.name, pid=child.pid)
            self._restarts[child.model].ended_with_group(child.role, child.index, time.monotonic())
            return
        self._progress.close()
        last = "\n".join(child.tail)
        error = child.fields.get(ERROR_FIELD)
        said = {"reason": str(read_error(error))} if error else {"last": last}
        if self._was_ready or self._owner is None:  # an owner raises why its engine did not start
            logs.error(log, "process_died", child=child.name, pid=child.pid, **child.ending(), **said)
        if self._was_ready:
            self._restart(child)
            return
        self._code = ExitCode(child.code) if child.code in MISTAKES else ExitCode.FAILED
        self.cause = self.cause or said.get("reason") or crash(child)
        reason = f"{ERROR_FIELD}={error}" if error else crash_line(child.name, ending(child), last)
        notify("STOPPING=1", f"STATUS={child.name} died", reason)
        self._shutdown.all_at_once(self._children)

    def _not_started(self, role: Role, index: int, model: str, reason: str) -> None:
        """The system refused to create a process; handled like a death."""
        name = process.name_of(role, index, model)
        self._progress.close()
        logs.error(log, "process_not_started", child=name, reason=reason)
        if self._was_ready:
            ending = f"a start that failed: {reason}"
            self._schedule_restart(role, index, model, ending, f"cannot be started ({reason})")
            return
        self._code, self.cause = ExitCode.FAILED, f"{name} cannot be started: {reason}"
        notify("STOPPING=1", f"STATUS={self.cause}")
        self._shutdown.all_at_once(self._children)

    def _restart(self, child: Child) -> None:
        self._schedule_restart(child.role, child.index, child.model, ending(child), "died")

    def _schedule_restart(self, role: Role, index: int, model: str, ending: str, status: str) -> None:
        """Start a process again at the time that the restart policy gives. `ending` goes into the reason of a crash
        loop, `status` into the status otherwise."""
        self._all_ready = False
        name = process.name_of(role, index, model)
        found = self._restarts[model].died(role, index, ending, time.monotonic())
        if found is not None:
            logs.error(log, "beyond_hope", child=name, reason=found.reason)
        notify(f"STATUS={found.reason if found else f'{name} {status} and is started again'}")

    def _next_silence_check(self) -> float:
        """When to look at the next process that may have been silent for too long."""
        if self._shutdown.begun:
            return float("inf")
        return min(map(silence_check, self._children), default=float("inf"))

    def _kill_silent(self, now: float) -> None:
        """Kill processes that hang, so that a new one can take over. A process that is stopped or deadlocked uses no
        processor between two checks; one that does may only be slow."""
        for child in self._children:
            if now < silence_check(child):
                continue
            first, child.looked = child.looked == float("-inf"), now
            runs, silent = child.runs(), now - child.beat
            if not first and silent >= (BUSY_SECONDS if runs else SILENCE_SECONDS):
                logs.error(log, "process_hangs", child=child.name, pid=child.pid, seconds=now - child.beat)
                child.beat = float("inf")
                child.signal(signal.SIGKILL)

    def _kill(self, children: Sequence[Child]) -> None:
        self._shutdown.deadline = float("inf")
        for child in children:
            if child in self._children:
                logs.warning(log, "killed", child=child.name, pid=child.pid)
                child.signal(signal.SIGKILL)

    def _forget(self, child: Child) -> None:
        self._children.remove(child)
        watched = self._selector.get_map()
        for descriptor in (child.pidfd, child.output):
            if descriptor in watched:
                self._selector.unregister(descriptor)
        child.close()


def silence_check(child: Child) -> float:
    """When to check a process's silence next: first at two thirds of the limit, then after every third of it."""
    return max(child.beat + SILENCE_SECONDS * 2 / 3, child.looked + SILENCE_SECONDS / 3)


def ending(child: Child) -> str:
    """How a process ended, in words."""
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in child.ending().items())


def crash(child: Child) -> str:
    """Why a process ended that could not say so, in one line: the last one of its output, which ends a traceback."""
    last = next((line.strip() for line in reversed(child.tail) if line.strip()), "it wrote nothing")
    if child.code == -signal.SIGKILL:
        last = "something killed it, most likely the system for want of memory; dmesg tells"
    return f"{child.name} ended before the server was ready ({ending(child)}): {last}"


def stop_signals() -> tuple[int, ...]:
    """A closed terminal ends the server in order, except under nohup."""
    ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT) if ignored else (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def child_environment(config: Config, directory: RunDirectory, notices: Path) -> dict[str, str]:
    """The environment of every child: the launcher's, without a supervisor's variables, plus the secret options."""
    environ = inherited(config, notices) | directory.environment()
    environ[WATCHDOG_USEC] = str(int(SILENCE_SECONDS * 1e6))
    if sys.flags.optimize:
        environ["PYTHONOPTIMIZE"] = str(sys.flags.optimize)
    return environ


def inherited(config: Config, notices: Path) -> dict[str, str]:
    """This process's environment for a child that reports to `notices` instead of to our supervisor."""
    environ = {name: value for name, value in os.environ.items() if name not in SUPERVISORS}
    return options.environment(config, environ) | {NOTIFY_SOCKET: str(notices), process.PARENT: str(os.getpid())}
