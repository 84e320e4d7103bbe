"""A prompt is completed with its automaton, or the request is answered with why it has none."""

from __future__ import annotations

from penstock.engine_core.text.prompts import Prepared
from penstock.engine_core.text.rendering import Rendered
from penstock.protocol.columns import pack
from penstock.protocol.errors import InvalidRequest, Overloaded
from penstock.protocol.messages import Automaton, Grammar, Rejected, Sampling, SubmitText, SubmitTokens
from penstock.services.tokenizer.structure import Structure
from penstock.services.tokenizer.worker_protocol import Done

GRAMMAR = Grammar(kind="regex", source="a", param="regex")


class Told:
    """A compiler that says what it is told to."""

    def __init__(self, outcome: Done | Exception) -> None:
        self.outcome = outcome

    async def compile(self, grammar: Grammar) -> Done:
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


class Prints:
    """A renderer that answers at once, or raises what it was given."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def render(self, request: SubmitText, now: float) -> Rendered:
        if self.error is not None:
            raise self.error
        return Rendered(text=f"{request.id} at {now}")

    async def fatal(self, question: object, now: float, rendered: Rendered | None) -> str:
        return "" if self.error is None else str(self.error)


def text() -> SubmitText:
    return SubmitText(id=7, sampling=Sampling(), grammar=GRAMMAR, prompt="x")


def made(*token_ids: int, after: bytes = b"") -> Prepared:
    tokens = SubmitTokens(id=7, token_ids=pack("i", token_ids), sampling=Sampling())
    return Prepared(tokens, token_ids, "", grammar=GRAMMAR, after=after)


async def test_the_automaton_travels_with_the_tokens() -> None:
    structure = Structure(Told(Done("source", ("said",), 0.0, 0.0, 5)), Prints())
    found = await structure.complete(text(), made(1, 2))
    assert isinstance(found, Prepared)
    assert found.request.automaton is not None
    assert found.request.automaton == Automaton(source="source", memory=5)
    assert found.approximations == ("said",)
    assert found.token_ids == (1, 2)


async def test_an_answer_that_reasons_is_structured_after_it() -> None:
    structure = Structure(Told(Done("source", (), 0.0, 0.0)), Prints())
    found = await structure.complete(text(), made(1, after=pack("i", [9])))
    assert isinstance(found, Prepared)
    assert found.request.automaton is not None
    assert found.request.automaton.after == pack("i", [9])


async def test_errors_become_answers() -> None:
    wrong = InvalidRequest("regex: bad", param="regex", code="invalid_grammar")
    found = await Structure(Told(wrong), Prints()).complete(text(), made(1))
    assert found == Rejected(id=7, status=400, message="regex: bad", param="regex", code="invalid_grammar")
    busy = await Structure(Told(Overloaded("busy")), Prints()).complete(text(), made(1))
    assert isinstance(busy, Rejected)
    assert (busy.status, busy.retry_after) == (429, 1.0)
    odd = await Structure(Told(KeyError("secret")), Prints()).complete(text(), made(1))
    assert isinstance(odd, Rejected)
    assert odd.status == 500
    assert "secret" not in odd.message


async def test_a_requests_own_template_is_rendered_elsewhere() -> None:
    told = Told(Done("source", (), 0.0, 0.0))
    assert await Structure(told, Prints()).render(text(), 2.5) == Rendered(text="7 at 2.5")
    wrong = InvalidRequest("chat_template: bad", param="chat_template", code="template_too_complex")
    found = await Structure(told, Prints(wrong)).render(text(), 0.0)
    assert found == Rejected(
        id=7, status=400, message="chat_template: bad", param="chat_template", code="template_too_complex"
    )
    odd = await Structure(told, Prints(KeyError("secret"))).render(text(), 0.0)
    assert isinstance(odd, Rejected)
    assert (odd.status, "secret" in odd.message) == (500, False)


async def test_what_kills_another_process_ends() -> None:
    told = Told(Done("source", (), 0.0, 0.0))
    assert await Structure(told, Prints()).refusal(text(), 0.0, None) is None
    found = await Structure(told, Prints(KeyError("it died"))).refusal(text(), 0.0, None)
    assert found is not None
    assert (found.id, found.status, found.code) == (7, 500, "condemned")
