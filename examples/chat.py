"""A conversation of several turns, with a tool that the model calls: `python examples/chat.py`."""

import json

from penstock import LLM, SamplingParams

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather in a city",
        "parameters": {
            "type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}  # fmt: skip


def get_weather(city: str) -> str:
    return json.dumps({"city": city, "weather": "sunny", "celsius": 21})


def main() -> None:
    params = SamplingParams(temperature=0, max_tokens=64)
    with LLM() as llm:
        messages = [{"role": "user", "content": "What is the weather in Paris?"}]
        said = llm.chat(messages, params, tools=[WEATHER])[0].outputs[0]
        messages.append(said.message())
        for call in said.tool_calls:
            result = get_weather(**json.loads(call.arguments))
            print(f"{call.name}({call.arguments}) -> {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
        print(llm.chat(messages, params, tools=[WEATHER])[0].outputs[0].text)


if __name__ == "__main__":
    main()
