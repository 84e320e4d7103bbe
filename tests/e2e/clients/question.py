"""What the clients' scripts ask, and how they tell what they got. It needs nothing but Python."""

from __future__ import annotations

import json
import sys
from typing import Any

URL, MODEL = sys.argv[1], "penstock-demo"
SUM = [{"role": "user", "content": "What is 128 + 457?"}]
ASK = [{"role": "user", "content": "What is the weather in Rome?"}]
TOM = [{"role": "user", "content": "Tom is 5 years old."}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather in a city", "parameters": PARAMETERS},
}


def tell(found: dict[str, Any]) -> None:
    """The last line of the script's output."""
    print(json.dumps(found))
