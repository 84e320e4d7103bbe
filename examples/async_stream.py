"""Several streams at once on one event loop: `python examples/async_stream.py`."""

import asyncio

from penstock import AsyncLLM, RequestOutputKind, SamplingParams

QUESTIONS = ("What is 128 + 457?", "What is 12 * 12?")


async def answer(llm: AsyncLLM, question: str) -> str:
    params = SamplingParams(temperature=0, max_tokens=32, output_kind=RequestOutputKind.DELTA)
    text = ""
    async for output in llm.chat([{"role": "user", "content": question}], params):
        text += output.outputs[0].text  # what is new; leaving the loop would abort the request
    return f"{question} {text}"


async def main() -> None:
    async with AsyncLLM() as llm:
        for line in await asyncio.gather(*(answer(llm, question) for question in QUESTIONS)):
            print(line)


if __name__ == "__main__":
    asyncio.run(main())
