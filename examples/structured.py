"""Output that follows a JSON schema, a regex or a choice: `python examples/structured.py`."""

import json

from penstock import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
ASKED = {
    "Extract the person: Tom is 5 years old.": StructuredOutputsParams(json=PERSON),
    "Is 7 larger than 3?": StructuredOutputsParams(choice=["yes", "no"]),
    "What is 128 + 457?": StructuredOutputsParams(regex=r"[0-9]+ \+ [0-9]+ = [0-9]+\."),
}


def main() -> None:
    conversations = [[{"role": "user", "content": question}] for question in ASKED]
    params = [SamplingParams(temperature=0, max_tokens=64, structured_outputs=each) for each in ASKED.values()]
    with LLM() as llm:
        person, *rest = [output.outputs[0].text for output in llm.chat(conversations, params)]
        print(json.loads(person), *rest, sep="\n")


if __name__ == "__main__":
    main()
