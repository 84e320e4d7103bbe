from __future__ import annotations

import pytest

from penstock.engine_core.scheduling.options import SpeculationOptions
from penstock.protocol.speculation import METHODS


def test_nothing_is_proposed_unless_it_is_asked_for() -> None:
    assert SpeculationOptions().method == "none"


def test_heads_alone_read_their_drafts_again() -> None:
    assert [method for method in METHODS if SpeculationOptions(method=method).rereads] == ["eagle", "mtp"]


@pytest.mark.skipif(not __debug__, reason="our own mistakes are told by assertions, which are off")
@pytest.mark.parametrize(
    "fields",
    [
        {"method": "magic"},
        {"num_speculative_tokens": -1},
        {"prompt_lookup_min": 0},
        {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
        {"max_step_drafts": -1},
    ],
)
def test_options_that_make_no_sense_are_our_own_mistake(fields: dict[str, object]) -> None:
    with pytest.raises(AssertionError):
        SpeculationOptions(**fields)  # type: ignore[arg-type]
