"""Choosing one of several tools, calling it in Hermes format, and answering from its result.

Names of tools and of their parameters vary from conversation to conversation, so that the model reads signatures
instead of remembering them.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.demo_model.conversation import Call, Exercise, Message
from benchmarks.demo_model.lexicon import ADJECTIVES, CITIES, OBJECTS, code, pseudo_word
from benchmarks.demo_model.tasks.skills import SKILLS, Skill, invented


@dataclass(frozen=True)
class Tool:
    """A skill with the names that this conversation gives it: `slots` maps the skill's slot to the parameter's name."""

    skill: Skill
    name: str
    slots: dict[str, str]
    signature: dict[str, Any]


NO_TOOL = "I have no tool for that."

# Optional parameters that no question speaks of: a call leaves them out.
_EXTRAS: dict[str, dict[str, Any]] = {
    "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
    "format": {"type": "string", "enum": ["short", "long"], "description": "Form of the result"},
    "verbose": {"type": "boolean"},
    "language": {"type": "string", "description": "Language of the answer"},
    "limit": {"type": "integer", "description": "Highest number of results"},
    "timeout": {"type": "integer", "description": "Seconds to wait"},
    "page": {"type": "integer"},
    "comment": {"type": "string", "description": "A free comment"},
}


def _draw_tool(rng: Random, skill: Skill) -> Tool:
    if rng.random() < 0.1:
        name = pseudo_word(rng) + rng.choice(("", "_tool", "_api"))
    else:
        name = rng.choice(skill.names)
    slots: dict[str, str] = {}
    for slot, parameter in skill.parameters.items():
        slots[slot] = rng.choice([known for known in parameter.names if known not in slots.values()])
    properties: dict[str, Any] = {}
    for slot, parameter in skill.parameters.items():
        properties[slots[slot]] = {"type": "integer" if isinstance(parameter.draw(rng), int) else "string"}
        if rng.random() < 0.7:
            properties[slots[slot]]["description"] = parameter.description
        if slot == "unit" and rng.random() < 0.7:
            properties[slots[slot]]["enum"] = ["celsius", "fahrenheit"]
    required = list(properties)
    optional = rng.random() < 0.25
    if optional:
        free = [extra for extra in _EXTRAS if extra not in properties]
        properties |= {extra: _EXTRAS[extra] for extra in rng.sample(free, rng.choice((1, 1, 2)))}
    function: dict[str, Any] = {
        "name": name,
        "description": skill.description + rng.choice(("", ".")),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    if not optional and rng.random() < 0.2:
        del function["parameters"]["required"]
    if rng.random() < 0.2:
        function["parameters"]["additionalProperties"] = False
    if rng.random() < 0.1:
        function["strict"] = True
    return Tool(skill, name, slots, {"type": "function", "function": function})


def draw_tools(rng: Random) -> tuple[Tool, ...]:
    """One to five tools with different names."""
    size = rng.choice((1, 2, 3, 3, 4, 5))
    skills = [*rng.sample(SKILLS, size)]
    skills = [invented(rng) if rng.random() < 0.35 else skill for skill in skills]
    tools = {tool.name: tool for tool in (_draw_tool(rng, skill) for skill in skills)}
    return tuple(tools.values())


def _arguments(rng: Random, tool: Tool) -> dict[str, Any]:
    return {slot: parameter.draw(rng) for slot, parameter in tool.skill.parameters.items()}


def _call(tool: Tool, values: dict[str, Any]) -> Call:
    return Call(tool.name, {name: values[slot] for slot, name in tool.slots.items()})


def tool_use(rng: Random, tools: tuple[Tool, ...]) -> Exercise:
    """A question that one of the tools answers: the call, and half of the time the result and the answer."""
    tool = rng.choice(tools)
    values = _arguments(rng, tool)
    question = rng.choice(tool.skill.questions).format(**values)
    thought = f"The user asks for something that {tool.name} does."
    key = f"{question}|{tool.name}"
    if tuple(tool.slots) == ("city",) and rng.random() < 0.15:
        return _parallel(rng, tool, thought)
    messages: list[Message] = [Message("user", question), Message("assistant", "", (_call(tool, values),), thought)]
    if rng.random() < 0.5:
        messages += _outcome(rng, tool, values)
    return Exercise("tool_answer" if len(messages) > 2 else "tool_call", key, tuple(messages))


def _outcome(rng: Random, tool: Tool, values: dict[str, Any]) -> tuple[Message, Message]:
    """The tool's result and the answer from it: JSON of known fields, or plain words, which are passed on."""
    if rng.random() < 0.25:
        words = rng.choice((
            f"{rng.randrange(-20, 100)} degrees and {rng.choice(ADJECTIVES)}", code(rng), str(rng.randrange(100000)),
            f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}", f"{pseudo_word(rng)} {pseudo_word(rng)}",
            " ".join(rng.choice(OBJECTS + ADJECTIVES) for _ in range(rng.randrange(1, 8))),
        ))  # fmt: skip
        return Message("tool", words), Message("assistant", f"The result is: {words}", thought="The tool has answered.")
    if rng.random() < 0.15:
        unknown = {
            rng.choice(OBJECTS): rng.choice((rng.randrange(1000), rng.choice(ADJECTIVES)))
            for _ in range(rng.randrange(1, 4))
        }
        words = ", ".join(f"{name} {value}" for name, value in unknown.items())
        return Message("tool", json.dumps(unknown)), Message(
            "assistant", f"The result is: {words}.", thought="The tool has answered."
        )
    result = {name: draw(rng) for name, draw in tool.skill.results.items()}
    answer = tool.skill.answer.format(**result, **values)
    return Message("tool", json.dumps(result)), Message("assistant", answer, thought="The tool has answered.")


def _parallel(rng: Random, tool: Tool, thought: str) -> Exercise:
    """The same tool called for two cities at once."""
    first, second = rng.sample(CITIES, 2)
    calls = tuple(_call(tool, {"city": city}) for city in (first, second))
    question = rng.choice(tool.skill.questions).format(city=f"{first} and {second}")
    return Exercise(
        "tool_call", f"{question}|{tool.name}", (Message("user", question), Message("assistant", "", calls, thought))
    )


def no_tool(rng: Random, tools: tuple[Tool, ...]) -> Exercise:
    """A question for a tool that is not at hand."""
    taken = {name for tool in tools for name in tool.skill.names}
    skill = rng.choice([skill for skill in SKILLS if taken.isdisjoint(skill.names)])
    values = {slot: parameter.draw(rng) for slot, parameter in skill.parameters.items()}
    question = rng.choice(skill.questions).format(**values)
    messages = (Message("user", question), Message("assistant", NO_TOOL, thought="None of the tools does that."))
    return Exercise("no_tool", question, messages)


def tool_failure(rng: Random, tools: tuple[Tool, ...]) -> Exercise:
    """A tool that answers with an error, which the model reports."""
    tool = rng.choice(tools)
    values = _arguments(rng, tool)
    question = rng.choice(tool.skill.questions).format(**values)
    error = rng.choice(("not found", "no connection", "service busy", "timeout", "no permission", "bad request"))
    messages = (
        Message("user", question),
        Message("assistant", "", (_call(tool, values),), f"The user asks for something that {tool.name} does."),
        Message("tool", json.dumps({"error": error})),
        Message("assistant", f"The tool reported an error: {error}.", thought="The tool has failed."),
    )
    return Exercise("tool_answer", f"{question}|{tool.name}", messages)
