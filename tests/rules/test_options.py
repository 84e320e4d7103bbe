"""Whatever can be configured is read by something: an option that nothing reads does nothing, and nobody is told."""

from __future__ import annotations

import ast

from penstock.engine_core.scheduling.options import SchedulingOptions, SpeculationOptions
from penstock.protocol.config import fields
from penstock.services.openai.validation import LIMIT_OPTIONS
from tests.rules.source import none, product


def options() -> dict[str, str]:
    """Each option's name, with the section or the struct that has it."""
    found = {field.name: field.section for field in fields()}
    inner = (SchedulingOptions, SpeculationOptions)
    return found | {name: struct.__name__ for struct in inner for name in struct.__struct_fields__}


def test_every_option_is_read() -> None:
    read = {option.removeprefix("--").replace("-", "_") for option in LIMIT_OPTIONS.values()}  # by their names
    for source in product():
        read |= {
            node.attr for node in source.nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
        }
    none(f"{struct}.{name} is read by nothing" for name, struct in options().items() if name not in read)
