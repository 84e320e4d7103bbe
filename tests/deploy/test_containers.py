"""Dockerfile, compose.yaml, Kubernetes manifests and fronts, held to what can be told without running them."""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.protocol import limits
from penstock.protocol.config import ApiConfig, Config
from penstock.services import cli
from penstock.services.supervisor import options

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
YAML = tuple(path for path in sorted(DEPLOY.rglob("*.yaml")) if path.parent.name != "templates")  # those are Helm's
HEALTH = {"/health/live", "/health/ready"}


def documents(name: str) -> dict[str, Any]:
    """The manifests of a file by their kind."""
    found = [document for document in yaml.safe_load_all((DEPLOY / name).read_text()) if document]
    kinds = [document["kind"] for document in found]
    assert len(set(kinds)) == len(kinds)
    return {document["kind"]: document for document in found}


def pods(name: str) -> list[dict[str, Any]]:
    """The specifications of a leader's and a worker's pod."""
    group = documents(name)["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"]["spec"], group["workerTemplate"]["spec"]]


def parsed(words: list[str]) -> Config:
    """A command line as the product takes it, less the file that only the place where it runs has."""
    assert words[0] in cli.COMMANDS
    namespace = options.parse(cli.parser_of(words[0]), words[1:])
    namespace.config = ""
    return options.effective(namespace, {}).config


def seconds(text: str) -> float:
    return float(text.removesuffix("s"))


@pytest.mark.parametrize("path", YAML, ids=lambda path: path.name)
def test_yaml_is_yaml(path: Path) -> None:
    assert all(document for document in yaml.safe_load_all(path.read_text()))
    assert "\t" not in path.read_text()


def instructions() -> list[tuple[str, str]]:
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    joined = re.sub(r"\\\n\s*", "", "\n".join(line for line in text.splitlines() if not line.startswith("#")))
    return [(line.split(" ", 1)[0], line.split(" ", 1)[1]) for line in joined.splitlines() if line.strip()]


def test_the_images_run_as_nobody_special_and_end_in_order() -> None:
    stages: dict[str, dict[str, str]] = {}
    for word, rest in instructions():
        if word == "FROM":
            stages[rest.split()[-1]] = {}
        elif stages:
            stages[list(stages)[-1]][word] = rest
    assert set(stages) == {"common", "packages", "cpu", "cuda"}
    for name in ("cpu", "cuda"):
        stage = stages[name]
        assert stage["USER"] == "penstock"
        assert stage["STOPSIGNAL"] == "SIGTERM"
        assert "/health/live" in stage["HEALTHCHECK"]
        assert stage["ENTRYPOINT"] == '["penstock"]'
        assert parsed(yaml.safe_load(stage["CMD"])).api.host == "0.0.0.0"
    assert "--device" in stages["cpu"]["CMD"]
    assert "gcc" in stages["cuda"]["RUN"]


def test_the_images_have_the_torch_that_the_project_wants() -> None:
    """Installed first, from the index that the builder names; then nothing of it is left to fetch."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (command,) = [rest for word, rest in instructions() if word == "RUN" and "torch" in rest]
    assert command.split()[-1].strip('"') in wanted
    for index, words in (("", ["pip", "install"]), ("http://x", ["pip", "install", "-i", "http://x"])):
        said = subprocess.run(
            ["sh", "-c", f"printf '%s\n' {command}"],
            env={"TORCH_INDEX": index},
            capture_output=True,
            text=True,
            check=True,
        )
        assert said.stdout.split()[:-1] == words
    services = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    for name in ("penstock", "penstock-gpu"):
        assert set(services[name]["build"]["args"]) == {
            rest.split("=")[0] for word, rest in instructions() if word == "ARG"
        }


def test_the_images_are_of_a_python_that_is_served() -> None:
    version = re.search(r"python:3\.(\d+)", (DEPLOY / "container" / "Dockerfile").read_text())
    assert version is not None
    low, high = re.findall(
        r"3\.(\d+)", tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    )
    assert int(low) <= int(version[1]) < int(high)


def test_the_context_is_the_product_and_nothing_else() -> None:
    """What the wheel is built from: what pyproject.toml names, and what it reads itself."""
    lines = (DEPLOY / "container" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    files = {"pyproject.toml", project["project"]["readme"], *project["project"]["license-files"]}
    links = {path.name for path in (ROOT / "penstock").iterdir() if path.is_symlink()}
    assert rules[0] == "*"
    assert {rule.removeprefix("!") for rule in rules if rule.startswith("!")} == packages | files | links
    assert rules[-1] == "**/__pycache__", "what comes last holds"


def test_the_images_user_is_the_pods() -> None:
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    user, group = re.search(r"useradd --uid (\d+)", text), re.search(r"groupadd --gid (\d+)", text)
    assert user is not None
    assert group is not None
    for pod in pods("kubernetes/hosts/penstock.yaml"):
        context = pod["securityContext"]
        assert context["runAsUser"] == int(user[1])
        assert context["runAsGroup"] == context["fsGroup"] == int(group[1])


def test_compose_brings_what_watches_a_server() -> None:
    found = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())
    services = found["services"]
    assert set(services) == {"penstock", "penstock-gpu", "prometheus", "grafana", "jaeger"}
    targets = {word for word, rest in instructions() if word == "FROM" for word in [rest.split()[-1]]}
    for name in ("penstock", "penstock-gpu"):
        service = services[name]
        assert service["build"]["target"] in targets
        assert (DEPLOY / "container" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert seconds(service["stop_grace_period"]) == Config().run.drain_timeout + 10
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["cap_drop"] == ["ALL"]
        parsed([re.sub(r"\$\{.*\}", "model", word) for word in service["command"]])
    for name, service in services.items():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert source in found["volumes"] or (DEPLOY / "container" / source).exists(), f"{name}: {volume}"
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name
        if not name.startswith("penstock"):
            assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_grafana_finds_its_sources_and_its_dashboard() -> None:
    sources = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    services = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    for source in sources:
        assert re.fullmatch(r"http://(\w+):\d+", source["url"])[1] in services  # type: ignore[index]
    board = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/penstock.yaml").read_text())["providers"][0]
    mounted = [volume.split(":")[1] for volume in services["grafana"]["volumes"]]
    assert any(path.startswith(board["options"]["path"]) for path in mounted)


def test_prometheus_asks_at_the_port_that_needs_no_key_and_is_not_published() -> None:
    services = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    scraped = yaml.safe_load((DEPLOY / "prometheus/prometheus.yaml").read_text())["scrape_configs"][0]
    port = scraped["static_configs"][0]["targets"][0].removeprefix("penstock:")
    for name in ("penstock", "penstock-gpu"):
        command = services[name]["command"]
        assert command[command.index("--metrics-port") + 1] == port
        assert not any(published.endswith(f":{port}") for published in services[name]["ports"])
    assert "authorization" not in scraped


def test_a_group_of_pods_is_scraped_at_the_port_that_needs_no_key() -> None:
    manifests = documents("kubernetes/hosts/penstock.yaml")
    pod = manifests["LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]["leaderTemplate"]
    port = tomllib.loads(manifests["ConfigMap"]["data"]["penstock.toml"])["api"]["metrics_port"]
    assert pod["metadata"]["annotations"]["prometheus.io/port"] == str(port)
    assert {"name": "metrics", "containerPort": port} in pod["spec"]["containers"][0]["ports"]
    rules = [rule for rule in manifests["NetworkPolicy"]["spec"]["ingress"] if "metrics" in str(rule.get("ports"))]
    assert [rule["from"] for rule in rules] == [[{"namespaceSelector": {}}]], "pods of the cluster alone"


def directives() -> list[list[str]]:
    """nginx's directives in order; blocks are `{` and `}`."""
    lexer = shlex.shlex((DEPLOY / "front" / "nginx.conf").read_text(), posix=True, punctuation_chars="{};")
    lexer.whitespace_split, lexer.commenters = True, "#"
    found: list[list[str]] = [[]]
    for token in lexer:
        if set(token) <= set("{};"):
            found += [[mark] for mark in token if mark != ";"]
            found.append([])
        else:
            found[-1].append(token)
    return [words for words in found if words]


def nginx() -> dict[str, list[str]]:
    return {words[0]: words[1:] for words in directives() if words[0] not in "{}"}


def test_nginx_lets_tokens_pass_and_repeats_no_post() -> None:
    found = nginx()
    blocks = [words[0] for words in directives()]
    assert blocks.count("{") == blocks.count("}") == 6
    assert found["proxy_buffering"] == found["gzip"] == found["proxy_ignore_client_abort"] == ["off"]
    assert found["proxy_http_version"] == ["1.1"]
    assert seconds(found["proxy_read_timeout"][0]) >= 3600
    assert "non_idempotent" not in found["proxy_next_upstream"]
    assert not [word for word in found["proxy_next_upstream"] if word.startswith("http_")]
    assert found["client_max_body_size"] == [f"{limits.MAX_BODY_BYTES >> 20}m"]


def test_envoy_lets_tokens_pass_and_repeats_nothing_that_began() -> None:
    found = yaml.safe_load((DEPLOY / "front" / "envoy.yaml").read_text())["static_resources"]
    connection = found["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    routes = connection["route_config"]["virtual_hosts"][0]["routes"]
    route = routes[-1]["route"]
    assert connection["stream_idle_timeout"] == connection["request_timeout"] == route["timeout"] == "0s"
    assert seconds(route["idle_timeout"]) >= 3600
    assert set(route["retry_policy"]["retry_on"].split(",")) == {"connect-failure", "refused-stream"}
    assert route["cluster"] == found["clusters"][0]["name"]
    assert found["clusters"][0]["health_checks"][0]["http_health_check"]["path"] in HEALTH
    assert {route["match"].get("path") for route in routes} == {"/metrics", None}


def test_fronts_let_go_of_connections_before_the_server_does() -> None:
    server = ApiConfig().keep_alive_timeout
    text = (DEPLOY / "front" / "nginx.conf").read_text()
    upstream = text[text.index("upstream penstock") : text.index("server {")]
    assert seconds(re.search(r"keepalive_timeout (\S+);", upstream)[1]) < server  # type: ignore[index]
    cluster = yaml.safe_load((DEPLOY / "front" / "envoy.yaml").read_text())["static_resources"]["clusters"][0]
    (protocol,) = cluster["typed_extension_protocol_options"].values()
    assert seconds(protocol["common_http_protocol_options"]["idle_timeout"]) < server
