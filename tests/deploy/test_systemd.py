"""Units for systemd: read by its own tools where they are there, and held to what this project promises of them."""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.protocol.config import Config
from penstock.services import cli
from penstock.services.supervisor import options
from tests.deploy.confinement import calls, confinement

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = DEPLOY / "systemd"
SERVICES = tuple(sorted(path.name for path in UNITS.glob("*.service")))
FIRST_SCHEDULER = "penstock-scheduler.service"
ONE_HOST = tuple(name for name in SERVICES if name != "penstock-scheduler@.service")  # with one replica
BINARY = "/opt/penstock/bin/penstock"
MOST_EXPOSED = 20  # tenths of systemd's score, which runs from 0 to 100
Unit = Mapping[str, Mapping[str, list[str]]]
analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


def read(path: Path) -> Unit:
    """Settings by section; a key may come several times."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, f"{path.name}: {line}"
            found[section][key].append(value)
    return found


def instance(name: str) -> str:
    return name.replace("@.", "@1." if "scheduler" in name else "@0.")


def staged(folder: Path, backoff: bool) -> list[str]:
    """Copies whose program is there, with an instance of each template; the files to look at."""
    for path in UNITS.glob("penstock*"):
        text = path.read_text().replace(BINARY, "/bin/true")
        (folder / path.name).write_text(text)
        (folder / instance(path.name)).write_text(text)
    if backoff:
        for name in SERVICES:
            (folder / f"{instance(name)}.d").mkdir()
            shutil.copy(UNITS / "systemd-254" / "backoff.conf", folder / f"{instance(name)}.d")
    return ["./penstock.target", *(f"./{instance(name)}" for name in SERVICES)]


def number(parsed: argparse.Namespace) -> str:
    """That a process is told to have: among its host's executors, or among all of its role."""
    return getattr(parsed, "local_index", "") or parsed.index or "0"


def version() -> int:
    told = subprocess.run(["systemd-analyze", "--version"], capture_output=True, text=True, check=True).stdout
    return int(told.split()[1])


@analyze
def test_systemd_has_nothing_to_say_about_the_units(tmp_path: Path) -> None:
    """It warns of an unknown key and exits with 0 all the same."""
    words = ["systemd-analyze", "verify", "--man=no", *staged(tmp_path, version() >= 254)]
    environ = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environ, check=False)
    ours = [line for line in ran.stderr.splitlines() if "penstock" in line]
    assert (ran.returncode, ours) == (0, [])


@analyze
@pytest.mark.parametrize("name", SERVICES)
def test_the_drop_in_for_all_units_is_found_for_each(name: str, tmp_path: Path) -> None:
    """Where its first line says that it goes: what is wrong with it there is told, whatever systemd knows."""
    text = (UNITS / "systemd-254" / "backoff.conf").read_text()
    (place,) = re.findall(r"/etc/systemd/system/(\S+/backoff\.conf)", text)
    staged(tmp_path, backoff=False)
    (tmp_path / place).parent.mkdir()
    (tmp_path / place).write_text(text + "FastRestart=yes\n")
    words = ["systemd-analyze", "verify", "--man=no", f"./{instance(name)}"]
    environ = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environ, check=False)
    assert any(place in line and "FastRestart" in line for line in ran.stderr.splitlines()), ran.stderr


@analyze
def test_systemd_sees_an_unknown_key(tmp_path: Path) -> None:
    staged(tmp_path, backoff=False)
    path = tmp_path / "penstock-scheduler.service"
    path.write_text(path.read_text().replace("[Service]", "[Service]\nFastRestart=yes"))
    words = ["systemd-analyze", "verify", "--man=no", "./penstock-scheduler.service"]
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "FastRestart" in ran.stderr


@analyze
@pytest.mark.parametrize("name", SERVICES)
def test_little_is_exposed(name: str, tmp_path: Path) -> None:
    staged(tmp_path, backoff=False)
    words = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}", "--no-pager"]
    ran = subprocess.run([*words, f"./{instance(name)}"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_there_is_a_unit_for_each_role() -> None:
    roles = {name: read(UNITS / name)["Service"]["ExecStart"][0].split()[:2] for name in SERVICES}
    assert roles == {
        "penstock-api@.service": [BINARY, "api"],
        "penstock-executor@.service": [BINARY, "executor"],
        FIRST_SCHEDULER: [BINARY, "scheduler"],
        "penstock-scheduler@.service": [BINARY, "scheduler"],
        "penstock-tokenizer@.service": [BINARY, "tokenizer"],
    }


@pytest.mark.parametrize("name", SERVICES)
def test_every_service_is_told_of_watched_and_drained(name: str) -> None:
    unit = read(UNITS / name)
    service = unit["Service"]
    drain = tomllib.loads((DEPLOY / "penstock.toml").read_text())["run"]["drain_timeout"]
    assert service["Type"] == ["notify"]
    assert service["NotifyAccess"] == ["main"]
    assert int(service["WatchdogSec"][0]) > 0
    assert service["Restart"] == ["always"]
    assert int(service["TimeoutStopSec"][0]) == drain + 10
    assert service["KillMode"] == ["mixed"]
    assert service["EnvironmentFile"] == ["/etc/penstock/penstock.env"]
    assert service["RuntimeDirectory"] == ["penstock"]
    assert service["RuntimeDirectoryMode"] == ["0700"]
    assert service["RuntimeDirectoryPreserve"] == ["yes"]
    assert unit["Install"]["WantedBy"] == ["penstock.target"]


@pytest.mark.parametrize("name", SERVICES)
def test_parts_do_not_need_one_another_to_stay(name: str) -> None:
    """A part that dies must not take others along; the target takes them all."""
    unit = read(UNITS / name)["Unit"]
    assert unit["PartOf"] == ["penstock.target"]
    assert not {"Requires", "BindsTo", "Requisite"} & set(unit)
    assert not any("sleep" in line for line in (UNITS / name).read_text().split())


def test_the_api_ends_first_and_executors_last() -> None:
    """Units stop in the reverse of the order in which they start."""
    api, scheduler = read(UNITS / "penstock-api@.service")["Unit"], read(UNITS / FIRST_SCHEDULER)["Unit"]
    tokenizer, executor = (read(UNITS / f"penstock-{role}@.service")["Unit"] for role in ("tokenizer", "executor"))
    assert FIRST_SCHEDULER in api["After"][0].split()
    assert {f"penstock-tokenizer@{index}.service" for index in range(8)} <= set(api["After"][0].split())
    assert FIRST_SCHEDULER in tokenizer["After"][0].split()
    assert executor["Before"] == [FIRST_SCHEDULER]
    assert "Before" not in scheduler


@pytest.mark.parametrize("name", SERVICES)
def test_devices_are_for_executors(name: str) -> None:
    service = read(UNITS / name)["Service"]
    executor = "executor" in name
    assert service["NoNewPrivileges"] == ["yes"]
    assert service["ProtectSystem"] == ["strict"]
    assert service["PrivateTmp"] == ["yes"]
    assert service["User"] == ["penstock"]
    assert service["DevicePolicy"] == ["closed"]
    assert service.get("DeviceAllow", []) == (["char-nvidia* rw"] if executor else [])
    assert service.get("PrivateDevices", ["no"]) == (["no"] if executor else ["yes"])
    assert service.get("MemoryDenyWriteExecute", ["no"]) == (["no"] if executor else ["yes"])
    assert service.get("LimitMEMLOCK", []) == (["infinity"] if executor else [])
    assert service.get("Environment", []) == (["CUDA_VISIBLE_DEVICES=%i"] if executor else [])


@pytest.mark.parametrize("name", SERVICES)
def test_mistakes_are_not_tried_again(name: str) -> None:
    codes = {int(code) for code in read(UNITS / name)["Service"]["RestartPreventExitStatus"][0].split()}
    assert codes == set(cli.EXIT_CODES.values())


@pytest.mark.parametrize("name", SERVICES)
def test_the_commands_are_commands(name: str) -> None:
    words = read(UNITS / name)["Service"]["ExecStart"][0].replace("%i", "3").split()
    parsed = options.parse(cli.parser_of(words[1]), words[2:])
    assert parsed.config == "/etc/penstock/penstock.toml"
    assert number(parsed) == ("0" if name == FIRST_SCHEDULER else "3")


def test_the_configuration_is_one() -> None:
    parsed = options.parse(cli.parser_of("api"), ["--config", str(DEPLOY / "penstock.toml")])
    config = options.effective(parsed, {}).config
    assert isinstance(config, Config)
    assert config.run.run_dir == "/run/penstock"
    assert config.tokenizer.tokenizer_processes == config.api.api_processes == 1
    assert config.model.tensor_parallel_size == 1


def test_the_environment_file_holds_variables_alone() -> None:
    for line in (DEPLOY / "penstock.env").read_text().splitlines():
        assert line.startswith("# ") or re.fullmatch(r"#?[A-Z][A-Z0-9_]*=\S+", line), line


def test_a_further_replicas_scheduler_is_the_first_ones_but_for_its_place() -> None:
    first, further = read(UNITS / FIRST_SCHEDULER), read(UNITS / "penstock-scheduler@.service")
    words = further["Service"]["ExecStart"][0].replace("%i", "1").split()
    assert words[:2] == [BINARY, "scheduler"]
    assert options.parse(cli.parser_of(words[1]), words[2:]).index == "1"
    assert further["Unit"]["Before"] == [FIRST_SCHEDULER], "started before it, ended after it"
    assert further["Unit"]["Description"] == [first["Unit"]["Description"][0] + " of replica %i"]
    assert {**further["Service"], "ExecStart": []} == {**first["Service"], "ExecStart": []}
    assert further["Install"] == {**first["Install"], "DefaultInstance": ["1"]}


@pytest.mark.parametrize("name", SERVICES)
def test_only_the_api_lacks_what_tells_of_interfaces(name: str) -> None:
    """ZeroMQ asks for this host's interfaces when it binds an address, and aborts where it may not; so do NCCL and gloo
    when members meet. An api process binds no link."""
    families = read(UNITS / name)["Service"]["RestrictAddressFamilies"][0].split()
    assert families == ["AF_UNIX", "AF_INET", "AF_INET6", *([] if "api" in name else ["AF_NETLINK"])]


def said(name: str, code: str) -> str:
    """What Python code prints that is shut in as a unit is."""
    words = [*confinement(read(UNITS / name)["Service"]), sys.executable, "-c", code]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    return ran.stdout.strip() or ran.stderr.strip().splitlines()[-1]


ASKS = """import socket
for family in ("AF_INET", "AF_NETLINK", "AF_PACKET"):
    try:
        socket.socket(getattr(socket, family), socket.SOCK_RAW if family == "AF_NETLINK" else socket.SOCK_DGRAM).close()
        print(family)
    except OSError as error:
        print(error.errno)
"""
NO_FAMILY = "97"  # EAFNOSUPPORT


@pytest.mark.skipif(platform.machine() != "x86_64", reason="filters are made for x86-64")
def test_a_confined_process_has_the_families_of_its_unit() -> None:
    assert said("penstock-api@.service", ASKS).split() == ["AF_INET", NO_FAMILY, NO_FAMILY]
    assert said("penstock-executor@.service", ASKS).split() == ["AF_INET", "AF_NETLINK", NO_FAMILY]


@pytest.mark.parametrize("name", ["penstock-scheduler.service", "penstock-tokenizer@.service"])
def test_who_binds_links_may_bind_addresses(name: str) -> None:
    code = "import zmq; zmq.Context().socket(zmq.ROUTER).bind('tcp://127.0.0.1:*'); print('bound')"
    assert said(name, code) == "bound"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="filters are made for x86-64")
def test_a_confined_process_has_the_calls_of_its_unit() -> None:
    if not calls("@system-service"):
        pytest.skip("nobody here knows the calls of a group, or their numbers")
    code = "import ctypes; c = ctypes.CDLL(None, use_errno=True); print(c.mount(0, 0, 0, 0, 0), ctypes.get_errno())"
    assert said("penstock-api@.service", code) == "-1 1", "EPERM comes before EFAULT"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="filters are made for x86-64")
def test_only_an_executor_may_make_code() -> None:
    """Where the kernel is too old for it (6.3) nothing is told of the others."""
    code = "import mmap; mmap.mmap(-1, 4096, prot=mmap.PROT_WRITE | mmap.PROT_EXEC); print('made')"
    assert said("penstock-executor@.service", code) == "made"
    release = tuple(int(part) for part in re.findall(r"\d+", platform.release())[:2])
    assert release < (6, 3) or "PermissionError" in said("penstock-api@.service", code)
