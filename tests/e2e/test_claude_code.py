"""Claude Code, the real program, against a server: a loop of tools from its own prompt to its own answer, and what it
does about lengths. `pytest -m long tests/e2e/test_claude_code.py`; skipped where npm cannot install it.

The model is tiny and random (agents.py), so a proxy says what is called: it forces each turn's tool by `tool_choice`
and gives the tool's schema the one value that the turn needs. Everything else goes through as the program sent it.
With PENSTOCK_TRANSCRIPTS=FOLDER the loop's transcript is written there (benchmarks/results/claude_code.txt).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.agents import Exchange, Proxy, heading, node_package, proxy, roomy_model
from tests.e2e.server import serving

pytestmark = pytest.mark.long
PACKAGE = "@anthropic-ai/claude-code@^2"
MODEL = "roomy"
ASKED = "Write hello.py so that it prints six times seven, run it, and tell me what it printed."
PROGRAM = "print(6 * 7)\n"
ANSWER = "It printed 42."
LIMIT = 400.0  # seconds


def steps(folder: Path) -> list[tuple[str, dict[str, Any]]]:
    """The calls of the loop, in order."""
    file = str(folder / "hello.py")
    return [
        ("Write", {"file_path": file, "content": PROGRAM}),
        ("Bash", {"command": "python3 hello.py", "description": "Run the program"}),
        ("Read", {"file_path": file}),
    ]


def directed(calls: list[tuple[str, dict[str, Any]]]) -> Any:
    """A rewriting of requests that has the model make these calls, one a turn, and then answer."""

    def rewrite(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not path.startswith("/v1/messages"):
            return body
        body = {**body, "thinking": {"type": "disabled"}}
        blocks = [block for message in body["messages"] if isinstance(message["content"], list)
                  for block in message["content"]]  # fmt: skip
        done = sum(block["type"] == "tool_result" for block in blocks)
        if not body.get("tools") or done >= len(calls):
            form = {"type": "json_schema", "schema": {"const": ANSWER}}
            choice = {"tool_choice": {"type": "none"}} if body.get("tools") else {}
            return {**body, **choice, "output_config": {"format": form}}
        wanted = dict(calls)
        tools = [
            tool | ({"strict": True, "input_schema": const(wanted[tool["name"]])} if tool["name"] in wanted else {})
            for tool in body["tools"]
        ]
        return {**body, "tools": tools, "tool_choice": {"type": "tool", "name": calls[done][0]}}

    return rewrite


def const(arguments: dict[str, Any]) -> dict[str, Any]:
    """The schema that nothing but these arguments follows."""
    properties = {name: {"const": value} for name, value in arguments.items()}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def claude(between: Proxy, folder: Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """What the program says at its end, and its version."""
    wrapper = node_package(PACKAGE) / "node_modules" / "@anthropic-ai" / "claude-code" / "cli-wrapper.cjs"
    program = ["node", str(wrapper)]  # the native program takes its place only where npm may run install scripts
    home, work = folder / "home", folder / "work"
    home.mkdir(exist_ok=True)
    work.mkdir(exist_ok=True)
    environment = {
        "PATH": os.environ["PATH"], "HOME": str(home), "ANTHROPIC_BASE_URL": between.url, "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL, "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL, "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_TELEMETRY": "1", "DISABLE_AUTOUPDATER": "1",
        "DISABLE_ERROR_REPORTING": "1", "API_TIMEOUT_MS": str(int(LIMIT * 1000)),
    }  # fmt: skip
    version = subprocess.run([*program, "--version"], env=environment, capture_output=True, text=True, timeout=60)
    if version.returncode:
        pytest.skip(f"Claude Code does not start: {(version.stderr or version.stdout)[-300:]}")
    command = [*program, "-p", ASKED, "--output-format", "json", "--allowedTools", "Write,Bash,Read", *arguments]
    done = subprocess.run(
        command, cwd=work, env=environment, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL
    )
    assert done.stdout, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return told, version.stdout.strip()


def turns(between: Proxy) -> list[Exchange]:
    """The requests of the agent itself."""
    return [seen for seen in between.exchanges if seen.path.startswith("/v1/messages?") or seen.path == "/v1/messages"]


def test_a_loop_of_tools(tmp_path: Path) -> None:
    calls = steps(tmp_path / "work")
    model = roomy_model(tmp_path)
    with serving(tmp_path, model=str(model)) as server, proxy(server.url, directed(calls)) as between:
        told, version = claude(between, tmp_path)
    assert not told["is_error"], told
    assert told["result"] == json.dumps(ANSWER)
    assert (tmp_path / "work" / "hello.py").read_text() == PROGRAM
    seen = [turn for turn in turns(between) if turn.asked.get("tools")]
    assert [turn.status for turn in seen] == [200] * len(seen)
    assert len(seen) == len(calls) + 1
    assert all(turn.asked["context_management"]["edits"][0]["type"].startswith("clear_thinking") for turn in seen)
    results = [block for message in seen[-1].asked["messages"] if isinstance(message["content"], list)
               for block in message["content"] if block["type"] == "tool_result"]  # fmt: skip
    assert len(results) == len(calls)
    assert not any(result.get("is_error") for result in results)
    assert "42" in json.dumps(results[1]["content"])
    assert "print(6 * 7)" in json.dumps(results[2]["content"])
    keep(transcript(version, seen, told))


def test_it_asks_for_less_where_its_output_does_not_fit(tmp_path: Path) -> None:
    model = roomy_model(tmp_path)
    arguments = ("--clamp-max-tokens", "none", "--max-model-len", "49152")
    calls = steps(tmp_path / "work")[:1]
    with serving(tmp_path, *arguments, model=str(model)) as server, proxy(server.url, directed(calls)) as between:
        told, _ = claude(between, tmp_path)
    assert not told["is_error"], told
    first, second, *_ = turns(between)
    assert (first.status, second.status) == (400, 200)
    assert b"exceed context limit" in first.response
    assert second.asked["max_tokens"] < first.asked["max_tokens"]


def test_it_says_that_a_prompt_is_too_long(tmp_path: Path) -> None:
    with serving(tmp_path, "--served-model-name", MODEL) as server, proxy(server.url) as between:
        told, _ = claude(between, tmp_path)
    assert told["is_error"]
    assert "too long" in told["result"]
    assert b"prompt is too long: " in turns(between)[0].response


def transcript(version: str, seen: list[Exchange], told: dict[str, Any]) -> str:
    """What was said, a line each: results are shortened, and the prompt is told by its size."""
    first = seen[0].asked
    lines = [
        *heading(version),
        f"asked: {ASKED}",
        f"prompt: {len(seen[0].body)} bytes, tools: {', '.join(tool['name'] for tool in first['tools'])}",
        f"beside it: {', '.join(sorted(set(first) - {'messages', 'system', 'tools'}))}",
        f"headers: anthropic-beta: {seen[0].headers.get('anthropic-beta')}",
        "",
    ]
    for message in seen[-1].asked["messages"][1:]:
        for block in message["content"] if isinstance(message["content"], list) else []:
            kind = block["type"]
            said = block.get("input") or block.get("content") or block.get("text") or ""
            lines.append(f"{message['role']}: {kind} {block.get('name', '')} {json.dumps(said)[:200]}")
    lines += [f"assistant: {told['result']}", ""]
    for number, turn in enumerate(seen, 1):
        lines.append(f"turn {number}: {turn.status}, {turn.response.count(b'event: ')} events, {usage_of(turn)}")
    return "\n".join(lines) + "\n"


def usage_of(turn: Exchange) -> str:
    """Of a streamed message, from its last `usage`."""
    usage = json.loads(turn.response.split(b"event: message_delta\ndata: ")[-1].split(b"\n")[0])["usage"]
    cached = usage["cache_read_input_tokens"]
    return f"prompt {usage['input_tokens']} + {cached} cached, output {usage['output_tokens']}"


def keep(text: str) -> None:
    folder = os.environ.get("PENSTOCK_TRANSCRIPTS")
    if folder:
        (Path(folder) / "claude_code.txt").write_text(text)
