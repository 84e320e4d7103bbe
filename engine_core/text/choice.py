"""One choice of a request on its way from tokens to text."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

import msgspec

from penstock.engine_core.parsers.dialect import OutputParser
from penstock.engine_core.parsers.scanning import content, leading_text
from penstock.engine_core.text.detokenizer import Detokenizer, positions
from penstock.engine_core.text.stops import Match, StopScanner
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.messages import Finish, PieceKind
from penstock.protocol.outputs import Piece, PositionLogprobs, TextExtra, TokenExtra


class Delta(msgspec.Struct, frozen=True):
    """What some tokens add to a choice. The row of `extra` is not set yet."""

    text: str
    tokens: int
    finish: int = Finish.NONE
    extra: TextExtra | None = None
    stop_hit: bool = False  # a stop string ended the choice and the scheduler does not know
    pieces: tuple[Piece, ...] = ()  # what follows the text, where the output is parsed


class Choice:
    """Detokenizes, scans for stop strings, parses, and keeps count. Owned by its request; `advance` until it finishes.

    The token that ended a choice (end of sequence, a stop token id) is in the ids and the count but in the text only
    under include_stop, as is a stop string.
    """

    __slots__ = (
        "_approximations",
        "_detokenizer",
        "_drafted",
        "_echo_alone",
        "_first",
        "_image_tokens",
        "_include_stop",
        "_length",
        "_min_tokens",
        "_parser",
        "_prompt_tokens",
        "_reasoned",
        "_reasons",
        "_scanner",
        "_vocabulary",
        "ended",
        "written",
    )

    def __init__(
        self,
        vocabulary: Vocabulary,
        stream: Detokenizer,
        scanner: StopScanner | None,
        *,
        echo: str,
        prompt_tokens: int,
        min_tokens: int,
        include_stop: bool,
        image_tokens: int = 0,
        echo_alone: bool = False,
        approximations: tuple[str, ...] = (),
        parser: OutputParser | None = None,
        reasons: bool = False,
    ) -> None:
        self._vocabulary = vocabulary
        self._detokenizer = stream
        self._scanner = scanner
        self._parser = parser  # None where what comes is content
        self._reasons = reasons  # whether the parser looks for reasoning; told with the first delta
        self._reasoned = 0  # tokens of the reasoning, its markers among them
        self._first: str | None = echo  # what comes before the first delta's text; None from then on
        self._length = len(echo)  # characters detokenized so far, echo included
        self._prompt_tokens = prompt_tokens
        self._image_tokens = image_tokens  # of these
        self._min_tokens = min_tokens
        self._include_stop = include_stop
        self._echo_alone = echo_alone  # what is generated is not told
        self._approximations = approximations  # told with the first delta
        self._drafted: tuple[int, int] | None = None  # draft tokens accepted and rejected, as last told
        self.written = array("i")  # the output's tokens so far
        self.ended = False

    @property
    def tokens(self) -> int:
        return len(self.written)

    def resume(self, token_ids: Iterable[int]) -> None:
        """Take what was written, and told, before a process was lost. What it held back of that is held back again."""
        for token_id in token_ids:
            self.advance((token_id,))

    def advance(self, token_ids: Sequence[int], finish: int = Finish.NONE, extra: TokenExtra | None = None) -> Delta:
        """Take output tokens, the last ones when `finish` says so."""
        if self._echo_alone:
            return self._echoed(finish, extra)
        if self._first is not None or finish or extra is not None or len(token_ids) != 1:
            return self._advance(token_ids, finish, extra)
        # The steady step: one token, nothing beside it.
        self.written.append(token_ids[0])
        text = self._detokenizer.push(token_ids[0])
        self._length += len(text)
        if self._scanner is None or not text:
            return Delta(text, 1) if self._parser is None else self._parsed(self._parser, text)
        found = self._scanner.push(text, armed=len(self.written) > self._min_tokens)
        if not isinstance(found, Match):
            return Delta(found, 1) if self._parser is None else self._parsed(self._parser, found)
        self.ended = True
        if self._parser is None:
            return Delta(found.text, 1, Finish.STOP, self._stopped(found), stop_hit=True)
        last = self._parsed(self._parser, found.text)
        rest = self._parser.flush() if self._parser is not None else []
        text, pieces = leading_text([*content(last.text), *last.pieces, *rest])
        return Delta(text, 1, Finish.STOP, self._stopped(found), stop_hit=True, pieces=pieces)

    def _parsed(self, parser: OutputParser, text: str) -> Delta:
        """The delta of one token's text."""
        thinking = parser.thinking
        pieces = parser.push(text) if text else []
        self._reasoned += thinking or parser.thinking
        if parser.plain:
            self._parser = None
        if not pieces:
            return Delta("", 1)
        if len(pieces) == 1 and pieces[0].kind == PieceKind.CONTENT:
            return Delta(pieces[0].text, 1)
        first, others = leading_text(pieces)
        return Delta(first, 1, pieces=others)

    def end(self, finish: int, error: str | None = None) -> Delta:
        """End the choice here, whatever it was doing."""
        self.ended = True
        return Delta("", 0, finish, TextExtra(row=0, error=error) if error else None)

    def _advance(self, token_ids: Sequence[int], finish: int, extra: TokenExtra | None) -> Delta:
        before = self.tokens
        # The token that ends a choice is no text of it.
        visible = len(token_ids) - (finish == Finish.STOP and not self._include_stop and bool(token_ids))
        parts: list[Piece] = []
        offsets: list[int] = []
        match: Match | None = None
        for index, token_id in enumerate(token_ids):
            offsets.append(self._length + self._detokenizer.held())
            self.written.append(token_id)
            thinking = self._thinking()
            if index < visible:
                match = self._scan(self._detokenizer.push(token_id), parts)
            self._reasoned += thinking or self._thinking()
            if match is not None:
                break
        if finish and match is None:
            match = self._scan(self._detokenizer.flush(), parts)
            if match is None and self._scanner is not None:
                self._parse(self._scanner.release(), parts)
        taken = self.tokens - before
        self.ended = bool(finish) or match is not None
        if self.ended and self._parser is not None:
            parts += self._parser.flush()
        text, pieces = leading_text(parts)
        return Delta(
            self._with_echo(text),
            taken,
            self._finish(finish, match),
            self._extra(match, finish, extra, offsets[:taken], len(token_ids) - taken),
            stop_hit=match is not None and not finish,
            pieces=pieces,
        )

    def _echoed(self, finish: int, extra: TokenExtra | None) -> Delta:
        """The prompt and the end, whatever came behind it."""
        self.ended = True
        told = Finish.LENGTH if finish in (Finish.NONE, Finish.STOP) else finish
        if extra is not None:
            extra = msgspec.structs.replace(extra, logprobs=None)
        return Delta(self._with_echo(""), 0, told, self._extra(None, told, extra, [], 0), stop_hit=not finish)

    def _thinking(self) -> bool:
        return self._parser is not None and self._parser.thinking

    def _scan(self, text: str, parts: list[Piece]) -> Match | None:
        self._length += len(text)
        if self._scanner is None or not text:
            self._parse(text, parts)
            return None
        found = self._scanner.push(text, armed=len(self.written) > self._min_tokens)
        if isinstance(found, Match):
            self._parse(found.text, parts)
            return found
        self._parse(found, parts)
        return None

    def _parse(self, text: str, parts: list[Piece]) -> None:
        if not text:
            return
        if self._parser is None:
            parts.append(Piece(PieceKind.CONTENT, text))
            return
        parts += self._parser.push(text)
        if self._parser.plain and not self.ended:
            self._parser = None

    def _finish(self, finish: int, match: Match | None) -> int:
        """A stop string ends text or breaks a call off, so it makes no end of calls."""
        if match is not None:
            return Finish.STOP
        if finish == Finish.STOP and self._parser is not None and self._parser.complete:
            return Finish.CALLS
        return finish

    def _with_echo(self, text: str) -> str:
        if self._first:
            text = self._first + text
        return text

    def _stopped(self, match: Match) -> TextExtra:
        return TextExtra(row=0, stop_reason=match.stop, drafted=self._drafted, reasoning_tokens=self._reasoned)

    def _extra(
        self, match: Match | None, finish: int, extra: TokenExtra | None, offsets: list[int], surplus: int
    ) -> TextExtra | None:
        first, self._first = self._first is not None, None
        if extra is not None and extra.drafted is not None:
            self._drafted = without_surplus(extra.drafted, surplus)
        if not first and match is None and extra is None and not (self.ended and self._reasoned):
            return None
        logprobs: Sequence[PositionLogprobs] = ()
        if extra is not None and extra.logprobs is not None:
            logprobs = positions(self._vocabulary, extra.logprobs, offsets)
        stop_token = extra.stop_token if extra is not None and finish == Finish.STOP else None
        return TextExtra(
            row=0,
            prompt_tokens=self._prompt_tokens if first else None,
            image_tokens=self._image_tokens if first else 0,
            cached_tokens=extra.cached_tokens if extra is not None else None,
            logprobs=tuple(logprobs),
            stop_reason=match.stop if match is not None else stop_token,
            drafted=self._drafted if self.ended else None,
            reasons=first and self._reasons,
            reasoning_tokens=self._reasoned if self.ended else 0,
            vector=extra.vector if extra is not None else None,
            approximations=self._approximations if first else (),
            error=extra.error if extra is not None and match is None else None,
            weights=extra.weights if extra is not None else (),
        )


def without_surplus(drafted: tuple[int, int], surplus: int) -> tuple[int, int]:
    """Draft tokens accepted and rejected when the last `surplus` tokens of a step stand behind a stop string: what was
    accepted there stands in no output. The last token of a step is no draft."""
    accepted, rejected = drafted
    lost = min(accepted, max(0, surplus - 1))
    return accepted - lost, rejected + lost
