"""How a model writes what is not content: which call format, which reasoning markers. Told by its chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import msgspec

from penstock.engine_core.parsers import harmony
from penstock.engine_core.parsers.custom import CustomInputs
from penstock.engine_core.parsers.formats import FORMS, CallFormat
from penstock.engine_core.parsers.framed import Frame, FramedParser
from penstock.engine_core.parsers.harmony import HarmonyParser
from penstock.engine_core.parsers.llama import LlamaParser
from penstock.engine_core.parsers.pythonic import PythonicParser
from penstock.engine_core.parsers.reasoning import Markers, ReasoningParser
from penstock.engine_core.parsers.scanning import StreamParser, content
from penstock.engine_core.parsers.tagged import TaggedParser, Tags, Types
from penstock.engine_core.parsers.values import Kinds
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.messages import PieceKind
from penstock.protocol.outputs import Piece

AUTO, NONE = "auto", "none"
THINK = Markers("<think>", "</think>")
BRACKETS = Markers("[THINK]", "[/THINK]")
WORDS = Markers("<reasoning>", "</reasoning>")
SEED = Markers("<seed:think>", "</seed:think>")
GEMMA = Markers("<|channel>thought", "<channel|>")
PROSE = Markers(
    "Here is my thought process:", "Here is my response:",
    others=(Markers("Here's my thought process:", "Here's my response:"),),
)  # fmt: skip
RESPONSE = Markers("<think>", "</think>", answer=("<response>", "</response>"))
ANSWER = Markers("<think>", "</think>", answer=("<answer>", "</answer>"))
ANALYSIS = Markers("<|channel|>analysis<|message|>", "<|end|>")
ARGS = "[ARGS]"
# A call written in Python, as templates and their instructions show it.
PYTHONIC = re.compile(r"\[\s*\w+\(\s*\w+\s*=|<\|python_start\|>")
SHORTEST_MARK = 3  # characters of a control token that is part of a marker

# Names of `--reasoning-parser` → markers, and whether an output begins within them whatever the prompt ends with.
REASONING: Mapping[str, tuple[Markers, bool]] = {
    "think": (THINK, False),
    "qwen3": (THINK, False),
    "deepseek_r1": (THINK, True),
    "mistral": (BRACKETS, False),
    "reasoning": (WORDS, False),
    "harmony": (ANALYSIS, False),
    "gemma4": (GEMMA, False),
    "granite": (PROSE, False),
    "seed_oss": (SEED, False),
    "hunyuan_a13b": (ANSWER, False),
    "ernie45": (RESPONSE, True),
    "minimax_m2_append_think": (THINK, False),
}
KEPT = frozenset(("minimax_m2_append_think",))  # which leave the reasoning in the content, marked as in messages


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    """The served model's ways. None: it has no such thing, or nobody knows how it writes it."""

    calls: CallFormat | None = None
    listed: bool = False  # MISTRAL: calls stand in a list, as before version 11 of their tokenizer
    call_marks: frozenset[int] = frozenset()  # special tokens that the parser of calls must see
    reasoning: Markers | None = None
    begins_inside: bool = False  # outputs begin within the reasoning although the prompt does not say so
    kept: bool = False  # reasoning stays in the content, with the opening marker that the prompt has written
    closing: int | None = None  # the one token of the closing marker, if it is one
    reasoning_marks: frozenset[int] = frozenset()

    @property
    def channels(self) -> bool:
        """Whether outputs are messages on channels, whatever is asked of them."""
        return self.calls is CallFormat.HARMONY or self.reasoning == ANALYSIS


class Parsing(msgspec.Struct, frozen=True, kw_only=True):
    """How the output of one request is parsed."""

    reasoning: Markers | None = None
    inside: bool = False  # the output begins within the reasoning
    exact: bool = False  # a structure begins right behind the reasoning
    channels: bool = False  # the output is messages on channels
    calls: CallFormat | None = None
    names: frozenset[str] = frozenset()  # functions that may be called
    held: frozenset[str] = frozenset()  # those of them whose calls a grammar holds
    kinds: Mapping[str, Mapping[str, Kinds]] = {}  # types of the functions' parameters, where calls do not tell them
    customs: frozenset[str] = frozenset()  # functions that stand for custom tools
    shown: frozenset[int] = frozenset()  # special tokens that are not skipped

    def parser(self) -> OutputParser:
        """A parser of one choice."""
        inputs = CustomInputs(self.customs) if self.customs else None
        if self.channels:
            names = None if self.calls is None else self.names
            messages = HarmonyParser(names, reasons=self.reasoning is not None, inside=self.inside)
            return OutputParser(None, messages, inputs)
        reasoning = None
        if self.reasoning is not None:
            reasoning = ReasoningParser(self.reasoning, inside=self.inside, exact=self.exact)
        if self.calls is None:
            return OutputParser(reasoning, None)
        return OutputParser(reasoning, call_parser(self.calls, self.names, self.kinds, self.held), inputs)


def call_parser(
    calls: CallFormat,
    names: frozenset[str],
    kinds: Types | None = None,
    held: frozenset[str] = frozenset(),
) -> StreamParser:
    """What stands without a marker is taken for a call only if it names one of these functions. `kinds` are the types
    of their parameters. No grammar sees what Qwen3-Coder writes without its marker, so no call of a function
    that is `held` to one is read there."""
    match FORMS[calls].reader:
        case Frame() as frame:
            return FramedParser(frame)
        case Tags() as tags:
            return TaggedParser(tags, kinds or {}, bare=names - held)
    machines = {CallFormat.LLAMA: LlamaParser, CallFormat.PYTHONIC: PythonicParser}
    return HarmonyParser(names, reasons=True) if calls is CallFormat.HARMONY else machines[calls](names)


def read_dialect(template: str, vocabulary: Vocabulary, calls: str = AUTO, reasoning: str = AUTO) -> Dialect:
    """`calls` and `reasoning` are the options' values; `auto` asks the template's source."""
    found = told_calls(template) if calls == AUTO else None if calls == NONE else CallFormat(calls)
    if reasoning == AUTO:
        markers, inside = told_reasoning(template), False
    else:
        markers, inside = (None, False) if reasoning == NONE else REASONING[reasoning]
    return Dialect(
        calls=found,
        listed=found is CallFormat.MISTRAL and not special_tokens(vocabulary, (ARGS,)),
        call_marks=special_tokens(vocabulary, FORMS[found].marks) if found is not None else frozenset(),
        reasoning=markers,
        begins_inside=inside,
        kept=reasoning in KEPT,
        closing=single_token(vocabulary, markers.closing) if markers is not None else None,
        reasoning_marks=special_tokens(vocabulary, marks_of(markers)),
    )


def told_calls(template: str) -> CallFormat | None:
    """The format that a template writes calls in, as far as its marks tell."""
    for calls, form in FORMS.items():
        if any(all(text in template for text in texts) for texts in form.told):
            return calls
        if calls is CallFormat.PYTHONIC and PYTHONIC.search(template):
            return calls
    return None


def told_reasoning(template: str) -> Markers | None:
    """The markers that a template knows of."""
    match told_calls(template):
        case CallFormat.HARMONY:
            return ANALYSIS
        case CallFormat.HUNYUAN if ANSWER.closing in template:
            return ANSWER
    known = (GEMMA, SEED, PROSE, ANSWER, RESPONSE, THINK, BRACKETS, WORDS)
    return next((each for each in known if all(text in template for text in (each.closing, *each.answer))), None)


def marks_of(markers: Markers | None) -> tuple[str, ...]:
    """Texts of which reasoning's markers consist."""
    if markers is None:
        return ()
    return harmony.MARKS if markers == ANALYSIS else (markers.opening, markers.closing)


def special_tokens(vocabulary: Vocabulary, texts: Iterable[str]) -> frozenset[int]:
    """Those special tokens that read like one of these, or like a part of it."""
    whole = "\n".join(texts)
    found = ((token_id, vocabulary.token(token_id)) for token_id in vocabulary.special)
    return frozenset(token_id for token_id, token in found if len(token) >= SHORTEST_MARK and token in whole)


def single_token(vocabulary: Vocabulary, text: str) -> int | None:
    """The one token that a text is, where it is one."""
    token_ids = vocabulary.encode(text, add_special_tokens=False)
    return token_ids[0] if len(token_ids) == 1 and vocabulary.raw(token_ids[0]) == text.encode() else None


class OutputParser:
    """The parsers of one choice; each may be absent. Owned by the choice."""

    __slots__ = ("_calls", "_inputs", "_reasoning", "called")

    def __init__(
        self, reasoning: ReasoningParser | None, calls: StreamParser | None, inputs: CustomInputs | None = None
    ) -> None:
        self._reasoning = reasoning  # until the reasoning is over
        self._calls = calls
        self._inputs = inputs
        self.called = False  # a call has begun

    @property
    def thinking(self) -> bool:
        """Whether what comes is reasoning."""
        now = self._reasoning or self._calls
        return now is not None and now.thinking

    @property
    def plain(self) -> bool:
        """Whether whatever comes is content."""
        return self._calls is None and self._reasoning is None

    @property
    def complete(self) -> bool:
        """Whether there are calls and none is broken off."""
        return self.called and not (self._calls is not None and self._calls.open)

    def push(self, text: str) -> list[Piece]:
        if self._reasoning is None:
            return self._spoken(content(text))
        pieces = self._reasoning.push(text)
        if self._reasoning.over:
            self._reasoning = None
        return self._spoken(pieces)

    def flush(self) -> list[Piece]:
        out = self._spoken(self._reasoning.flush()) if self._reasoning is not None else []
        return out if self._calls is None else out + self._called(self._calls.flush())

    def _spoken(self, pieces: list[Piece]) -> list[Piece]:
        """The same with calls in place of the content in which they stand."""
        if self._calls is None:
            return pieces
        out: list[Piece] = []
        for piece in pieces:
            said = piece.kind == PieceKind.CONTENT
            out += self._called(self._calls.push(piece.text)) if said else [piece]
        return out

    def _called(self, pieces: list[Piece]) -> list[Piece]:
        self.called = self.called or any(piece.kind == PieceKind.CALL for piece in pieces)
        return pieces if self._inputs is None else self._inputs.push(pieces)
