"""A frontend with its neighbours played by the test: an api that collects, a scheduler that says what it likes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import msgspec

from penstock.engine_core.placement.placement import Placement
from penstock.engine_core.text.frontend import Frontend
from penstock.engine_core.text.prompts import Prompter, PromptLimits
from penstock.engine_core.text.template import ChatTemplate
from penstock.protocol.columns import pack, unpack
from penstock.protocol.control import EngineStatus
from penstock.protocol.message import Message
from penstock.protocol.messages import Finish, Rejected, Sampling, SubmitText
from penstock.protocol.outputs import TextBatch, TextExtra, TokenBatch, TokenExtra
from tests.engine_core.tokenizer.vocabularies import CHAT_TEMPLATE, vocabulary

API = 1
STATUS = EngineStatus(
    time=1.0, epoch=1, ready=True, step=1, step_age=0.0, running=0, waiting=0, blocks=8, blocks_free=8, blocks_idle=0,
    block_size=16, max_model_len=512, max_num_seqs=4, device="cpu", dtype="float32", prompt_tokens=0, cached_tokens=0,
    output_tokens=0, finished=0, aborted=0, failed=0, preemptions=0, drain_rate=0.0,
)  # fmt: skip


def make_frontend(
    kind: str = "byte_level", apis: Sequence[int] = (API,), replicas: int = 1, policy: str = "prefix", prefill: int = 0
) -> Frontend:
    found = vocabulary(kind)
    template = ChatTemplate({"default": CHAT_TEMPLATE}, found.names)
    prompter = Prompter(found, template, PromptLimits(found.size, 4096, (found.eos or 0,)))
    frontend = Frontend(found, prompter, Placement(policy, replicas, STATUS.block_size, prefill))
    for api in apis:
        frontend.join_api(api)
    for replica in range(replicas):
        status = msgspec.structs.replace(STATUS, replica=replica)
        frontend.report(status)
        for api in apis:
            assert frontend.outbox(api).next() == status
            frontend.outbox(api).sent()
    return frontend


def submit(frontend: Frontend, request_id: int = 1, api: int = API, **fields: Any) -> None:
    fields.setdefault("sampling", Sampling())
    fields.setdefault("stream", True)
    if "prompt_ids" not in fields:
        fields.setdefault("prompt", "one")
    text = SubmitText(id=request_id, **fields)
    frontend.open(api, text)
    frontend.close(request_id, frontend.make(text, 0.0))


Row = tuple[int, int, Sequence[int], Finish]  # id, choice, token ids, finish


def batch(*rows: Row, extras: Sequence[TokenExtra] = ()) -> TokenBatch:
    return TokenBatch(
        ids=pack("q", [row[0] for row in rows]),
        choices=pack("H", [row[1] for row in rows]),
        counts=pack("i", [len(row[2]) for row in rows]),
        token_ids=pack("i", [token_id for row in rows for token_id in row[2]]),
        finish=pack("B", [row[3] for row in rows]),
        extras=tuple(extras),
    )


class Answer:
    """What an api process has of one choice."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens = 0
        self.finish = Finish.NONE
        self.token_ids: list[int] = []
        self.extras: list[TextExtra] = []
        self.rows = 0


class Client:
    """Collects what goes out to one api process and checks that nothing follows an end."""

    def __init__(self, frontend: Frontend, api: int = API) -> None:
        self._frontend = frontend
        self._api = api
        self.answers: dict[tuple[int, int], Answer] = {}
        self.rejected: dict[int, Rejected] = {}
        self.others: list[Message] = []
        self.batches = 0

    def take(self, limit: int = 1 << 30) -> None:
        """Receive up to `limit` messages."""
        outbox = self._frontend.outbox(self._api)
        for _ in range(limit):
            message = outbox.next()
            if message is None:
                return
            outbox.sent()
            self._receive(message)

    def answer(self, request_id: int = 1, choice: int = 0) -> Answer:
        return self.answers[request_id, choice]

    def _receive(self, message: Message) -> None:
        if isinstance(message, TextBatch):
            self.batches += 1
            self._rows(message)
        elif isinstance(message, Rejected) and message.id not in self.rejected:
            self.rejected[message.id] = message
        else:
            self.others.append(message)

    def _rows(self, message: TextBatch) -> None:
        extras = {extra.row: extra for extra in message.extras}
        keys = list(zip(unpack("q", message.ids), unpack("H", message.choices), strict=True))
        assert len(set(keys)) == len(keys), "a choice has one row in a batch"
        rows = zip(keys, message.text, unpack("i", message.tokens), message.finish, strict=True)
        ids = iter(unpack("i", message.token_ids))
        for row, (key, text, tokens, finish) in enumerate(rows):
            answer = self.answers.setdefault(key, Answer())
            assert not answer.finish, "a row after the terminal one"
            assert key[0] not in self.rejected, "a row after the rejection"
            answer.text += text
            answer.tokens += tokens
            answer.token_ids += islice(ids, tokens)
            answer.finish = Finish(finish)
            answer.rows += 1
            if row in extras:
                answer.extras.append(extras[row])
        assert next(ids, None) is None, "an id for each token and no more"
