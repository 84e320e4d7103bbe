"""Codex, the real program, against a server: a loop of tools from its own prompt to its own answer.
`pytest -m long tests/e2e/test_codex.py`; skipped where npm cannot install it.

The model is tiny and random (agents.py), so a proxy says what is called: it forces each turn's tool by `tool_choice`
and gives the tool's schema or grammar the one value that the turn needs. Everything else goes through as the program
sent it. With PENSTOCK_TRANSCRIPTS=FOLDER the loops' transcript is written there (benchmarks/results/codex.txt).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.agents import CONTEXT, Exchange, Proxy, heading, node_package, proxy, roomy_model
from tests.e2e.server import serving

pytestmark = pytest.mark.long
PACKAGE = "@openai/codex"
ASKED = "Write hello.py so that it prints six times seven, run it, and tell me what it printed."
ANSWER = "It printed 42."
PATCH = "*** Begin Patch\n*** Add File: hello.py\n+print(6 * 7)\n*** End Patch"
SCRIPT = 'const ran = await tools.exec_command({cmd: "python3 hello.py"});\ntext(ran);\n'
LIMIT = 400.0  # seconds
Wanted = tuple[str, str | None, dict[str, Any] | str]  # a tool, its namespace, its arguments or its input

WRITE: Wanted = ("exec_command", None, {"cmd": "echo 'print(6 * 7)' > hello.py && python3 hello.py"})
CLOSE: Wanted = ("close_agent", "multi_agent_v1", {"target": "01a204cc-d266-7932-811a-34cd6c084e46"})
EXEC: Wanted = ("exec", None, SCRIPT)
APPLY: Wanted = ("apply_patch", None, PATCH)
RUN: Wanted = ("exec_command", None, {"cmd": "python3 hello.py"})


def directed(calls: list[Wanted]) -> Any:
    """A rewriting of requests that has the model make these calls, one a turn, and then answer."""

    def rewrite(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path != "/v1/responses":
            return body
        done = sum(item.get("type", "").endswith("_output") for item in body["input"])
        if done >= len(calls):
            form = {"type": "json_schema", "name": "answer", "strict": True, "schema": {"const": ANSWER}}
            return {**body, "tool_choice": "none", "text": {"format": form}}
        name, space, value = calls[done]
        tools = [bound(tool, name, space, value) for tool in body["tools"]]
        kind = "custom" if isinstance(value, str) else "function"
        choice = {"type": kind, "name": name} | ({"namespace": space} if space else {})
        return {**body, "tools": tools, "tool_choice": choice}

    return rewrite


def bound(tool: dict[str, Any], name: str, space: str | None, value: dict[str, Any] | str) -> dict[str, Any]:
    """The tool, which takes nothing but the value if it is the one that is named."""
    if tool["type"] == "namespace" and tool["name"] == space:
        return {**tool, "tools": [bound(inner, name, None, value) for inner in tool["tools"]]}
    if tool.get("name") != name or space is not None:
        return tool
    if isinstance(value, str):
        return {**tool, "format": {"type": "grammar", "syntax": "regex", "definition": re.escape(value)}}
    properties = {key: {"const": one} for key, one in value.items()}
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {**tool, "strict": True, "parameters": schema}


def codex(between: Proxy, folder: Path, model: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """The events that the program tells, and its version."""
    program = str(node_package(PACKAGE) / "node_modules" / ".bin" / "codex")
    home, work = folder / "home", folder / "work"
    home.mkdir()
    work.mkdir()
    (home / "config.toml").write_text(f"""
model = "{model}"
model_provider = "penstock"
model_context_window = {CONTEXT}
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[model_providers.penstock]
name = "Penstock"
base_url = "{between.url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
stream_idle_timeout_ms = {int(LIMIT * 1000)}
[analytics]
enabled = false
[feedback]
enabled = false
[otel]
exporter = "none"
""")
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), "CODEX_HOME": str(home)}
    version = subprocess.run([program, "--version"], env=environment, capture_output=True, text=True, timeout=60)
    if version.returncode:
        pytest.skip(f"Codex does not start: {(version.stderr or version.stdout)[-300:]}")
    command = [program, "exec", "--json", "--skip-git-repo-check", *arguments, ASKED]
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")], version.stdout.strip()


def looped(
    tmp_path: Path, calls: list[Wanted], model: str, *arguments: str
) -> tuple[list[Exchange], list[dict[str, Any]], str]:
    """The turns of a loop that makes these calls, the items that came of it, and the program's version."""
    folder = roomy_model(tmp_path)
    named = ("--served-model-name", model)
    with serving(tmp_path, *named, model=str(folder)) as server, proxy(server.url, directed(calls)) as between:
        told, version = codex(between, tmp_path, model, *arguments)
    seen = [turn for turn in between.exchanges if turn.path == "/v1/responses"]
    assert [turn.status for turn in seen] == [200] * (len(calls) + 1), seen[-1].response[:1000]
    answers = [event["item"]["text"] for event in told if event.get("item", {}).get("type") == "agent_message"]
    assert answers[-1] == json.dumps(ANSWER)
    return seen, seen[-1].asked["input"], version


def test_a_loop_of_functions_namespaces_and_scripts(tmp_path: Path) -> None:
    calls = [WRITE, CLOSE, EXEC]
    seen, items, version = looped(tmp_path, calls, "roomy", "--enable", "code_mode")
    assert {"function", "namespace", "web_search", "custom"} <= {tool["type"] for tool in seen[0].asked["tools"]}
    made = [item for item in items if item["type"] in ("function_call", "custom_tool_call")]
    assert [(item["name"], item.get("namespace")) for item in made] == [(name, space) for name, space, _ in calls]
    assert made[2]["input"] == SCRIPT
    results = [item for item in items if item["type"].endswith("_output")]
    assert [result["call_id"] for result in results] == [item["call_id"] for item in made]
    assert "42" in json.dumps(results[0]["output"])
    assert "42" in json.dumps(results[2]["output"])
    keep("codex.txt", transcript(version, seen, items))


def test_a_loop_with_a_patch_under_its_own_grammar(tmp_path: Path) -> None:
    seen, items, version = looped(tmp_path, [APPLY, RUN], "gpt-5.5")
    assert (tmp_path / "work" / "hello.py").read_text() == "print(6 * 7)\n"
    (patch,) = (tool for tool in seen[0].asked["tools"] if tool.get("name") == "apply_patch")
    assert patch["format"]["syntax"] == "lark"
    results = [item for item in items if item["type"].endswith("_output")]
    assert [result["type"] for result in results] == ["custom_tool_call_output", "function_call_output"]
    assert "42" in json.dumps(results[1]["output"])
    keep("codex_patch.txt", transcript(version, seen, items))


def transcript(version: str, seen: list[Exchange], items: list[dict[str, Any]]) -> str:
    """What was said, a line each: results are shortened, and the prompt is told by its size."""
    first = seen[0].asked
    tools = [f"{tool['type']} {tool.get('name', '')}".strip() for tool in first["tools"]]
    lines = [
        *heading(version),
        f"asked: {ASKED}",
        f"prompt: {len(seen[0].body)} bytes; tools: {', '.join(tools)}",
        f"beside it: {', '.join(sorted(set(first) - {'input', 'instructions', 'tools'}))}",
        "",
    ]
    for item in items:
        if item["type"] in ("function_call", "custom_tool_call"):
            name = ".".join(filter(None, (item.get("namespace"), item["name"])))
            lines.append(f"assistant: {item['type']} {name} {json.dumps(item.get('arguments') or item.get('input'))}")
        elif item["type"].endswith("_output"):
            lines.append(f"tool: {item['type']} {json.dumps(item['output'])[:300]}")
    lines += [f"assistant: {json.dumps(ANSWER)}", ""]
    for number, turn in enumerate(seen, 1):
        end = json.loads(turn.response.split(b"event: response.completed\ndata: ")[-1].split(b"\n")[0])["response"]
        usage, ignored = end["usage"], end.get("penstock", {}).get("ignored", ())
        cached = usage["input_tokens_details"]["cached_tokens"]
        told = f"prompt {usage['input_tokens']}, {cached} of them cached, output {usage['output_tokens']}"
        lines.append(f"turn {number}: {turn.status}, {turn.response.count(b'event: ')} events, {told}; {list(ignored)}")
    return "\n".join(lines) + "\n"


def keep(name: str, text: str) -> None:
    folder = os.environ.get("PENSTOCK_TRANSCRIPTS")
    if folder:
        (Path(folder) / name).write_text(text)
