"""A server over two hosts, as `deploy/` has it for systemd, supervisord and Kubernetes: what one host is told fits what
the other is told, and the product takes all of it."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import stat
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.protocol import groups
from penstock.protocol.config import Config, RunConfig
from penstock.protocol.errors import ConfigError
from penstock.protocol.links import Role, read_address, shared_hash
from penstock.protocol.parts import parts_of
from penstock.services import cli
from penstock.services.links.curve import check_access
from penstock.services.supervisor import options
from penstock.services.supervisor.restart_policy import FILE as FAILURES
from tests.deploy.test_containers import documents, pods
from tests.deploy.test_supervisord import programs
from tests.deploy.test_systemd import SERVICES, UNITS, analyze, instance, read, staged

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
HOSTS = DEPLOY / "hosts"
PODS = "kubernetes/hosts/penstock.yaml"
PAGE = (DEPLOY / "README.md").read_text()
GPUS = 4  # of each host
ROLES_OF_FIRST = ("api", "tokenizer", "scheduler")
LEADER, WORKER = 0, 1
NETWORK = {"POD_IP": "10.1.2.3", "LWS_LEADER_ADDRESS": "penstock-group-0.penstock-group.default"}


def told(words: list[str], file: Path) -> Config:
    """What a command line says with a file in the place of the one that it names."""
    words = [re.sub(r"[^= ]*\.toml$", str(file), word) for word in words]
    return options.effective(options.parse(cli.parser_of(words[0]), words[1:]), {}).config


def fit(first: Config, second: Config) -> None:
    """What two hosts have to agree on, and what they must not both have."""
    assert shared_hash(first.model) == shared_hash(second.model), "or the one refuses the other"
    assert first.links.link_keys
    assert second.links.link_keys
    for option, one, other in (
        ("--scheduler-address", first.links.scheduler_address, second.links.scheduler_address),
        ("--rendezvous", first.executor.rendezvous, second.executor.rendezvous),
    ):
        assert read_address(option, one).port == read_address(option, other).port


def test_the_files_of_both_hosts_are_one_server() -> None:
    first, second = (told(["api", "--config", "x.toml"], HOSTS / f"{name}.toml") for name in ("first", "second"))
    fit(first, second)
    assert first.links == second.links
    assert first.executor.rendezvous == second.executor.rendezvous
    assert (first.executor.first_executor, second.executor.first_executor) == (0, GPUS)
    assert groups.executors(first.model) == 2 * GPUS
    assert first.run == second.run == RunConfig(run_dir="/run/penstock")


def test_the_two_commands_on_the_page_are_one_server() -> None:
    block = PAGE[PAGE.index("By hand it is two commands") :].split("```")[1]
    commands = [line.split("#")[0].split() for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    assert [words[0] for words in commands] == ["penstock", "penstock"]
    first, second = (told(words[1:], HOSTS / "none") for words in commands)
    fit(first, second)
    here, there = parts_of(first), parts_of(second)
    assert [*here[Role.EXECUTOR], *there[Role.EXECUTOR]] == list(range(groups.executors(first.model)))
    assert set(there) == {Role.EXECUTOR}


@pytest.mark.parametrize("name", ["first", "second"])
def test_instances_are_executors_of_their_host(name: str) -> None:
    """penstock-executor@0 to @3 on each host are 0 to 3 in the server there, 4 to 7 here."""
    template = read(UNITS / "penstock-executor@.service")["Service"]["ExecStart"][0]
    found = []
    for gpu in range(GPUS):
        words = template.replace("%i", str(gpu)).replace("/etc/penstock/penstock.toml", str(HOSTS / f"{name}.toml"))
        parsed = options.parse(cli.parser_of("executor"), words.split()[2:])
        found.append(cli.index_of(Role.EXECUTOR, parsed, options.effective(parsed, {}).config))
    first = 0 if name == "first" else GPUS
    assert found == list(range(first, first + GPUS))


def test_stages_are_within_hosts() -> None:
    """What a layer's ranks say to each other stays on the host; a stage's output alone crosses the network."""
    model = told(["api", "--config", "x.toml"], HOSTS / "first.toml").model
    for host in range(2):
        assert {groups.place(host * GPUS + gpu, model).stage for gpu in range(GPUS)} == {host}


def test_the_page_enables_what_each_host_has() -> None:
    (row,) = re.findall(r"^\| enabled \| `(.+?)` \| `(.+?)` \|$", PAGE, re.MULTILINE)
    first, second = (words.split() for words in row)
    assert second == ["penstock.target", f"penstock-executor@{{0..{GPUS - 1}}}"]
    assert set(second) < set(first)
    for name in first:
        unit = re.sub(r"@.*", "@.service", name)
        assert name == "penstock.target" or {unit, f"{unit}.service"} & set(SERVICES)


@analyze
def test_systemd_has_nothing_to_say_about_the_drop_in(tmp_path: Path) -> None:
    """With every line of it."""
    unit = instance("penstock-executor@.service")
    staged(tmp_path, backoff=False)
    (tmp_path / f"{unit}.d").mkdir()
    text = (HOSTS / "infiniband.conf").read_text()
    (tmp_path / f"{unit}.d" / "infiniband.conf").write_text(re.sub(r"^#(?=[A-Z]\w+=)", "", text, flags=re.MULTILINE))
    words = ["systemd-analyze", "verify", "--man=no", f"./{unit}"]
    environ = {**os.environ, "SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    ran = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environ, check=False)
    assert (ran.returncode, [line for line in ran.stderr.splitlines() if "penstock" in line]) == (0, [])
    assert set(read(HOSTS / "infiniband.conf")) == {"Service"}


def test_the_second_hosts_programs_are_the_first_ones() -> None:
    """But for what it has not, and how many it has; and what supervisord is told of itself is the same."""
    first, second = programs(), configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    second.read(HOSTS / "supervisord.conf")
    assert set(first.sections()) - set(second.sections()) == {f"program:penstock-{role}" for role in ROLES_OF_FIRST}
    for section in second.sections():
        ours, theirs = dict(second[section]), dict(first[section])
        if section == "program:penstock-executor":
            assert ours.pop("numprocs") == str(GPUS)
            for left_out in ("numprocs", "priority"):  # with nobody there is no order
                theirs.pop(left_out)
        assert ours == theirs, section
    words = second["program:penstock-executor"]["command"].replace("%(process_num)d", "2").split()
    parsed = options.parse(cli.parser_of(words[1]), [*words[2:], "--config", str(HOSTS / "second.toml")])
    assert cli.index_of(Role.EXECUTOR, parsed, options.effective(parsed, {}).config) == GPUS + 2


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """The pods' penstock.toml."""
    (tmp_path / "penstock.toml").write_text(documents(PODS)["ConfigMap"]["data"]["penstock.toml"])
    return tmp_path / "penstock.toml"


def container(which: int) -> dict[str, Any]:
    (found,) = pods(PODS)[which]["containers"]
    return dict(found)


def words_of(which: int) -> list[str]:
    """A pod's command line, with its variables, each of which it has."""
    given = {entry["name"] for entry in container(which)["env"]} | {"LWS_LEADER_ADDRESS"}  # the controller gives it
    found = []
    for word in container(which)["args"]:
        for name in re.findall(r"\$\((\w+)\)", word):
            assert name in given
            word = word.replace(f"$({name})", NETWORK[name])
        found.append(word)
    return found


def test_both_pods_are_one_server(shared: Path) -> None:
    leader, worker = (told(words_of(which), shared) for which in (LEADER, WORKER))
    fit(leader, worker)
    here, there = parts_of(leader), parts_of(worker)
    assert set(here) == set(Role)
    assert set(there) == {Role.EXECUTOR}
    assert [*here[Role.EXECUTOR], *there[Role.EXECUTOR]] == list(range(groups.executors(leader.model)))
    for which, parts in ((LEADER, here), (WORKER, there)):
        assert container(which)["resources"]["limits"]["nvidia.com/gpu"] == str(len(parts[Role.EXECUTOR]))
    assert read_address("--rendezvous", worker.executor.rendezvous).host == NETWORK["LWS_LEADER_ADDRESS"]
    assert read_address("--rendezvous", leader.executor.rendezvous).host == NETWORK["POD_IP"]
    assert documents(PODS)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["size"] == 2


def test_workers_of_more_hosts_have_executors_by_their_number() -> None:
    """As the page tells it for a shell."""
    (part,) = re.findall(r"`--parts (executor:.+?)`", PAGE)
    for worker in (1, 2, 3):
        environ = {**os.environ, "LWS_WORKER_INDEX": str(worker)}
        said = subprocess.run(
            ["sh", "-c", f"echo {part}"], env=environ, capture_output=True, text=True, check=True
        ).stdout
        words = ["serve", "--parts", said.strip(), "--tensor-parallel-size=4", "--pipeline-parallel-size=4"]
        words += ["--scheduler-address=tcp://h:7000", "--rendezvous=tcp://h:29500", "--link-keys=k"]
        config = options.effective(options.parse(cli.parser_of(words[0]), words[1:]), {}).config
        assert list(parts_of(config)[Role.EXECUTOR]) == list(range(worker * GPUS, (worker + 1) * GPUS))


@pytest.mark.parametrize("which", [LEADER, WORKER])
def test_each_pod_has_the_keys(which: int, shared: Path) -> None:
    pod, path = pods(PODS)[which], Path(told(words_of(which), shared).links.link_keys)
    (secret,) = [volume for volume in pod["volumes"] if "secret" in volume]
    (place,) = [mount for mount in container(which)["volumeMounts"] if mount["name"] == secret["name"]]
    assert place == {"name": secret["name"], "mountPath": str(path.parent), "readOnly": True}
    assert secret["secret"]["defaultMode"] == 0o400
    told_how = f"secret generic {secret['secret']['secretName']} --from-file={path.name}"
    assert told_how in (DEPLOY / PODS).read_text()


@pytest.mark.parametrize(("group_may", "taken"), [(0o040, True), (0o060, False), (0o044, False)])
def test_a_secrets_file_is_private_enough(group_may: int, taken: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kubelet gives root's file to the pod's group, for which it adds the right to read it to the mode."""
    context = pods(PODS)[WORKER]["securityContext"]
    monkeypatch.setattr(os, "geteuid", lambda: context["runAsUser"])
    found = os.stat_result((stat.S_IFREG | 0o400 | group_may, 0, 0, 1, 0, context["fsGroup"], 0, 0, 0, 0))
    with nullcontext() if taken else pytest.raises(ConfigError):
        check_access("link.keys", found)


@pytest.mark.parametrize("which", [LEADER, WORKER])
def test_each_pod_is_probed_and_closed_in(which: int) -> None:
    pod, found = pods(PODS)[which], container(which)
    assert {"livenessProbe", "readinessProbe"} <= set(found)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert found["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}
    }  # fmt: skip
    assert {mount["name"] for mount in found["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert "/dev/shm" in {mount["mountPath"] for mount in found["volumeMounts"]}


def test_the_leader_is_asked_over_http_and_the_worker_in_its_pod(shared: Path) -> None:
    leader, worker, run_dir = container(LEADER), container(WORKER), told(words_of(WORKER), shared).run.run_dir
    assert leader["livenessProbe"]["httpGet"]["path"] == leader["startupProbe"]["httpGet"]["path"] == "/health/live"
    assert leader["readinessProbe"]["httpGet"]["path"] == "/health/ready"
    assert worker["livenessProbe"]["exec"]["command"] == ["test", "!", "-e", f"{run_dir}/{FAILURES}"]
    assert "ports" not in worker, "nothing listens there"


def test_a_worker_outlives_its_leader(shared: Path) -> None:
    """What drains there still needs its executors."""
    leader, worker = pods(PODS)
    pause = container(LEADER)["lifecycle"]["preStop"]["exec"]["command"]
    wait = float(re.search(r", (\d+)\)", pause[-1])[1])  # type: ignore[index]
    drain = told(words_of(LEADER), shared).run.drain_timeout
    assert leader["terminationGracePeriodSeconds"] == wait + drain + 10
    assert worker["terminationGracePeriodSeconds"] == leader["terminationGracePeriodSeconds"] + 10
    assert "LWS_LEADER_ADDRESS" in container(WORKER)["lifecycle"]["preStop"]["exec"]["command"][-1]


@pytest.mark.parametrize("probe", ["readinessProbe", "lifecycle"])
def test_a_workers_questions_are_answered(probe: str, tmp_path: Path) -> None:
    """They are run against an address where nobody listens: not ready, and nothing to wait for."""
    words = container(WORKER)[probe]["preStop" if probe == "lifecycle" else "exec"]
    command = words["exec"]["command"] if probe == "lifecycle" else words["command"]
    environ = {**os.environ, "LWS_LEADER_ADDRESS": "127.0.0.1"}
    command = [word.replace("8000", "1").replace("python", sys.executable) for word in command]
    ran = subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=60)
    assert (ran.returncode == 0) == (probe == "lifecycle")
    assert "ConnectionRefusedError" in ran.stderr


def test_the_group_mends_itself() -> None:
    spec = documents(PODS)["LeaderWorkerSet"]["spec"]
    assert spec["leaderWorkerTemplate"]["restartPolicy"] == "None"
    assert spec["startupPolicy"] == "LeaderCreated"


def test_clients_reach_leaders_alone() -> None:
    manifests = documents(PODS)
    group = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    leader, worker = (group[f"{name}Template"]["metadata"]["labels"] for name in ("leader", "worker"))
    service = manifests["Service"]
    assert service["spec"]["selector"].items() <= leader.items()
    assert not service["spec"]["selector"].items() <= worker.items()
    assert service["spec"]["sessionAffinity"] == "ClientIP"
    assert service["metadata"]["name"] != manifests["LeaderWorkerSet"]["metadata"]["name"], "the headless one has that"
    labels = manifests["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"]
    assert labels.items() <= leader.items() & worker.items()
    clients, _, peers = manifests["NetworkPolicy"]["spec"]["ingress"]
    assert [port["port"] for port in clients["ports"]] == [container(LEADER)["ports"][0]["name"]]
    assert peers == {"from": [{"podSelector": {"matchLabels": labels}}]}


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_the_keys_mode_is_read_as_octal() -> None:
    command = ["kubectl", "kustomize", str(DEPLOY / PODS).removesuffix("/penstock.yaml")]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    modes = re.findall(r"defaultMode: (\w+)", text)
    assert [yaml.safe_load(mode) for mode in modes] == [0o400, 0o400]
