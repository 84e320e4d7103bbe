"""The Helm chart as Helm's own engine renders it, offline, for several sets of values.

helm-python-sdk has that engine as a library. It runs in a process of its own, since a Go runtime takes the signals of
the process that loads it, and makes threads there.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy" / "helm" / "penstock"
LIMIT = 120.0
PROGRAM = """
import json, sys
import helm_python
folder, name, sets = sys.argv[1], sys.argv[2], json.load(sys.stdin)
found = {"lint": helm_python.lint(folder, strict=True), "rendered": []}
with helm_python.Chart.load(folder) as chart:
    for values in sets:
        try:
            chart.validate_schema(values)
            found["rendered"].append(chart.render(values, name=name, namespace="serving"))
        except helm_python.HelmError as error:
            found["rendered"].append(str(error))
json.dump(found, sys.stdout)
"""
Values = Mapping[str, Any]

DEFAULTS: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SHARED = {"cache": {"accessModes": ["ReadWriteMany"]}}
SETS: dict[str, dict[str, Any]] = {
    "one GPU": {},
    "several GPUs": {
        "model": "/models/llama",
        "gpus": 8,
        "dataParallelSize": 2,
        "pipelineParallelSize": 2,
        "modelVolume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
    },
    "adapters": {
        "model": "Qwen/Qwen3-8B",
        "operatorSocket": True,
        "hubToken": {"secretName": "hub"},
        "lora": {
            "enabled": True,
            "modules": {"sql": "/models/sql", "law": "/models/law"},
            "maxLoras": 4,
            "directory": "/models/adapters",
        },
    },
    "embeddings": {
        "model": "Qwen/Qwen3-Embedding-0.6B",
        "servedModelNames": ["embed", "e5"],
        "args": ["--max-model-len", "8192", "--pooler", "last"],
        "cache": {"existingClaim": "hub"},
        "replicas": 3,
    },
    "a CPU": {
        "gpus": 0,
        "cache": {"size": ""},
        "networkPolicy": {"enabled": False},
        "replicas": 2,
        "podDisruptionBudget": {"enabled": False},
        "serviceAccount": {"create": False},
        "topologySpread": {"key": ""},
        "service": {"affinitySeconds": 0},
    },
    "everything": {
        "model": "meta-llama/Llama-3.1-8B-Instruct",
        "autoscaling": {"enabled": True},
        "cache": {"accessModes": ["ReadWriteMany"]},
        "image": {"repository": "registry.example/penstock", "tag": "sha256:" + "0" * 64},
        "imagePullSecrets": ["registry"],
        "apiKeys": {"secretName": "clients"},
        "hubToken": {"secretName": "hub"},
        "operatorSocket": True,
        "lora": {"enabled": True, "directory": "/models/adapters"},
        "modelVolume": {"hostPath": {"path": "/srv/models"}},
        "extraVolumes": [{"name": "more", "emptyDir": {}}],
        "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
        "env": [{"name": "HF_HUB_OFFLINE", "value": "1"}],
        "metrics": {"serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}}},
        "inferencePool": {"enabled": True, "endpointPicker": {"name": "picker"}, "gateways": [{"name": "inference"}]},
        "networkPolicy": {"clients": [{"podSelector": {"matchLabels": {"app": "front"}}}]},
        "priorityClassName": "serving",
        "runtimeClassName": "nvidia",
        "nodeSelector": {"gpu": "h200"},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "nlp"},
        "service": {"annotations": {"a": "b"}},
        "serviceAccount": {"annotations": {"a": "b"}},
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": "gpu", "operator": "In", "values": ["h200"]}]}]
                }
            }
        },
    },
}
REFUSED: tuple[tuple[Values, str], ...] = (
    (
        {"gpus": 3, "dataParallelSize": 2},
        r"gpus: 3 cannot be divided over dataParallelSize × pipelineParallelSize \(2\)",
    ),
    ({"replicas": 2}, r"cache: 2 pods cannot share a claim with accessModes \[ReadWriteOnce\]; take ReadWriteMany"),
    ({"autoscaling": {"enabled": True}}, "cache: 4 pods cannot share"),
    ({"inferencePool": {"enabled": True}}, "the endpoint picker's Service"),
    ({"gpu": 1}, "additional properties 'gpu' not allowed"),
    ({"replicas": "2"}, "got string, want integer"),
    ({"service": {"port": 0}}, "minimum: got 0, want 1"),
)


def run_helm(sets: Sequence[Values], name: str) -> dict[str, Any]:
    """`lint`, and in `rendered` for each set of values the files by their names, or an error."""
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(CHART), name],
        input=json.dumps(sets), capture_output=True, text=True, check=True, timeout=LIMIT,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def manifests(files: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The objects of a rendered chart by kind and name."""
    found = [
        document
        for file, text in files.items()
        if not file.endswith("NOTES.txt")
        for document in yaml.safe_load_all(text)
        if document
    ]
    named = {f"{document['kind']}/{document['metadata']['name']}": document for document in found}
    assert len(named) == len(found)
    return named


def leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every value of the chart's own, by its path. What is handed on as it is (resources, strategy) counts as one."""
    for key, value in values.items():
        if isinstance(value, dict) and value and (key,) not in (("resources",), ("strategy",)):
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


OTHERS: Mapping[str, Any] = {  # another value of those whose kind does not give one
    "image.pullPolicy": "Always",
    "image.tag": "cpu",
    "cache.accessModes": ["ReadWriteMany", "ReadWriteOnce"],
    "service.type": "NodePort",
    "inferencePool.failureMode": "FailClose",
    "topologySpread.whenUnsatisfiable": "DoNotSchedule",
    "metrics.serviceMonitor.interval": "5s",
    "cache.size": "1Gi",
    "sharedMemory": "2Gi",
    "autoscaling.waitingRequests": "3",
    "autoscaling.kvUsedRatio": "0.5",
    "podDisruptionBudget.maxUnavailable": "25%",
    "strategy": {"maxSurge": 1, "maxUnavailable": 0},
    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "1Gi"}},
    "imagePullSecrets": ["other"],
    "servedModelNames": ["other"],
    "args": ["--no-tune"],
    "gpus": 4,
    "dataParallelSize": 1,
    "pipelineParallelSize": 1,
    "modelVolume": {"emptyDir": {}},
    "affinity": {"podAffinity": {}},
}
# A base in which each of these matters; the rest does with "everything".
BASES: Mapping[str, Values] = {
    "replicas": SHARED,
    "metrics.vllmNames": {},
    "lora.modules": {"lora": {"enabled": True}},
    "cache.size": {},
    "cache.accessModes": SHARED,
    "cache.storageClass": {},
    "dataParallelSize": {"gpus": 2, "dataParallelSize": 2},
    "pipelineParallelSize": {"gpus": 2, "pipelineParallelSize": 2},
}


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`second` over `first`, as Helm lays values over one another."""
    found = dict(copy.deepcopy(first))
    for key, value in second.items():
        both = isinstance(value, Mapping) and isinstance(found.get(key), Mapping)
        found[key] = merged(found[key], value) if both else value
    return found


def changed(path: tuple[str, ...], base: Values) -> dict[str, Any]:
    """The base with another value at a path."""
    value: Any = merged(DEFAULTS, base)
    for key in path:
        value = value[key]
    if ".".join(path) in OTHERS:
        value = OTHERS[".".join(path)]
    elif isinstance(value, bool):
        value = not value
    elif isinstance(value, int):
        value += 1
    elif isinstance(value, str):
        value = "other"
    elif isinstance(value, dict):
        value = {"other": "value"}
    else:
        value = [{"name": "other", "mountPath": "/other"}]
    found: dict[str, Any] = {path[-1]: value}
    for key in reversed(path[:-1]):
        found = {key: found}
    return merged(base, found)


PATHS = [path for path, _ in leaves(DEFAULTS)]


@functools.cache
def helm() -> dict[str, Any]:
    """One run of Helm for all tests: every set, what is refused, and every value changed beside its base."""
    pairs = [(BASES.get(".".join(path), SETS["everything"]), path) for path in PATHS]
    both = [values for base, path in pairs for values in (base, changed(path, base))]
    found = run_helm([*SETS.values(), *(values for values, _ in REFUSED), *both], "chat")
    rendered = found["rendered"]
    ends = len(SETS), len(SETS) + len(REFUSED)
    return {
        "lint": found["lint"],
        "sets": dict(zip(SETS, rendered[: ends[0]], strict=True)),
        "refused": rendered[ends[0] : ends[1]],
        "changes": dict(zip(PATHS, zip(rendered[ends[1] :: 2], rendered[ends[1] + 1 :: 2], strict=True), strict=True)),
    }
