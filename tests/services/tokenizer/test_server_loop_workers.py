"""A prompt is completed with its automaton, or the request is answered with why it has none."""

from __future__ import annotations

from penstock.engine_core.text.prompts import Prepared
from penstock.engine_core.text.rendering import Rendered
from penstock.protocol.columns import pack
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.protocol.messages import Automaton, Grammar, Rejected, Sampling, SubmitText, SubmitTokens
from penstock.services.tokenizer.server_loop import Workers
from penstock.services.tokenizer.worker_protocol import Done

GRAMMAR = Grammar(kind="regex", source="a", param="regex")


class FakeCompiler:
    """A compiler that says what it is told to."""

    def __init__(self, outcome: Done | Exception) -> None:
        self.outcome = outcome

    async def compile(self, grammar: Grammar) -> Done:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class FakeTemplates:
    """A renderer that answers at once, or raises what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def render(self, request: SubmitText, now: float) -> Rendered:
        if self.error is not None:
            raise self.error
        return Rendered(text=f"{request.id} at {now}")

    async def fatal(self, call: object, now: float, rendered: Rendered | None, pictures: object) -> str:
        return "" if self.error is None else str(self.error)


def text() -> SubmitText:
    return SubmitText(id=7, sampling=Sampling(), grammar=GRAMMAR, prompt="x")


def made(*token_ids: int, after: bytes = b"") -> Prepared:
    tokens = SubmitTokens(id=7, token_ids=pack("i", token_ids), sampling=Sampling())
    return Prepared(tokens, token_ids, "", grammar=GRAMMAR, after=after)


async def test_the_automaton_travels_with_the_tokens() -> None:
    workers = Workers(FakeCompiler(Done("source", ("said",), 0.0, 5)), FakeTemplates())
    found = await workers.complete(text(), made(1, 2))
    assert isinstance(found, Prepared)
    assert found.request.automaton is not None
    assert found.request.automaton == Automaton(source="source", memory=5)
    assert found.approximations == ("said",)
    assert found.token_ids == (1, 2)


async def test_an_answer_that_reasons_is_structured_after_it() -> None:
    workers = Workers(FakeCompiler(Done("source", (), 0.0)), FakeTemplates())
    found = await workers.complete(text(), made(1, after=pack("i", [9])))
    assert isinstance(found, Prepared)
    assert found.request.automaton is not None
    assert found.request.automaton.after == pack("i", [9])


async def test_errors_become_answers() -> None:
    wrong = InvalidRequest("regex: bad", param="regex", code="invalid_grammar")
    found = await Workers(FakeCompiler(wrong), FakeTemplates()).complete(text(), made(1))
    assert found == Rejected(id=7, status=400, message="regex: bad", param="regex", code="invalid_grammar")
    busy = await Workers(FakeCompiler(Overloaded("busy")), FakeTemplates()).complete(text(), made(1))
    assert isinstance(busy, Rejected)
    assert (busy.status, busy.retry_after) == (429, 1.0)
    odd = await Workers(FakeCompiler(KeyError("secret")), FakeTemplates()).complete(text(), made(1))
    assert isinstance(odd, Rejected)
    assert odd.status == 500
    assert "secret" not in odd.message


async def test_a_requests_own_template_is_rendered_elsewhere() -> None:
    compiler = FakeCompiler(Done("source", (), 0.0))
    assert await Workers(compiler, FakeTemplates()).render(text(), 2.5) == Rendered(text="7 at 2.5")
    wrong = InvalidRequest("chat_template: bad", param="chat_template", code="template_too_complex")
    found = await Workers(compiler, FakeTemplates(wrong)).render(text(), 0.0)
    assert found == Rejected(
        id=7, status=400, message="chat_template: bad", param="chat_template", code="template_too_complex"
    )
    odd = await Workers(compiler, FakeTemplates(KeyError("secret"))).render(text(), 0.0)
    assert isinstance(odd, Rejected)
    assert (odd.status, "secret" in odd.message) == (500, False)


async def test_what_kills_another_process_ends() -> None:
    compiler = FakeCompiler(Done("source", (), 0.0))
    assert await Workers(compiler, FakeTemplates()).refusal(text(), 0.0, None, ()) is None
    found = await Workers(compiler, FakeTemplates(KeyError("it died"))).refusal(text(), 0.0, None, ())
    assert found is not None
    assert (found.id, found.status, found.code) == (7, 500, "condemned")
