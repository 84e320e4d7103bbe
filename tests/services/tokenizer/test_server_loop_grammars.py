"""The loop with grammars: a request waits for its own compilation, nobody else does, and an abort wins."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from penstock.engine_core.text.rendering import Rendered
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.messages import (
    Abort,
    Finish,
    Grammar,
    Rejected,
    Sampling,
    SubmitText,
    SubmitTokens,
    Tokenize,
    Tokenized,
)
from penstock.protocol.outputs import TextBatch
from penstock.services.links.link import Joined
from penstock.services.tokenizer.server_loop import Workers
from penstock.services.tokenizer.worker_protocol import Done
from tests.engine_core.text.streams import batch, make_frontend
from tests.services.tokenizer.test_server_loop import Neighbour, new_loop, until


class Gate:
    """A compiler that answers when it is told to."""

    def __init__(self) -> None:
        self.waiting: dict[str, asyncio.Future[Done]] = {}
        self.tried: list[int] = []
        self.rendering: dict[str, asyncio.Future[Rendered]] = {}

    async def compile(self, grammar: Grammar) -> Done:
        self.waiting[grammar.source] = asyncio.get_running_loop().create_future()
        return await self.waiting[grammar.source]

    async def fatal(self, call: Any, now: float, rendered: Rendered | None, pictures: object) -> str:
        self.tried.append(call.id)
        return "it died" if getattr(call, "prompt", "") == "kill" else ""

    async def render(self, request: SubmitText, now: float) -> Rendered:
        assert request.chat_template is not None
        self.rendering[request.chat_template] = asyncio.get_running_loop().create_future()
        return await self.rendering[request.chat_template]


class Scene:
    """A loop between one api process and a scheduler."""

    def __init__(self) -> None:
        self.gate = Gate()
        self.threads = ThreadPoolExecutor(1)
        self.api, self.scheduler = Neighbour(), Neighbour()
        workers = Workers(self.gate, self.gate)
        self.loop = new_loop(make_frontend(apis=()), self.threads, workers)
        self.loop.from_apis([self.api.arrival(Joined())])
        self.loop.from_scheduler(0, [self.scheduler.arrival(Joined())])

    def ask(self, number: int, pattern: str | None) -> None:
        grammar = None if pattern is None else Grammar(kind="regex", source=pattern, param="regex")
        text = SubmitText(id=number, prompt="one", sampling=Sampling(), stream=True, grammar=grammar)
        self.loop.from_apis([self.api.arrival(text)])

    async def compiling(self, pattern: str) -> asyncio.Future[Done]:
        async with asyncio.timeout(30):
            while pattern not in self.gate.waiting:  # noqa: ASYNC110 (a thread makes the prompt)
                await asyncio.sleep(0)
        return self.gate.waiting[pattern]


@pytest.fixture
async def scene() -> Any:
    scene = Scene()
    yield scene
    scene.loop.close()
    scene.threads.shutdown()


async def test_a_request_waits_for_its_own_grammar_alone(scene: Scene) -> None:
    scene.ask(1, "slow")
    slow = await scene.compiling("slow")
    scene.ask(2, None)
    scene.ask(3, "quick")
    (await scene.compiling("quick")).set_result(Done("quick source", (), 0.0))
    found = await until(scene.scheduler, SubmitTokens, 2)
    assert [(each.id, each.automaton and each.automaton.source) for each in found] == [(2, None), (3, "quick source")]
    slow.set_result(Done("slow source", (), 0.0))
    found = await until(scene.scheduler, SubmitTokens, 3)
    assert found[-1].id == 1


async def test_a_refusal_reaches_the_api_and_not_the_scheduler(scene: Scene) -> None:
    scene.ask(1, "bad")
    (await scene.compiling("bad")).set_exception(InvalidRequest("regex: bad", param="regex", code="invalid_grammar"))
    (rejected,) = await until(scene.api, Rejected)
    assert (rejected.id, rejected.status, rejected.param) == (1, 400, "regex")
    assert not [each for each in scene.scheduler.got if isinstance(each, SubmitTokens)]


async def test_an_abort_wins_over_a_compilation(scene: Scene) -> None:
    scene.ask(1, "slow")
    slow = await scene.compiling("slow")
    scene.loop.from_apis([scene.api.arrival(Abort(1))])
    slow.set_result(Done("source", (), 0.0))
    scene.ask(2, None)
    (found,) = await until(scene.scheduler, SubmitTokens)
    assert found.id == 2
    assert scene.loop.statistics().frontend.requests == 1


async def test_approximations_come_with_the_first_text_of_each_choice(scene: Scene) -> None:
    scene.ask(1, "wide")
    (await scene.compiling("wide")).set_result(Done("source", ("minimum at /a",), 0.0))
    await until(scene.scheduler, SubmitTokens)
    tokens = batch((1, 0, [3], Finish.NONE), (1, 0, [3], Finish.STOP))
    scene.loop.from_scheduler(0, [scene.scheduler.arrival(tokens)])
    texts = await until(scene.api, TextBatch)
    assert [extra.approximations for text in texts for extra in text.extras] == [("minimum at /a",)]


async def test_a_request_waits_for_its_own_template_alone(scene: Scene) -> None:
    """The template is rendered elsewhere; what it printed is the prompt, and a refusal is the request's."""
    chat = {"messages": b'[{"role": "user", "content": "x"}]', "sampling": Sampling(), "add_special_tokens": False}
    for number, template in enumerate(("slow", "bad"), 1):
        text = SubmitText(id=number, chat_template=template, **chat)  # type: ignore[arg-type]
        scene.loop.from_apis([scene.api.arrival(text)])
    scene.ask(3, None)
    await until(scene.scheduler, SubmitTokens, 1)
    async with asyncio.timeout(30):
        while len(scene.gate.rendering) < 2:  # noqa: ASYNC110 (tasks of the loop)
            await asyncio.sleep(0)
    scene.gate.rendering["bad"].set_exception(InvalidRequest("no", param="chat_template"))
    (rejected,) = await until(scene.api, Rejected)
    assert (rejected.id, rejected.status, rejected.param) == (2, 400, "chat_template")
    scene.gate.rendering["slow"].set_result(Rendered(text="one"))
    found = await until(scene.scheduler, SubmitTokens, 2)
    assert [each.id for each in found] == [3, 1]
    assert found[0].token_ids == found[1].token_ids


async def test_suspects_are_tried_before_this_process_touches_them(scene: Scene) -> None:
    for number, prompt in enumerate(("kill", "one"), 1):
        text = SubmitText(id=number, prompt=prompt, sampling=Sampling(), suspect=True)
        scene.loop.from_apis([scene.api.arrival(text)])
    for number, prompt in enumerate(("kill", "one"), 3):
        scene.loop.from_apis([scene.api.arrival(Tokenize(id=number, prompt=prompt, suspect=True))])
    rejected = await until(scene.api, Rejected, 2)
    assert sorted((each.id, each.status, each.code) for each in rejected) == [
        (1, 500, "condemned"), (3, 500, "condemned"),
    ]  # fmt: skip
    (found,) = await until(scene.scheduler, SubmitTokens)
    assert found.id == 2
    (answered,) = await until(scene.api, Tokenized)
    assert answered.id == 4
    assert sorted(scene.gate.tried) == [1, 2, 3, 4]
