"""The Helm chart for several sets of values: its objects are valid, fit each other, and say what the product takes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from penstock.protocol.adapters import read_modules
from penstock.protocol.config import Config
from penstock.protocol.version import VERSION
from penstock.services.http.routing import Access
from penstock.services.metrics.definitions import METRICS, Kind
from penstock.services.openai.routes import ROUTES
from tests.deploy.chart import CHART, DEFAULTS, PATHS, REFUSED, SETS, helm, manifests, run_helm
from tests.deploy.test_containers import parsed

pytest.importorskip("helm_python", reason="helm-python-sdk has no wheel for this platform")

ROOT = Path(__file__).resolve().parents[2]
OBJECT = {"type": "object", "additionalProperties": False}
REFERENCE = {
    **OBJECT,
    "required": ["name"],
    "properties": {name: {"type": "string"} for name in ("group", "kind", "name", "namespace", "sectionName")},
}
PORT = {**OBJECT, "required": ["number"], "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 65535}}}
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "maxLength": 63}}
SELECTOR = {**OBJECT, "required": ["matchLabels"], "properties": {"matchLabels": LABELS}}
# Specifications of objects that Kubernetes itself does not have, as far as the chart uses them. Sources: the CRDs of
# Gateway API Inference Extension (v1), Gateway API (v1) and the Prometheus operator (v1).
FOREIGN: Mapping[str, Mapping[str, Any]] = {
    "inference.networking.k8s.io/v1 InferencePool": {
        **OBJECT,
        "required": ["selector", "targetPorts"],
        "properties": {
            "selector": SELECTOR,
            "targetPorts": {"type": "array", "minItems": 1, "maxItems": 8, "items": PORT},
            "endpointPickerRef": {
                **OBJECT,
                "required": ["name", "port"],
                "properties": {
                    "name": {"type": "string", "minLength": 1},
                    "port": PORT,
                    "failureMode": {"enum": ["FailOpen", "FailClose"]},
                },
            },
        },
    },
    "gateway.networking.k8s.io/v1 HTTPRoute": {
        **OBJECT,
        "properties": {
            "parentRefs": {"type": "array", "maxItems": 32, "items": REFERENCE},
            "rules": {
                "type": "array",
                "items": {
                    **OBJECT,
                    "properties": {
                        "backendRefs": {"type": "array", "items": REFERENCE},
                        "timeouts": {
                            **OBJECT,
                            "properties": {"request": {"type": "string", "pattern": r"^(\d{1,5}(h|m|s|ms)){1,4}$"}},
                        },
                    },
                },
            },
        },
    },
    "monitoring.coreos.com/v1 ServiceMonitor": {
        **OBJECT,
        "required": ["selector", "endpoints"],
        "properties": {
            "jobLabel": {"type": "string"},
            "selector": SELECTOR,
            "endpoints": {
                "type": "array",
                "items": {
                    **OBJECT,
                    "properties": {
                        "port": {"type": "string"},
                        "path": {"type": "string"},
                        "interval": {"type": "string"},
                    },
                },
            },
        },
    },
}


def objects(name: str) -> dict[str, dict[str, Any]]:
    found = helm()["sets"][name]
    assert isinstance(found, dict), found
    return manifests(found)


def only(name: str, kind: str) -> dict[str, Any]:
    return objects(name)[f"{kind}/chat-penstock"]


def pod(name: str) -> dict[str, Any]:
    found: dict[str, Any] = only(name, "Deployment")["spec"]["template"]["spec"]
    return found


def container(name: str) -> dict[str, Any]:
    found: dict[str, Any] = pod(name)["containers"][0]
    return found


def config(name: str) -> Config:
    return parsed(container(name)["args"])


def test_helm_finds_nothing_wrong() -> None:
    lint = helm()["lint"]
    assert lint["errors"] == []
    assert [message["error"] for message in lint["messages"]] == ["icon is recommended"]


@pytest.mark.parametrize("version", ["1.30", "1.37"])
@pytest.mark.parametrize("name", SETS)
def test_objects_are_what_kubernetes_takes(name: str, version: str) -> None:
    """Of the oldest version that the chart allows and a newer one, without a field that it does not know."""
    assert yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"] == ">=1.30.0-0"
    for found in objects(name).values():
        kind = f"{found['apiVersion']} {found['kind']}"
        if kind in FOREIGN:
            assert set(found) == {"apiVersion", "kind", "metadata", "spec"}
            jsonschema.validate(found["spec"], FOREIGN[kind])
        else:
            kubernetes_validate.validate(found, version, strict=True)


def test_each_form_has_its_objects() -> None:
    kinds = {name: sorted({key.split("/")[0] for key in objects(name)}) for name in SETS}
    usual = ["Deployment", "NetworkPolicy", "PersistentVolumeClaim", "PodDisruptionBudget", "Service", "ServiceAccount"]
    assert kinds["one GPU"] == kinds["several GPUs"] == kinds["adapters"] == usual
    assert kinds["embeddings"] == [kind for kind in usual if kind != "PersistentVolumeClaim"], "it has a claim already"
    assert kinds["a CPU"] == ["Deployment", "Service"]
    assert kinds["everything"] == sorted(
        [*usual, "HTTPRoute", "HorizontalPodAutoscaler", "InferencePool", "ServiceMonitor"]
    )


@pytest.mark.parametrize("name", SETS)
def test_the_command_is_one_that_the_product_takes(name: str) -> None:
    found, ports = config(name), {port["name"]: port["containerPort"] for port in container(name)["ports"]}
    assert (found.api.host, ports) == ("0.0.0.0", {"http": found.api.port, "metrics": found.api.metrics_port})
    assert found.api.admin_address in ("", "unix:/run/penstock/operator.sock"), "no port of the operator's"
    assert found.model.model == SETS[name].get("model", "")
    mounts = {mount["mountPath"]: mount["name"] for mount in container(name)["volumeMounts"]}
    assert mounts["/run/penstock"] == "run", (
        "the run directory is a folder of a volume, so the product gives it its mode"
    )
    assert found.run.run_dir == "/run/penstock/server"
    assert len(mounts) == len(pod(name)["volumes"])
    assert set(mounts.values()) == {volume["name"] for volume in pod(name)["volumes"]}


def test_gpus_are_divided_over_replicas_stages_and_ranks() -> None:
    model = config("several GPUs").model
    assert (model.data_parallel_size, model.pipeline_parallel_size, model.tensor_parallel_size) == (2, 2, 2)
    for name, gpus in (("one GPU", "1"), ("several GPUs", "8")):
        resources = container(name)["resources"]
        assert resources == {
            "requests": {**DEFAULTS["resources"]["requests"], "nvidia.com/gpu": gpus},
            "limits": {**DEFAULTS["resources"]["limits"], "nvidia.com/gpu": gpus},
        }
        assert pod(name)["tolerations"] == DEFAULTS["tolerations"]
    assert "nvidia.com/gpu" not in str(pod("a CPU"))
    assert config("a CPU").executor.device == "cpu"


def test_adapters_and_names_are_told() -> None:
    found = config("adapters")
    assert (found.model.enable_lora, found.model.max_loras, found.model.max_lora_rank) == (True, 4, 16)
    assert [(one.name, one.path) for one in read_modules(found.api.lora_modules)] == [
        ("law", "/models/law"),
        ("sql", "/models/sql"),
    ]
    assert found.api.lora_dir == "/models/adapters"
    assert config("embeddings").model.max_model_len == 8192
    words = container("embeddings")["args"]
    assert words[words.index("--served-model-name") + 1 :][:2] == ["embed", "e5"]


@pytest.mark.parametrize("name", SETS)
def test_probes_ask_what_answers_without_a_key(name: str) -> None:
    found = container(name)
    probes = {kind: found[f"{kind}Probe"] for kind in ("liveness", "readiness", "startup")}
    assert {kind: probe["httpGet"]["path"] for kind, probe in probes.items()} == {
        "liveness": "/health/live",
        "readiness": "/health/ready",
        "startup": "/health/ready",
    }
    for probe in probes.values():
        assert probe["httpGet"]["port"] == "http"
        assert [route.access for route in ROUTES if route.path == probe["httpGet"]["path"]] == [Access.PROBE]
    assert probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"] == DEFAULTS["startupSeconds"]


def test_a_pod_has_the_time_that_it_drains() -> None:
    assert container("one GPU")["lifecycle"] == {"preStop": {"sleep": {"seconds": DEFAULTS["preStopSeconds"]}}}
    end = pod("one GPU")["terminationGracePeriodSeconds"]
    assert end == DEFAULTS["preStopSeconds"] + config("one GPU").run.drain_timeout + 10


@pytest.mark.parametrize("name", SETS)
def test_a_pod_is_closed_in(name: str) -> None:
    found = pod(name)
    assert container(name)["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    dockerfile = (ROOT / "deploy" / "container" / "Dockerfile").read_text()
    user, group = re.search(r"useradd --uid (\d+)", dockerfile), re.search(r"groupadd --gid (\d+)", dockerfile)
    assert user
    assert group
    context = found["securityContext"]
    assert (context["runAsNonRoot"], context["seccompProfile"]) == (True, {"type": "RuntimeDefault"})
    assert context["runAsUser"] == int(user[1])
    assert context["runAsGroup"] == context["fsGroup"] == int(group[1])
    assert found["automountServiceAccountToken"] is False
    writable = {mount["mountPath"] for mount in container(name)["volumeMounts"] if not mount.get("readOnly")}
    assert {"/var/cache/penstock", "/run/penstock", "/tmp", "/dev/shm"} <= writable


def test_keys_stay_in_their_secrets() -> None:
    args = container("everything")["args"]
    place = Path(args[args.index("--api-key-file") + 1])
    (mount,) = [mount for mount in container("everything")["volumeMounts"] if mount["mountPath"] == str(place.parent)]
    (volume,) = [volume for volume in pod("everything")["volumes"] if volume["name"] == mount["name"]]
    assert volume["secret"]["items"] == [{"key": "api-keys", "path": place.name}]
    (token,) = [one for one in container("everything")["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": "token"}
    assert "Secret" not in {key.split("/")[0] for key in objects("everything")}


@pytest.mark.parametrize("name", SETS)
def test_objects_mean_one_another(name: str) -> None:
    found, labels = objects(name), only(name, "Deployment")["spec"]["template"]["metadata"]["labels"]
    selector = only(name, "Deployment")["spec"]["selector"]["matchLabels"]
    assert selector.items() <= labels.items()
    assert [port["targetPort"] for port in only(name, "Service")["spec"]["ports"]] == ["http"], "and no other port"
    for key, one in found.items():
        spec = one.get("spec", {})
        match key.split("/")[0]:
            case "Service":
                assert spec["selector"] == selector
            case "PodDisruptionBudget" | "InferencePool":
                assert spec["selector"]["matchLabels"] == selector
            case "NetworkPolicy":
                assert spec["podSelector"]["matchLabels"] == selector
            case "ServiceMonitor":
                wanted = spec["selector"]["matchLabels"].items()
                (service,) = [
                    each
                    for each in found.values()
                    if each["kind"] == "Service" and wanted <= each["metadata"]["labels"].items()
                ]
                assert {end["port"] for end in spec["endpoints"]} == {port["name"] for port in service["spec"]["ports"]}
            case "HorizontalPodAutoscaler":
                assert spec["scaleTargetRef"] == {
                    "apiVersion": "apps/v1",
                    "kind": "Deployment",
                    "name": "chat-penstock",
                }
                assert "replicas" not in only(name, "Deployment")["spec"], "or each upgrade would undo what it decided"
    claims = [volume["persistentVolumeClaim"]["claimName"] for volume in pod(name)["volumes"]
              if volume["name"] == "cache" and "persistentVolumeClaim" in volume]  # fmt: skip
    made = [one["metadata"]["name"] for one in found.values() if one["kind"] == "PersistentVolumeClaim"]
    assert claims == (["hub"] if name == "embeddings" else made)
    account = pod(name)["serviceAccountName"]
    assert account == "default" if name == "a CPU" else f"ServiceAccount/{account}" in found


def test_metrics_are_for_the_cluster_and_the_api_is_for_those_who_are_named() -> None:
    rules = {rule["ports"][0]["port"]: rule.get("from") for rule in only("one GPU", "NetworkPolicy")["spec"]["ingress"]}
    assert rules == {"http": None, "metrics": [{"namespaceSelector": {}}]}
    rules = {rule["ports"][0]["port"]: rule["from"] for rule in only("everything", "NetworkPolicy")["spec"]["ingress"]}
    assert rules["http"] == SETS["everything"]["networkPolicy"]["clients"]
    annotations = only("one GPU", "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/port"] == str(config("one GPU").api.metrics_port)
    once = only("everything", "Deployment")["spec"]["template"]["metadata"]["annotations"]
    assert "prometheus.io/scrape" not in once, "the monitor asks already"


def test_the_autoscaler_asks_for_metrics_that_there_are() -> None:
    adapter = yaml.safe_load((ROOT / "deploy" / "prometheus" / "adapter.yaml").read_text())["rules"]["custom"]
    given = [re.match(r"\w+", rule["seriesQuery"])[0] for rule in adapter]  # type: ignore[index]
    asked = [one["pods"]["metric"]["name"] for one in only("everything", "HorizontalPodAutoscaler")["spec"]["metrics"]]
    assert asked == given
    assert {METRICS[name.removeprefix("penstock_")].kind for name in asked} == {Kind.GAUGE}


def test_a_pool_has_the_names_that_its_picker_reads() -> None:
    assert config("everything").api.metrics_alias == "vllm"
    assert config("one GPU").api.metrics_alias == "none"
    pool = only("everything", "InferencePool")["spec"]
    assert pool["targetPorts"] == [{"number": config("everything").api.port}]
    (backend,) = only("everything", "HTTPRoute")["spec"]["rules"][0]["backendRefs"]
    assert (backend["kind"], backend["name"]) == ("InferencePool", "chat-penstock")


def test_what_cannot_be_is_refused_with_a_sentence() -> None:
    for (values, said), found in zip(REFUSED, helm()["refused"], strict=True):
        assert isinstance(found, str), values
        assert re.search(said, found), found


@pytest.mark.parametrize("path", PATHS, ids=".".join)
def test_every_value_matters(path: tuple[str, ...]) -> None:
    """Another value makes other objects, so each is used and in the schema, which knows no others."""
    before, after = helm()["changes"][path]
    assert isinstance(before, dict), before
    assert isinstance(after, dict), after
    assert manifests(before) != manifests(after)


def test_names_are_short_enough_and_say_things_once() -> None:
    (found,) = run_helm([{}], "penstock")["rendered"]
    assert "Deployment/penstock" in manifests(found)
    (found,) = run_helm([SETS["everything"]], "a" * 53)["rendered"]
    names = [key.split("/")[1] for key in manifests(found)]
    assert max(map(len, names)) <= 63
    assert not any(name.endswith("-") for name in names)


def test_the_chart_is_of_this_release() -> None:
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert about["version"] == about["appVersion"] == VERSION


def test_the_page_sets_values_that_there_are() -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    named = re.findall(r"([\w.]+)(?:\[0\]\.\w+)?=[^,\s]+", " ".join(re.findall(r"--set '?(\S+)", page)))
    assert len(named) == 7
    assert set(named) <= {".".join(path) for path in PATHS}


def test_the_image_is_a_tag_or_a_digest() -> None:
    assert container("one GPU")["image"] == "penstock:cuda"
    assert container("everything")["image"] == "registry.example/penstock@sha256:" + "0" * 64
