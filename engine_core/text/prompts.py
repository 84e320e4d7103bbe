"""Requests as clients mean them → requests as the scheduler takes them: token ids, and every limit that ids decide."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from penstock.engine_core.grammar.answers import Bound, Opening, answer_bound
from penstock.engine_core.grammar.calls import read_functions
from penstock.engine_core.images.picture import Picture
from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.engine_core.parsers.dialect import Dialect, Parsing
from penstock.engine_core.parsers.formats import UNTYPED
from penstock.engine_core.parsers.values import parameter_kinds
from penstock.engine_core.text.controls import Controls
from penstock.engine_core.text.detokenizer import detokenizer
from penstock.engine_core.text.image_prompt import ImagePrompter, check_place, unseen
from penstock.engine_core.text.pooling import check_ids, kept, part, pooled_submission
from penstock.engine_core.text.rendering import Rendered, Renderer
from penstock.engine_core.text.template import ChatTemplate
from penstock.engine_core.tokenizer.vocabulary import Vocabulary
from penstock.protocol.columns import pack, unpack, unpack_token_ids
from penstock.protocol.errors import ContextExceeded, InvalidRequest, Unsupported
from penstock.protocol.images import Image
from penstock.protocol.limits import MAX_BAD_WORD_TOKENS
from penstock.protocol.messages import (
    Detokenize,
    Detokenized,
    Grammar,
    Sampling,
    SubmitText,
    SubmitTokens,
    Tokenize,
    Tokenized,
)

MOST_TURNS = 4  # ends of turns that the scheduler hears of: the first one and the last ones


class PromptLimits(msgspec.Struct, frozen=True):
    """What the served model allows."""

    vocab_size: int  # rows of the embedding; ids are below it
    max_model_len: int  # prompt plus output, in tokens
    eos_token_ids: tuple[int, ...]
    headless: bool = False  # it has no output embedding, so it makes vectors alone
    recurrent: bool = False  # it has recurrent layers, whose states are kept where turns end
    vision: VisionSpec | None = None  # it sees images
    remember: bool = True  # parts of chats that were encoded before


class Prepared(msgspec.Struct, frozen=True):
    """A request as token ids, and what its answer needs of the prompt."""

    request: SubmitTokens
    token_ids: Sequence[int]
    echo: str  # the prompt's text when the request wants it back
    approximations: tuple[str, ...] = ()  # what the request's grammar does not hold exactly
    parsing: Parsing | None = None  # None: all of the output is content
    grammar: Grammar | None = None  # that the answer must follow, to be compiled
    after: bytes = b""  # as `Automaton.after`
    chain: list[bytes] = []  # identities of the full blocks of `token_ids`, where a placement looks for them


class Prompter:
    """Makes prompts of one model. Holds no state of requests, so it may be used from several threads."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        limits: PromptLimits,
        dialect: Dialect | None = None,
        controls: Controls | None = None,
    ) -> None:
        """`controls`: those that contents of chats must not spell; None: they may."""
        self._vocabulary = vocabulary
        self._limits = limits
        self._dialect = dialect or Dialect()
        self._controls = controls
        self._renderer = Renderer(template, self._dialect, controls)
        self._images = None if limits.vision is None else ImagePrompter(limits.vision, vocabulary)

    def prepare(
        self, request: SubmitText, now: float, rendered: Rendered | None = None, pictures: Sequence[Picture] = ()
    ) -> Prepared:
        """`now` in unix seconds is what a template knows as the time. `rendered`: of a request with a template of its
        own, which is never rendered here. `pictures`: its images, decoded. Raises InvalidRequest."""
        check_place(request)
        if request.pooling is not None:
            limits = self._limits
            pooled = pooled_submission(
                request, request.pooling, self._vocabulary, limits.vocab_size, limits.max_model_len
            )
            return Prepared(pooled, unpack("i", pooled.token_ids), "")
        if self._limits.headless:
            raise Unsupported("this model has no output embedding: it makes vectors and no text", param="model")
        assert request.chat_template is None or rendered is not None, "a request's template in this process"
        if rendered is None and request.messages is not None:
            rendered = self._renderer.render(request, now)
        token_ids, images = self._prompt_ids(request, rendered, pictures)
        param = "prompt" if request.messages is None else "messages"
        given, whole, token_ids = request.prompt_ids, len(token_ids), self._truncated(request, token_ids)
        if not token_ids:
            raise InvalidRequest(f"{param} must hold at least one token", param=param)
        sampling = msgspec.structs.replace(
            self._sampling(request),
            max_tokens=self._max_tokens(request.sampling.max_tokens, len(token_ids), param, clamp=request.clamp),
            eos_token_ids=self._limits.eos_token_ids,
        )
        submit = SubmitTokens(
            id=request.id,
            token_ids=given if given is not None and len(token_ids) == whole else pack("i", token_ids),
            sampling=sampling,
            prediction=self._prediction(request),
            speculate=request.speculate,
            stop_strings=bool(request.stop),
            n=request.n,
            priority=request.priority,
            cache_salt=request.cache_salt,
            trace=request.trace,
            client=request.client,
            adapter=request.adapter,
            turns=turn_ends(token_ids, self._limits.eos_token_ids) if self._limits.recurrent else (),
            images=images,
            rid=request.rid,
        )
        bound = Bound(request.grammar) if rendered is None else self._bound(request, rendered)
        return Prepared(
            submit,
            token_ids,
            self._echo(request, token_ids, whole) if request.echo else self._opening(rendered),
            parsing=self._parsing(request, rendered, bound) if rendered is not None else None,
            grammar=bound.grammar,
            after=bound.after,
        )

    def _bound(self, request: SubmitText, rendered: Rendered) -> Bound:
        """What the answer of a chat must follow."""
        use, asked = request.tool_use, request.reasoning
        if request.grammar is None and use is None and asked.budget is None:
            return Bound(None)
        functions = read_functions(rendered.tools or (), use.names, use.strict, use.customs) if use is not None else []
        opening = Opening(inside=rendered.inside, closed=rendered.closed, thinks=rendered.thinks, budget=asked.budget)
        return answer_bound(request.grammar, use, functions, self._dialect, opening)

    def _parsing(self, request: SubmitText, rendered: Rendered, bound: Bound) -> Parsing | None:
        """How the answer of a chat is parsed."""
        dialect = self._dialect
        split = request.reasoning.split and not dialect.kept
        reasoning = dialect.reasoning if split and bound.reasons else None
        use = request.tool_use
        called = use is not None
        marked = reasoning is not None or dialect.channels or dialect.kept
        if not marked and not called:
            return None
        return Parsing(
            reasoning=reasoning,
            inside=rendered.inside,
            exact=bool(bound.after),
            channels=dialect.channels,
            calls=dialect.calls if called else None,
            names=frozenset(use.names) if use is not None else frozenset(),
            held=frozenset(use.strict if use.parallel else use.names) if use is not None else frozenset(),
            kinds=parameter_kinds(rendered.tools or ()) if called and dialect.calls in UNTYPED else {},
            customs=frozenset(custom.name for custom in use.customs) if use is not None else frozenset(),
            shown=(dialect.reasoning_marks if marked else frozenset())
            | (dialect.call_marks if called or dialect.channels else frozenset()),
        )

    def _prediction(self, request: SubmitText) -> bytes:
        """Ids of the predicted text, which goes on behind the prompt; none where no draft may be made of them."""
        if not request.prediction or not request.speculate:
            return b""
        return pack("i", self._encode(request.prediction, "prediction", add_special_tokens=False))

    def tokenize(self, request: Tokenize, now: float, pictures: Sequence[Picture] = ()) -> Tokenized:
        check_place(request)
        if request.messages is not None:
            token_ids, _ = self._chat_ids(request, self._renderer.render(request, now), pictures)
        else:
            token_ids = self._encode(request.prompt or "", "prompt", add_special_tokens=request.add_special_tokens)
        strings = tuple(map(self._vocabulary.token, token_ids)) if request.with_strings else None
        return Tokenized(request.id, pack("i", token_ids), strings)

    def detokenize(self, request: Detokenize) -> Detokenized:
        """Raises InvalidRequest for ids outside the vocabulary."""
        token_ids = unpack_token_ids(request.token_ids, "tokens")
        self._check_ids(token_ids, "tokens")
        return Detokenized(request.id, self._vocabulary.decode(token_ids, skip_special_tokens=False))

    def _prompt_ids(
        self, request: SubmitText, rendered: Rendered | None, pictures: Sequence[Picture]
    ) -> tuple[list[int], tuple[Image, ...]]:
        if rendered is not None:
            return self._chat_ids(request, rendered, pictures)
        if request.prompt is not None:
            return self._encode(request.prompt, "prompt", add_special_tokens=request.add_special_tokens), ()
        token_ids = unpack_token_ids(request.prompt_ids or b"", "prompt")
        self._check_ids(token_ids, "prompt")
        return token_ids, ()

    def _chat_ids(
        self, request: SubmitText | Tokenize, rendered: Rendered, pictures: Sequence[Picture]
    ) -> tuple[list[int], tuple[Image, ...]]:
        """The ids of a chat and the images among them."""
        if self._images is None:
            if request.images:
                raise unseen(request)
            return self._text_ids(request, rendered), ()
        assert len(pictures) == len(request.images), "pictures are decoded before a prompt is made of them"
        return self._images.expanded(self._text_ids(request, self._images.opened(rendered)), pictures)

    def _text_ids(self, request: SubmitText | Tokenize, rendered: Rendered) -> list[int]:
        """A template writes the special tokens itself, so requests of chats come without `add_special_tokens`."""
        scope = request.cache_salt if isinstance(request, SubmitText) and self._limits.remember else None
        if not rendered.pieces:
            return self._encode(rendered.text, "messages", add_special_tokens=request.add_special_tokens, scope=scope)
        self._check_length(rendered.text, "messages")
        assert self._controls is not None
        return self._vocabulary.encode_pieces(
            rendered.pieces, self._controls.texts, add_special_tokens=request.add_special_tokens, scope=scope
        )

    def _encode(self, text: str, param: str, *, add_special_tokens: bool, scope: str | None = None) -> list[int]:
        self._check_length(text, param)
        return self._vocabulary.encode(text, add_special_tokens=add_special_tokens, scope=scope)

    def _check_length(self, text: str, param: str) -> None:
        longest = self._limits.max_model_len * self._vocabulary.longest
        if len(text) > longest:
            raise ContextExceeded(
                f"This model's maximum context length is {self._limits.max_model_len} tokens (--max-model-len). "
                f"However, your {param} came to {len(text)} characters, which is more than that many tokens can hold.",
                param=param,
                prompt=-(-len(text) // self._vocabulary.longest),
                wanted=0,
                limit=self._limits.max_model_len,
            )

    def _max_tokens(self, wanted: int | None, prompt: int, param: str, *, clamp: bool) -> int:
        """Tokens that may be generated. A generation_config's max_new_tokens is a habit of a library, not a limit.

        Every request makes a token: of one that wants none it is not told.
        """
        longest = self._limits.max_model_len
        room = longest - prompt
        if wanted is not None and max(wanted, 1) <= room:
            return max(wanted, 1)
        if room > 0 and (wanted is None or clamp):
            return room
        asked = (
            f"you requested {prompt + wanted} tokens ({prompt} in the {param}, {wanted} in the completion)"
            if wanted
            else f"your {param} resulted in {prompt} tokens"
        )
        raise ContextExceeded(
            f"This model's maximum context length is {longest} tokens (--max-model-len). However, {asked}. "
            f"Please reduce the length of the {param}{' or completion' if wanted else ''}.",
            param=param if prompt >= longest or not wanted else "max_tokens",
            prompt=prompt,
            wanted=wanted or 0,
            limit=longest,
        )

    def _sampling(self, request: SubmitText) -> Sampling:
        sampling = request.sampling
        self._check_ids(sampling.stop_token_ids, "stop_token_ids")
        self._check_ids(sampling.allowed_token_ids, "allowed_token_ids")
        self._check_ids((token_id for token_id, _ in sampling.logit_bias), "logit_bias")
        if not all(request.stop):
            raise InvalidRequest("stop must not hold empty strings", param="stop")
        if not request.bad_words:
            return sampling
        found = [ids for word in request.bad_words for ids in self._bad_word(word)]
        return msgspec.structs.replace(sampling, bad_words=sampling.bad_words + tuple(dict.fromkeys(found)))

    def _bad_word(self, word: str) -> list[tuple[int, ...]]:
        """Token ids of a word at the start of a text and, where that is a token of its own, after a space."""
        if not word.strip():
            raise InvalidRequest("bad_words must not hold empty strings", param="bad_words")
        bare = word.lstrip()
        first = tuple(self._vocabulary.encode(bare, add_special_tokens=False))
        spaced = tuple(self._vocabulary.encode(" " + bare, add_special_tokens=False))
        found = [first]
        if len(spaced) == len(first) and spaced[:1] != first[:1]:
            found.append(spaced)
        if not first or len(first) > MAX_BAD_WORD_TOKENS:
            message = f"a bad word must be of 1 to {MAX_BAD_WORD_TOKENS} tokens; one has {len(first)}"
            raise InvalidRequest(message, param="bad_words")
        return found

    def _check_ids(self, token_ids: Iterable[int], param: str) -> None:
        check_ids(token_ids, self._limits.vocab_size, param)

    def _truncated(self, request: SubmitText, token_ids: list[int]) -> list[int]:
        """The last of the prompt's tokens, or the first, as far as the request says how many."""
        if request.truncate == 0:
            return token_ids
        length = kept(request.truncate, self._limits.max_model_len)
        if request.truncate < 0:  # as many as leave room for the output
            length = max(1, length - (request.sampling.max_tokens or 1))
        return part(token_ids, length, request)

    def _opening(self, rendered: Rendered | None) -> str:
        """What the prompt has written of an answer whose reasoning stays in its content."""
        markers = self._dialect.reasoning if self._dialect.kept else None
        return f"{markers.opening}\n" if markers is not None and rendered is not None and rendered.inside else ""

    def _echo(self, request: SubmitText, token_ids: Sequence[int], whole: int) -> str:
        """A text prompt as it came, anything else decoded; `whole` is how many tokens it had before its truncation."""
        if request.prompt is not None and len(token_ids) == whole:
            return request.prompt
        stream = detokenizer(self._vocabulary, skip_special_tokens=request.skip_special_tokens)
        return "".join(map(stream.push, token_ids)) + stream.flush()


def turn_ends(token_ids: Sequence[int], ends: Iterable[int]) -> tuple[int, ...]:
    """Positions of a prompt behind the tokens that end turns, ascending: the first, which ends the system prompt where
    there is one, and the last ones. Templates write these tokens as the model does."""
    found: list[int] = []
    for token in ends:
        found += [place + 1 for place, other in enumerate(token_ids) if other == token]
    found.sort()
    return tuple(found if len(found) <= MOST_TURNS else (found[0], *found[1 - MOST_TURNS :]))
