"""Server-sent events of one streamed response, put together from bytes that were encoded once.

Per delta only the text is encoded. Shapes: OpenAI API reference, "The chat completion chunk object" and "The completion
object (stream)". The wire format is WHATWG HTML, "Server-sent events"; what some clients' line splitters take for a
line end (U+0085, U+2028, U+2029) is escaped.
"""

from __future__ import annotations

import msgspec

from penstock.protocol.errors import RequestError
from penstock.protocol.messages import PieceKind
from penstock.services.client.output_collector import Choice, OutputCollector, PromptFacts, Segment
from penstock.services.openai import errors
from penstock.services.openai.answers import (
    FINISH_REASONS,
    Identity,
    Remarks,
    ResponseOptions,
    UsageAnswer,
    chat_answer,
    chat_logprobs,
    completion_answer,
    completion_logprobs,
    first_id,
    unpacked,
    with_prompt,
)
from penstock.services.openai.parameters import UsageWanted

ENCODE = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
UNFINISHED = b',"logprobs":null,"finish_reason":null}]'


class SSEEncoder:
    """Encodes the events of one response.

    `chat` tells the two kinds of chunk apart, `usage` says where chunks mention it, `told` what they hold beside text.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        chat: bool,
        choices: int,
        usage: UsageWanted = UsageWanted(),  # noqa: B008 (frozen)
        told: ResponseOptions = ResponseOptions(),  # noqa: B008 (frozen)
    ) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = Head(identity.id, kind, identity.created, identity.model)
        self._identity = identity
        self._opening = b"data: " + ENCODE.encode(head)[:-1] + b',"choices":['
        self._chat = chat
        self._usage = usage
        self._told = told
        self._quiet = b""  # of a delta without reasoning where reasoning is told apart: it says that there is none
        self._echo_logprobs = told.echo and told.logprobs
        self._prompt_first = self._echo_logprobs or told.token_ids
        self._heads = [b""] * choices  # of each choice's text, from its first chunk on
        self._counted = [0] * choices  # output tokens of each that its chunks have told
        self._text_end = b"}" if chat else b""
        self._end = (b',"usage":null' if usage.at_end else b"") + b"}\n\n"
        self._plain_tail = self._text_end + UNFINISHED + self._end

    def response(self, outputs: OutputCollector) -> bytes:
        """The body of a response that is not streamed."""
        body = chat_answer if self._chat else completion_answer
        return ENCODE.encode(body(self._identity, outputs, self._told))

    def take(self, collector: OutputCollector, updated: list[Choice]) -> bytes:
        """Events of everything that the choices of `updated` have to give, which is thereby taken."""
        frames: list[bytes] = []
        for choice in updated:
            if not choice.begun:
                if self._prompt_first and self._waits(collector.prompts[choice.prompt]) and not choice.finish:
                    continue  # what is told of the prompt comes first, and is on its way with another choice
                self._begin(collector, choice, frames)
            text = ""
            if choice.segments.waiting:
                self._segments(collector, choice, frames)
            elif choice.text:  # as `Choice.take_text`, without a call for each token
                text = "".join(choice.text)
                choice.text.clear()
            if choice.logprobs or (choice.token_ids and self._told.token_ids) or (text and self._usage.always):
                frames.append(self._text(collector, choice, text, self._logprobs(choice), self._ids(choice)))
            elif text:
                encoded = ENCODE.encode(text) if text.isascii() else encode_text(text)
                frames.append(self._heads[choice.index] + encoded + self._plain_tail)
            if choice.finish in FINISH_REASONS and collector.error is None:
                frames.append(self._finish(collector, choice))
        return b"".join(frames)

    def end(self, collector: OutputCollector) -> bytes:
        """A chunk without choices where usage was asked for, and the end mark."""
        if not self._usage.at_end:
            return DONE
        usage = ENCODE.encode(UsageAnswer.of(collector.usage))
        return self._opening + b'],"usage":' + usage + b"}\n\n" + DONE

    def failure(self, collector: OutputCollector, error: RequestError) -> bytes:
        """The error object and the end mark."""
        return b"data: " + escaped(errors.encode(error)) + b"\n\n" + DONE

    def _waits(self, prompt: PromptFacts) -> bool:
        """Whether something of the prompt that its first chunk tells is not known yet."""
        return (self._echo_logprobs and prompt.logprobs is None) or (self._told.token_ids and not prompt.token_ids)

    def _begin(self, collector: OutputCollector, choice: Choice, frames: list[bytes]) -> None:
        choice.begun = True
        facts = collector.prompts[choice.prompt]
        if facts.reasons and self._told.reasoning:
            self._quiet = b'"reasoning_content":null,'
        before = b',"delta":{' + self._quiet + b'"content":' if self._chat else b',"text":'
        self._heads[choice.index] = self._opening + b'{"index":%d' % choice.index + before
        ids = b',"prompt_token_ids":' + ENCODE.encode(unpacked(facts.token_ids)) if self._told.token_ids else b""
        if self._chat:
            role = b'{"index":%d,"delta":{"role":"assistant",%b"content":""}' % (choice.index, self._quiet)
            frames.append(self._opening + role + UNFINISHED + ids + self._last(collector))
        elif ids:
            frames.append(self._heads[choice.index] + b'"",' + UNFINISHED[1:] + ids + self._last(collector))
        if self._echo_logprobs and facts.logprobs is not None:
            text = choice.take_text()
            as_ids = self._told.tokens_as_ids
            output = completion_logprobs(choice.take_logprobs(), as_ids=as_ids)
            logprobs = with_prompt(text, facts.logprobs, output, first_id(facts) if as_ids else None)
            frames.append(self._text(collector, choice, text, escaped(ENCODE.encode(logprobs)), self._ids(choice)))

    def _segments(self, collector: OutputCollector, choice: Choice, frames: list[bytes]) -> None:
        """A chunk for each stretch of a parsed output; what is told beside them stands with the first one."""
        for segment in choice.take():
            if segment.kind != PieceKind.REASONING or self._told.reasoning:
                head = self._opening + b'{"index":%d,"delta":' % choice.index
                logprobs, ids = self._logprobs(choice), self._ids(choice)
                tail = (
                    b',"logprobs":' + logprobs + b',"finish_reason":null' + ids + b"}]" + self._last(collector, choice)
                )
                delta = segment_delta(segment, self._told.customs)
                if segment.kind != PieceKind.REASONING:
                    delta = b"{" + self._quiet + delta[1:]
                frames.append(head + delta + tail)

    def _logprobs(self, choice: Choice) -> bytes:
        positions = choice.take_logprobs()
        if not positions:
            return b"null"
        shape = chat_logprobs if self._chat else completion_logprobs
        return escaped(ENCODE.encode(shape(positions, as_ids=self._told.tokens_as_ids)))

    def _ids(self, choice: Choice) -> bytes:
        ids = choice.take_token_ids()
        return b',"token_ids":' + ENCODE.encode(unpacked(ids)) if ids and self._told.token_ids else b""

    def _text(self, collector: OutputCollector, choice: Choice, text: str, logprobs: bytes, ids: bytes) -> bytes:
        tail = self._text_end + b',"logprobs":' + logprobs + b',"finish_reason":null' + ids + b"}]"
        return self._heads[choice.index] + encode_text(text) + tail + self._last(collector, choice)

    def _last(self, collector: OutputCollector, choice: Choice | None = None) -> bytes:
        """The end of a chunk; usage counts what chunks have told, with this one of `choice`."""
        if not self._usage.always:
            return self._end
        if choice is not None:
            self._counted[choice.index] = choice.tokens
        usage = msgspec.structs.replace(collector.usage, completion_tokens=sum(self._counted))
        return b',"usage":' + ENCODE.encode(UsageAnswer.of(usage)) + b"}\n\n"

    def _finish(self, collector: OutputCollector, choice: Choice) -> bytes:
        empty = b',"text":""'
        if self._chat:
            empty = b',"delta":{' + (self._quiet + b'"content":""' if self._quiet else b"") + b"}"
        reason = b',"logprobs":null,"finish_reason":"' + FINISH_REASONS[choice.finish].encode() + b'"'
        if choice.stop_reason is not None:
            reason += b',"stop_reason":' + escaped(ENCODE.encode(choice.stop_reason))
        end = self._last(collector, choice)
        may_remark = collector.versioned or collector.prompts[0].approximations
        if may_remark and (remarks := Remarks.of(collector, choice=choice)) is not msgspec.UNSET:
            end = b',"penstock":' + escaped(ENCODE.encode(remarks)) + end
        return self._opening + b'{"index":%d' % choice.index + empty + reason + b"}]" + end


def segment_delta(segment: Segment, customs: frozenset[str] = frozenset()) -> bytes:
    """OpenAI's delta of a stretch: a call's first one has its id and name, the others more of its arguments, or of the
    input of one of the `customs`."""
    text = encode_text(segment.text)
    match segment.kind:
        case PieceKind.REASONING:
            return b'{"reasoning_content":' + text + b',"reasoning":' + text + b"}"
        case PieceKind.CALL:
            opening = b'{"tool_calls":[{"index":%d,"id":"%b"' % (segment.call, segment.id.encode())
            if segment.text in customs:
                return opening + b',"type":"custom","custom":{"name":' + text + b',"input":""}}]}'
            return opening + b',"type":"function","function":{"name":' + text + b',"arguments":""}}]}'
        case PieceKind.ARGUMENTS if segment.name in customs:
            return b'{"tool_calls":[{"index":%d,"custom":{"input":' % segment.call + text + b"}}]}"
        case PieceKind.ARGUMENTS:
            return b'{"tool_calls":[{"index":%d,"function":{"arguments":' % segment.call + text + b"}}]}"
        case _:
            return b'{"content":' + text + b"}"


class Head(msgspec.Struct, frozen=True):
    """What every chunk of a response begins with."""

    id: str
    object: str
    created: int
    model: str


def encode_text(text: str) -> bytes:
    """`text` as a JSON string that is one line for every reader."""
    return ENCODE.encode(text) if text.isascii() else escaped(ENCODE.encode(text))


def escaped(encoded: bytes) -> bytes:
    for character, escape in LINE_ENDS:
        if character in encoded:
            encoded = encoded.replace(character, escape)
    return encoded
