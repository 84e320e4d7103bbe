"""How many images a prompt may hold, however an operator writes it."""

from __future__ import annotations

import pytest

from penstock.protocol.errors import ConfigError
from penstock.protocol.image_limit import read_image_limit


@pytest.mark.parametrize(
    ("text", "limit"),
    [("16", 16), ("0", 0), (" 3 ", 3), ("image=4", 4), ('{"image": 5}', 5), ('{"image": 2, "video": 0}', 2),
     ('{"audio": 0}', 16)],
)  # fmt: skip
def test_every_spelling_is_read(text: str, limit: int) -> None:
    assert read_image_limit(text) == limit


@pytest.mark.parametrize(
    "text", ["", "many", "-1", "image=", "1025", "video=1", '{"video": 1}', '{"image": -1}', "[1]"]
)
def test_others_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--limit-mm-per-prompt"):
        read_image_limit(text)
