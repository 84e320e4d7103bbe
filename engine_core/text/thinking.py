"""Whether a model reasons: what the request wants, told to the template in the words that it knows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine_core.parsers.reasoning import Markers
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.errors import InvalidRequest

SWITCHES = ("enable_thinking", "thinking")  # names by which templates are told yes or no
EFFORT = "reasoning_effort"
NO_EFFORT = "none"


def thinking_arguments(
    effort: str, given: Mapping[str, Any], template: ChatTemplate, *, reasons: bool
) -> dict[str, Any]:
    """Names for the template that stand for `effort`; those that the request gave itself stay as they are.

    Raises InvalidRequest where the template can be told nothing of the kind; a model that never reasons (not `reasons`)
    need not be told to leave it.
    """
    if not effort:
        return {}
    switches = [name for name in SWITCHES if name in template.variables]
    found: dict[str, Any] = dict.fromkeys(switches, effort != NO_EFFORT)
    if EFFORT in template.variables:
        found[EFFORT] = effort
    if not found and (reasons or effort != NO_EFFORT):
        message = f"{EFFORT} is {effort!r}, but this model's chat template knows no effort of reasoning"
        raise InvalidRequest(message, param=EFFORT, code="unsupported")
    return {name: value for name, value in found.items() if name not in given}


def asks_to_think(arguments: Mapping[str, Any]) -> bool:
    """Whether the template was told to have the model reason."""
    effort = arguments.get(EFFORT)
    return any(arguments.get(name) is True for name in SWITCHES) or (effort is not None and effort != NO_EFFORT)


def left_open(prompt: str, markers: Markers, final: str | None) -> bool:
    """Whether a prompt leaves the reasoning open: at its very end, or in a message `final` that is to be continued."""
    if final is not None and final.rfind(markers.opening) > final.rfind(markers.closing):
        return True
    return prompt.rstrip().endswith(markers.opening)
