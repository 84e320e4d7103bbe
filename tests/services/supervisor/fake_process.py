"""Stands in for `python -m penstock ROLE ...` in tests of the launcher: it says what a real process
says and does what it is told.

FAKE_PLAN is a JSON object from process name to a word: `exit:N` ends at once with that code, `mute` never gets ready,
`stubborn` ignores SIGTERM, `slow:F` ends after SIGTERM once somebody has written to FIFO F, `once` is well in its first
start and fails at once in later ones, `silent` sends one heartbeat in its first start and no more, `busy:S` sends one,
computes for S seconds and sends heartbeats again, `group:N` says in each of its first N starts that another executor of
its group has ended, `fill` leaves no room in the run directory in its first start and fails at once in later ones,
`chatty:N` writes N bytes of lines once it is ready. `silent` and `busy` begin once there is a file `go` beside the log.
FAKE_LOG gets the events.
"""

import contextlib
import json
import os
import select
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from penstock.protocol.links import Role
from penstock.services.supervisor import process, run_directory
from penstock.services.supervisor.process import ExitCode, Stop
from penstock.services.supervisor.sd_notify import notify


def say(event: str) -> None:
    with open(os.environ["FAKE_LOG"], "a") as file:
        file.write(f"{name} {os.getpid()} {event}\n")


role = Role(sys.argv[1])
name = f"{role}-{sys.argv[2].removeprefix('--index=')}"
run_dir = Path(next(word for word in sys.argv if word.startswith("--run-dir=")).removeprefix("--run-dir="))
word, _, detail = json.loads(os.environ.get("FAKE_PLAN", "{}")).get(name, "").partition(":")
log = Path(os.environ["FAKE_LOG"])
before = [line for line in log.read_text().splitlines() if line.startswith(f"{name} ")] if log.exists() else []
reborn = bool(before)
stop = Stop(once=word != "stubborn")
launcher = process.parent() if role is Role.API else process.follow_parent()
say("started " + " ".join(sys.argv[3:]))
print(f"{name} says hello", flush=True)
(run_dir / f"{name}.sock").touch()
if word == "exit" or (word in ("once", "fill") and reborn):
    print("it went wrong", file=sys.stderr)
    sys.exit(int(detail or 1))
if word == "group" and sum(line.split(" ")[2] == "started" for line in before) < int(detail):
    sys.exit(ExitCode.GROUP)
notify("STATUS=working")
# An EngineStatus up to its blocks, as `banner.engine_facts` writes it: what that imports takes long.
engine = ["EngineStatus", 0.0, 0, True, 16, 1024, 256, "cpu", "float32", "", 0, 0.0, 0, 0, 512]
if word != "mute":
    notify("READY=1", "X_PENSTOCK_URL=http://127.0.0.1:1", f"X_PENSTOCK_ENGINE={json.dumps(engine)}")
if word == "fill":
    with contextlib.suppress(OSError), open(run_dir / "ballast", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    say("full")
if word == "chatty":
    for number in range(int(detail) // 100):
        print(f"{number:<98}.")
    sys.stdout.flush()
    say("spoken")
if word in ("silent", "busy"):  # while others start, a hang is a start that failed
    while not Path(os.environ["FAKE_LOG"]).with_name("go").exists():
        select.select([stop], [], [], 0.02)
if word == "silent" and not reborn:
    notify("WATCHDOG=1")
if word == "busy":
    notify("WATCHDOG=1")
    say("busy")
    end = time.monotonic() + float(detail)
    while time.monotonic() < end:
        pass
    say("through")
while not stop.asked or word == "stubborn":
    if word == "busy":
        notify("WATCHDOG=1")
        select.select([stop], [], [], 0.05)
        stop.drain()
        continue
    if launcher in select.select([stop, *([] if launcher is None else [launcher])], [], [])[0]:
        break
    stop.drain()
say("stopping")
if word == "slow":
    Path(detail).read_bytes()
say("ended")
if role is Role.API and process.orphaned():
    run_directory.clear_orphan(run_dir)
