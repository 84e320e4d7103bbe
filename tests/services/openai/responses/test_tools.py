"""Tools of a response as a chat's: namespaces flattened, tools of OpenAI's left out, choices, errors at their place."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from penstock.protocol.messages import CustomInput, SubmitText
from penstock.services.openai.responses.request import ResponseTool
from penstock.services.openai.responses.tools import ToolName, toolbox
from tests.services.client.fake_engine import FakeLink, answering, app_state, client, silent, words
from tests.services.openai.shapes import check_error

RESPONSES = "/v1/responses"
F: Any = {"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}
PATCH: Any = {"type": "custom", "name": "patch", "description": "Edits.",
              "format": {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}}  # fmt: skip
INSIDE: Any = [{"type": "function", "name": "spawn", "strict": True}, {"type": "custom", "name": "say"}]
SPACE: Any = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": INSIDE}
BUILT_IN = ("web_search", "web_search_preview", "web_search_2025_08_26", "web_search_preview_2025_03_11",
            "file_search", "code_interpreter", "image_generation", "local_shell", "shell", "apply_patch", "mcp",
            "computer", "computer_use_preview", "tool_search", "programmatic_tool_calling")  # fmt: skip


def read(*tools: Any) -> Any:
    found = msgspec.json.decode(msgspec.json.encode(tools), type=list[ResponseTool])
    return toolbox([(f"tools[{number}]", tool) for number, tool in enumerate(found)])


def test_namespaces_are_flattened() -> None:
    found = read(F, SPACE, PATCH)
    assert [tool["function"]["name"] for tool in found.template] == ["f", "agents__spawn", "agents__say", "patch"]
    assert found.names["agents__say"] == ToolName("custom", "say", "agents")
    assert found.names["f"] == ToolName("function", "f")
    fields = [function.field for function in found.functions]
    assert fields == ["tools[0]", "tools[1].tools[0]", "tools[1].tools[1]", "tools[2]"]
    assert found.functions[3].custom == CustomInput(name="patch", syntax="lark", definition="start: /a/")


@pytest.mark.parametrize("kind", BUILT_IN)
def test_tools_that_run_elsewhere_are_left_out_and_told(kind: str) -> None:
    found = read({"type": kind}, F)
    assert [tool["function"]["name"] for tool in found.template] == ["f"]
    assert len(found.shown) == 1
    assert found.ignored == (f"tools[0]: {kind} does not run here and was left out",)


async def asked(**body: Any) -> tuple[dict[str, Any], SubmitText]:
    port = FakeLink(answering(words("ok")))
    async with client(app_state(port)) as http:
        answer = await http.post(RESPONSES, json={"input": "hi", **body})
    assert answer.status_code == 200, answer.text
    (found,) = port.of(SubmitText)
    return answer.json(), found


async def test_the_model_is_shown_the_flat_names_and_the_client_its_own() -> None:
    answer, found = await asked(tools=[F, SPACE, PATCH, {"type": "web_search"}], tool_choice="auto")
    shown = [tool["function"]["name"] for tool in json.loads(found.tools or b"")]
    assert shown == ["f", "agents__spawn", "agents__say", "patch"]
    assert [tool["name"] for tool in answer["tools"]] == ["f", "agents", "patch"]
    assert answer["tools"][2]["format"] == PATCH["format"]
    assert "web_search" in answer["penstock"]["ignored"][0]
    assert found.tool_use is not None
    assert [custom.name for custom in found.tool_use.customs] == ["agents__say", "patch"]
    assert found.tool_use.strict == ("agents__spawn", "patch")


async def test_a_request_with_tools_of_elsewhere_alone_has_none() -> None:
    answer, found = await asked(tools=[{"type": "web_search"}], tool_choice="auto")
    assert (found.tools, found.tool_use, answer["tools"]) == (None, None, [])


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "function", "name": "spawn", "namespace": "agents"}, ("agents__spawn",)),
        ({"type": "custom", "name": "patch"}, ("patch",)),
        ({"type": "allowed_tools", "mode": "auto", "tools": [
            {"type": "namespace", "name": "agents"}, {"type": "web_search"}, {"type": "function", "name": "f"}]},
         ("agents__spawn", "agents__say", "f")),
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "custom", "name": "say", "namespace": "agents"}]},
         ("agents__say",)),
    ],
)  # fmt: skip
async def test_choices(choice: Any, names: tuple[str, ...]) -> None:
    _, found = await asked(tools=[F, SPACE, PATCH, {"type": "web_search"}], tool_choice=choice)
    assert found.tool_use is not None
    assert found.tool_use.names == names


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"tools": [{"type": "strange"}]}, "tools[0].type"), ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "namespace", "tools": [F]}]}, "tools[0].name"),
        ({"tools": [{**SPACE, "tools": [F, {"type": "web_search"}]}]}, "tools[0].tools[1].type"),
        ({"tools": [{**SPACE, "tools": [F, {"type": "namespace", "name": "n"}]}]}, "tools[0].tools[1].type"),
        ({"tools": [{"type": "web_search"}, SPACE, {**F, "name": "agents__spawn"}]}, "tools[2].name"),
        ({"tools": [{"type": "web_search"}, {**SPACE, "name": "n" * 60}]}, "tools[1].tools[0].name"),
        ({"tools": [{"type": "web_search"}, {**F, "parameters": 5}]}, "tools[1].parameters"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark"}}]}, "tools[0].format.definition"),
        ({"tools": [{**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": ""}}]},
         "tools[0].format.definition"),
        ({"tools": [SPACE], "tool_choice": {"type": "function", "name": "spawn"}}, "tool_choice.name"),
        ({"tools": [F], "tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tools": [F], "tool_choice": {"type": "allowed_tools", "tools": [{"type": "namespace", "name": "n"}]}},
         "tool_choice.tools[0].name"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [F], "input": [{"role": "user", "content": "a"}, {"type": "additional_tools", "tools": [F]}]},
         "input[1].tools[0].name"),
    ],
)  # fmt: skip
async def test_wrong(body: dict[str, Any], param: str) -> None:
    port = FakeLink(silent)
    async with client(app_state(port)) as http:
        answer = await http.post(RESPONSES, json={"input": "hi", **body})
    assert answer.status_code == 400
    check_error(answer.json(), "invalid_request_error", param)
    assert param in answer.json()["error"]["message"]
    assert port.sent == []
