"""The forms for two models: what units and programs run, and supervisord's programs run for real."""

from __future__ import annotations

import configparser
import json
import shlex
import urllib.request
from pathlib import Path

import pytest

from penstock.protocol.links import Role
from penstock.protocol.served_models import names
from penstock.services import cli
from penstock.services.supervisor import options
from tests.deploy.supervised import LIMIT, supervised
from tests.deploy.test_systemd import DEPLOY, read

MODELS = DEPLOY / "models"
DROP_INS = tuple(sorted(MODELS.glob("*.service.d/models.conf")))
TOML = """
[api]
port = 0
[executor]
device = "cpu"
[models.chat]
gpu_memory_utilization = 0.7
[models.embed]
gpu_memory_utilization = 0.2
"""


def effective(command: str) -> tuple[str, options.Effective]:
    """The role that a command starts, and its options with the form's file."""
    _, role, *words = shlex.split(command)
    words = [str(MODELS / "penstock.toml") if word.endswith((".toml", "_CONFIG)s")) else word for word in words]
    return role, options.effective(options.parse(cli.parser_of(role), words), {})


def programs() -> dict[str, str]:
    found = configparser.RawConfigParser(inline_comment_prefixes=(" ;",))
    found.read(MODELS / "supervisord.conf")
    return {
        name.removeprefix("program:"): found[name]["command"].replace("%(process_num)d", "0")
        for name in found.sections()
        if name.startswith("program:")
    }


def test_each_model_has_its_programs_and_the_api_is_for_all() -> None:
    words = ["--config", str(MODELS / "penstock.toml")]
    models = names(options.effective(options.parse(cli.parser_of("config"), words), {}).config)
    started = set()
    for command in programs().values():
        role, found = effective(command)
        started.add((role, found.config.run.for_model))
    engine = {role.value for role in Role} - {"api"}
    assert started == {("api", "")} | {(role, model) for role in engine for model in models}


@pytest.mark.parametrize("path", DROP_INS, ids=lambda path: path.parent.name)
def test_a_drop_in_makes_the_instance_a_models(path: Path) -> None:
    unit = path.parent.name.removesuffix(".d")
    assert (DEPLOY / "systemd" / unit).is_file()
    reset, command = read(path)["Service"]["ExecStart"]
    assert reset == ""
    role, found = effective(command.replace("%i", "chat"))
    assert unit == f"penstock-{role}@.service"
    assert found.config.run.for_model == "chat"


@pytest.mark.long
def test_the_programs_serve_both_models(tmp_path: Path) -> None:
    pytest.importorskip("supervisor")
    with supervised(tmp_path, conf=MODELS / "supervisord.conf", toml=TOML, roles=("api",)) as server:
        server.until_url()
        for model in ("chat", "embed"):
            body = json.dumps({"model": model, "prompt": "The water", "max_tokens": 2}).encode()
            request = urllib.request.Request(server.url + "/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=LIMIT) as answer:
                assert json.load(answer)["model"] == model
        server.until(lambda found: [each["state"] for each in found["models"]] == ["loaded", "loaded"])
        server.control("shutdown")
        server.process.wait(LIMIT)
