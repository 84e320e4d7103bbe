"""Server-sent events of one streamed response, put together from bytes that were encoded once.

Per delta only the text is encoded. Shapes: OpenAI API reference, "The chat completion chunk object" and "The completion
object (stream)". The wire format is WHATWG HTML, "Server-sent events"; what some clients' line splitters take for a
line end (U+0085, U+2028, U+2029) is escaped.
"""

from __future__ import annotations

import msgspec

from protocol.errors import RequestError
from services.api import errors
from services.api.answers import COMPLETE, Identity, Remarks, UsageAnswer, finish_reason
from services.api.logprobs import chat_logprobs, completion_logprobs, with_prompt
from services.api.reply import Choice, Reply

ENCODE = msgspec.json.Encoder()
DONE = b"data: [DONE]\n\n"
LINE_ENDS = ((b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029"))
UNFINISHED = b',"logprobs":null,"finish_reason":null}]'


class Frames:
    """Makes the frames of one response.

    `chat` tells the two kinds of chunk apart, `usage` whether chunks mention it, `echo_logprobs` whether a choice's
    first chunk holds the log-probabilities of its prompt.
    """

    def __init__(
        self, identity: Identity, *, chat: bool, choices: int, usage: bool, echo_logprobs: bool = False
    ) -> None:
        kind = "chat.completion.chunk" if chat else "text_completion"
        head = Head(identity.id, kind, identity.created, identity.model)
        self._opening = b"data: " + ENCODE.encode(head)[:-1] + b',"choices":['
        self._chat = chat
        self._echo_logprobs = echo_logprobs
        before = b',"delta":{"content":' if chat else b',"text":'
        self._heads = [self._opening + b'{"index":%d' % index + before for index in range(choices)]
        self._text_end = b"}" if chat else b""
        self._end = (b',"usage":null' if usage else b"") + b"}\n\n"
        self._plain_tail = self._text_end + UNFINISHED + self._end

    def take(self, reply: Reply, news: list[Choice]) -> bytes:
        """Frames of everything that the choices of `news` have to give, which is thereby taken."""
        frames: list[bytes] = []
        for choice in news:
            if not choice.begun:
                if self._echo_logprobs and reply.prompts[choice.prompt].logprobs is None and not choice.finish:
                    continue  # the prompt's logprobs come first, and are on their way with another choice
                self._begin(reply, choice, frames)
            text = choice.take_text()
            if choice.logprobs:
                frames.append(self._with_logprobs(choice, text))
            elif text:
                frames.append(self._heads[choice.index] + encode_text(text) + self._plain_tail)
            if choice.finish in COMPLETE:
                frames.append(self._finish(reply, choice))
        return b"".join(frames)

    def usage(self, reply: Reply) -> bytes:
        """The chunk without choices that ends a stream for which usage was asked."""
        usage = ENCODE.encode(UsageAnswer.of(reply.usage))
        return self._opening + b'],"usage":' + usage + b"}\n\n"

    def _begin(self, reply: Reply, choice: Choice, frames: list[bytes]) -> None:
        choice.begun = True
        if self._chat:
            role = b'{"index":%d,"delta":{"role":"assistant","content":""}' % choice.index
            frames.append(self._opening + role + UNFINISHED + self._end)
        prompt = reply.prompts[choice.prompt].logprobs
        if self._echo_logprobs and prompt is not None:
            text = choice.take_text()
            logprobs = with_prompt(text, prompt, completion_logprobs(choice.take_logprobs()))
            frames.append(self._text(choice.index, text, ENCODE.encode(logprobs)))

    def _with_logprobs(self, choice: Choice, text: str) -> bytes:
        positions = choice.take_logprobs()
        shaped = chat_logprobs(positions) if self._chat else completion_logprobs(positions)
        return self._text(choice.index, text, ENCODE.encode(shaped))

    def _text(self, index: int, text: str, logprobs: bytes) -> bytes:
        tail = self._text_end + b',"logprobs":' + escaped(logprobs) + b',"finish_reason":null}]' + self._end
        return self._heads[index] + encode_text(text) + tail

    def _finish(self, reply: Reply, choice: Choice) -> bytes:
        empty = b',"delta":{}' if self._chat else b',"text":""'
        reason = b',"logprobs":null,"finish_reason":"' + finish_reason(choice.finish).encode() + b'"'
        if choice.stop_reason is not None:
            reason += b',"stop_reason":' + escaped(ENCODE.encode(choice.stop_reason))
        end = self._end
        if reply.approximations:
            end = b',"penstock":' + escaped(ENCODE.encode(Remarks(reply.approximations))) + end
        return self._opening + b'{"index":%d' % choice.index + empty + reason + b"}]" + end


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


def error_frames(error: RequestError) -> bytes:
    """How a stream ends that cannot go on: the error object, then the end mark."""
    return b"data: " + escaped(errors.encode(error)) + b"\n\n" + DONE
