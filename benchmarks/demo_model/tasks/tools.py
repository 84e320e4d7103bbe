"""Choosing one of several tools, calling it in Hermes format, and answering from its result.

Names of tools and of their parameters vary from conversation to conversation, so that the model reads signatures
instead of remembering them.
"""

import json
from dataclasses import dataclass
from random import Random
from typing import Any

from benchmarks.demo_model.conversation import Call, Exercise, Message
from benchmarks.demo_model.lexicon import ADJECTIVES, CITIES, OBJECTS, code, place, pseudo_word
from benchmarks.demo_model.tasks import families, weather
from benchmarks.demo_model.tasks.skills import SKILLS, Parameter, Skill, invented
from benchmarks.demo_model.tasks.values import held, listing, spoken


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


def _schema(rng: Random, parameter: Parameter) -> dict[str, Any]:
    """The parameter's type, told by its values; its purpose mostly."""
    value = held(parameter.draw(rng))
    kind = "string"
    if isinstance(value, bool):
        kind = "boolean"
    elif isinstance(value, int | float):
        kind = "number" if parameter.fractions or isinstance(value, float) or rng.random() < 0.25 else "integer"
    written: dict[str, Any] = (
        {"type": "array", "items": {"type": "string"}} if isinstance(value, list) else {"type": kind}
    )
    if parameter.told or rng.random() < 0.7:
        written["description"] = parameter.description
    if parameter.members:
        written["enum"] = list(parameter.members)
    return written


def signed(rng: Random, skill: Skill, name: str) -> Tool:
    """The skill under a name, with names of the parameters drawn."""
    slots: dict[str, str] = {}
    for slot, parameter in skill.parameters.items():
        free = [known for known in parameter.names if known not in slots.values()]
        slots[slot] = rng.choice(free or [f"{slot}_{len(slots)}"])
    properties: dict[str, Any] = {}
    for slot, parameter in skill.parameters.items():
        properties[slots[slot]] = _schema(rng, parameter)
        if slot == "unit" and "enum" not in properties[slots[slot]] and rng.random() < 0.7:
            properties[slots[slot]]["enum"] = ["celsius", "fahrenheit"]
    demanded = {slot for slot, _ in skill.defaults}
    required = [slots[slot] for slot in skill.parameters if slot not in skill.optional or slot in demanded]
    optional = rng.random() < 0.25
    if optional:
        free = [extra for extra in _EXTRAS if extra not in properties]
        properties |= {extra: _EXTRAS[extra] for extra in rng.sample(free, rng.choice((1, 1, 2)))}
    function: dict[str, Any] = {
        "name": name,
        "description": skill.description + ("" if skill.description.endswith(".") else rng.choice(("", "."))),
        "parameters": {"type": "object", "properties": properties, "required": required},
    }
    if not skill.description:
        del function["description"]
    if not optional and not skill.optional and rng.random() < 0.2:
        del function["parameters"]["required"]
    if rng.random() < 0.2:
        function["parameters"]["additionalProperties"] = False
    if rng.random() < 0.1:
        function["strict"] = True
    if rng.random() < 0.1:  # some clients write the keys in an order of their own
        function = {key: function[key] for key in rng.sample(list(function), len(function))}
    return Tool(skill, name, slots, {"type": "function", "function": function})


# What results of tools have for keys.
_KEYS = ("status", "result", "id", "name", "price", "total", "count", "time", "date", "city", "message", "value", "url")


def _draw_tool(rng: Random, skill: Skill) -> Tool:
    if rng.random() < 0.1:
        return signed(rng, skill, pseudo_word(rng) + rng.choice(("", "_tool", "_api")))
    return signed(rng, skill, rng.choice(skill.names))


def draw_tools(rng: Random) -> tuple[Tool, ...]:
    """One to five tools with different names, of the short list of skills or invented."""
    size = rng.choice((1, 2, 3, 3, 4, 5))
    skills = [*rng.sample(SKILLS, size)]
    skills = [invented(rng) if rng.random() < 0.35 else skill for skill in skills]
    tools = {tool.name: tool for tool in (_draw_tool(rng, skill) for skill in skills)}
    return tuple(tools.values())


def draw_families(rng: Random) -> tuple[Tool, ...]:
    """One to six tools of the kind that people bring: families and what no list holds, now and then the weather's."""
    skills = families.kit(rng, rng.choices((1, 2, 3, 4, 5, 6), (14, 32, 30, 12, 7, 5))[0])
    if rng.random() < 0.22:
        others = [skill for skill in skills if not families.of_weather(skill.family)]
        skills = [weather.skill(rng), *others]
        rng.shuffle(skills)
    tools = {skill.names[0]: signed(rng, skill, skill.names[0]) for skill in skills}
    return tuple(tools.values())


def _asked(rng: Random, tool: Tool) -> tuple[str, dict[str, Any]]:
    """A question, and the values of the slots that it speaks of."""
    template = rng.choice(tool.skill.questions)
    values = {slot: parameter.draw(rng) for slot, parameter in tool.skill.parameters.items()}
    question = template.format(**{slot: spoken(value) for slot, value in values.items()})
    said = {
        slot: value for slot, value in values.items() if slot not in tool.skill.optional or f"{{{slot}}}" in template
    }
    return question, dict(tool.skill.defaults) | said


def _call(tool: Tool, values: dict[str, Any]) -> Call:
    return Call(tool.name, {name: held(values[slot]) for slot, name in tool.slots.items() if slot in values})


def tool_use(rng: Random, tools: tuple[Tool, ...]) -> Exercise:
    """A question that one of the tools answers: the call, and half of the time the result and the answer."""
    tool = rng.choice(tools)
    question, values = _asked(rng, tool)
    thought = f"The user asks for something that {tool.name} does."
    key = f"{question}|{tool.name}"
    if (tuple(tool.slots) == ("city",) or tool.skill.plural) and rng.random() < 0.15:
        return _parallel(rng, tool, thought)
    messages: list[Message] = [Message("user", question), Message("assistant", "", (_call(tool, values),), thought)]
    if rng.random() < 0.5:
        messages += _outcome(rng, tool, values)
    return Exercise("tool_answer" if len(messages) > 2 else "tool_call", key, tuple(messages))


def _outcome(rng: Random, tool: Tool, values: dict[str, Any]) -> tuple[Message, Message]:
    """The tool's result and the answer from it: JSON of known fields, or plain words, which are passed on."""
    known = bool(tool.skill.answer)
    if rng.random() < (0.25 if known else 0.5):
        words = rng.choice((
            f"{rng.randrange(-20, 100)} degrees and {rng.choice(ADJECTIVES)}", code(rng), str(rng.randrange(100000)),
            f"{rng.choice(ADJECTIVES)} {rng.choice(OBJECTS)}", f"{pseudo_word(rng)} {pseudo_word(rng)}",
            f"{rng.randrange(-20, 100)}°C, {rng.choice(ADJECTIVES)}", str(rng.randrange(10000) / 100), "done", "ok",
            " ".join(rng.choice(OBJECTS + ADJECTIVES) for _ in range(rng.randrange(1, 8))),
        ))  # fmt: skip
        return Message("tool", words), Message("assistant", f"The result is: {words}", thought="The tool has answered.")
    if not known or rng.random() < 0.15:
        unknown = {
            rng.choice(OBJECTS + _KEYS): rng.choice(
                (rng.randrange(1000), rng.choice(ADJECTIVES), code(rng), place(rng))
            )
            for _ in range(rng.randrange(1, 4))
        }
        words = ", ".join(f"{name} {value}" for name, value in unknown.items())
        return Message("tool", json.dumps(unknown)), Message(
            "assistant", f"The result is: {words}.", thought="The tool has answered."
        )
    result = {name: draw(rng) for name, draw in tool.skill.results.items()}
    answer = tool.skill.answer.format(**result, **{slot: spoken(value) for slot, value in values.items()})
    return Message("tool", json.dumps(result)), Message("assistant", answer, thought="The tool has answered.")


def _parallel(rng: Random, tool: Tool, thought: str) -> Exercise:
    """The same tool called for two or three places at once, perhaps with the results and one answer from them."""
    slot = tool.skill.plural or "city"
    draw = tool.skill.parameters[slot].draw
    places = {spoken(value): value for value in (draw(rng) for _ in range(rng.choice((2, 2, 3))))}
    if len(places) == 1 or (slot == "city" and not tool.skill.plural):
        places = {city: city for city in rng.sample(CITIES, 2)}
    template = rng.choice(
        [one for one in tool.skill.questions if all(f"{{{s}}}" not in one for s in tool.skill.optional)]
    )
    question = template.format(**{slot: listing(rng, list(places))})
    calls = tuple(_call(tool, dict(tool.skill.defaults) | {slot: value}) for value in places.values())
    messages = [Message("user", question), Message("assistant", "", calls, thought)]
    task = "tool_call"
    if tool.skill.answer and rng.random() < 0.4:
        results = [{name: drawn(rng) for name, drawn in tool.skill.results.items()} for _ in places]
        answers = [
            tool.skill.answer.format(**result, **{slot: said}) for result, said in zip(results, places, strict=True)
        ]
        messages += [Message("tool", json.dumps(result)) for result in results]
        messages.append(Message("assistant", " ".join(answers), thought="The tool has answered."))
        task = "tool_answer"
    return Exercise(task, f"{question}|{tool.name}", tuple(messages))


def no_tool(rng: Random, tools: tuple[Tool, ...]) -> Exercise:
    """A question for a tool that is not at hand."""
    if any(tool.skill.family >= 0 for tool in tools):
        skill = families.unserved(rng, [tool.skill for tool in tools])
    else:
        taken = {name for tool in tools for name in tool.skill.names}
        skill = rng.choice([skill for skill in SKILLS if taken.isdisjoint(skill.names)])
    question, _ = _asked(rng, Tool(skill, "", {}, {}))
    messages = (Message("user", question), Message("assistant", NO_TOOL, thought="None of the tools does that."))
    return Exercise("no_tool", question, messages)


def tool_failure(rng: Random, tools: tuple[Tool, ...]) -> Exercise:
    """A tool that answers with an error, which the model reports."""
    tool = rng.choice(tools)
    question, values = _asked(rng, tool)
    error = rng.choice(("not found", "no connection", "service busy", "timeout", "no permission", "bad request"))
    messages = (
        Message("user", question),
        Message("assistant", "", (_call(tool, values),), f"The user asks for something that {tool.name} does."),
        Message("tool", json.dumps({"error": error})),
        Message("assistant", f"The tool reported an error: {error}.", thought="The tool has failed."),
    )
    return Exercise("tool_answer", f"{question}|{tool.name}", messages)
