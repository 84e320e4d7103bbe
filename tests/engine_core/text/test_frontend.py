"""The tokenizer process without sockets: every choice ends once, with the right text, whatever crosses."""

from __future__ import annotations

import random
from typing import Any

import pytest

from penstock.engine_core.text.choice import Choice, Delta
from penstock.engine_core.text.frontend import MOST_KEPT, Frontend
from penstock.protocol.columns import pack, unpack
from penstock.protocol.messages import (
    Abort,
    Detokenize,
    Detokenized,
    Finish,
    Rejected,
    Sampling,
    StopHit,
    SubmitText,
    SubmitTokens,
    Tokenize,
)
from penstock.protocol.outputs import TokenExtra
from tests.engine_core.text.streams import API, STATUS, Client, batch, make_frontend, submit
from tests.engine_core.tokenizer.vocabularies import tokenizer, vocabulary

TEXT = "one two three, größe 你好 😀 four"
IDS = tokenizer("byte_level").encode(TEXT).ids
EOS = tokenizer("byte_level").token_to_id("</s>")


def play(frontend: Frontend, client: Client, ids: list[int], finish: Finish = Finish.NONE, request: int = 1) -> None:
    """One token a step, each sent out at once; the last with `finish`."""
    for position, token_id in enumerate(ids):
        last = position == len(ids) - 1
        frontend.batch(batch((request, 0, [token_id], finish if last else Finish.NONE)))
        client.take()


def test_a_stream(frontend: Frontend, client: Client) -> None:
    submit(frontend)
    sent = frontend.upward[0].popleft()
    assert isinstance(sent, SubmitTokens)
    play(frontend, client, [*IDS, EOS], Finish.STOP)
    answer = client.answer()
    assert (answer.text, answer.tokens, answer.finish) == (TEXT, len(IDS) + 1, Finish.STOP)
    assert answer.rows == len(IDS) + 1
    assert answer.extras[0].prompt_tokens == len(unpack("i", sent.token_ids))
    assert all(extra.prompt_tokens is None for extra in answer.extras[1:])
    assert frontend.statistics().requests == 0


def test_whole_answers_are_one_row(frontend: Frontend, client: Client) -> None:
    submit(frontend, stream=False)
    cached = TokenExtra(row=0, cached_tokens=16)
    frontend.batch(batch((1, 0, IDS[:1], Finish.NONE), extras=[cached]))
    play(frontend, client, IDS[1:], Finish.LENGTH)
    answer = client.answer()
    assert (answer.text, answer.tokens, answer.finish, answer.rows) == (TEXT, len(IDS), Finish.LENGTH, 1)
    assert [extra.cached_tokens for extra in answer.extras] == [16]
    assert client.batches == 1


def test_rows_of_a_step_are_one_batch_and_apis_are_apart() -> None:
    frontend = make_frontend(apis=(1, 2))
    clients = Client(frontend, 1), Client(frontend, 2)
    submit(frontend, 1, 1, n=3)
    submit(frontend, 2, 2)
    frontend.batch(batch(*((1, choice, IDS[:2], Finish.NONE) for choice in range(3)), (2, 0, IDS[:3], Finish.NONE)))
    for client in clients:
        client.take()
    assert [client.batches for client in clients] == [1, 1]
    assert sorted(clients[0].answers) == [(1, 0), (1, 1), (1, 2)]
    assert sorted(clients[1].answers) == [(2, 0)]


def test_without_credit_deltas_are_merged_and_nothing_is_lost(frontend: Frontend, client: Client) -> None:
    submit(frontend, sampling=Sampling(logprobs=0))
    submit(frontend, 2)
    for token_id in IDS:
        frontend.batch(batch((1, 0, [token_id], Finish.NONE), (2, 0, [token_id], Finish.NONE)))
    frontend.batch(batch((1, 0, [EOS], Finish.STOP)))
    assert frontend.outbox(API).waiting() == 2
    client.take()
    assert client.batches == 1
    ended, running = client.answer(1), client.answer(2)
    assert (ended.text, ended.tokens, ended.finish) == (TEXT, len(IDS) + 1, Finish.STOP)
    assert (running.text, running.finish) == (TEXT, Finish.NONE)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("size", [1, 2, 5, 100])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_ends_at_once_and_its_confirmation_is_swallowed(
    frontend: Frontend, client: Client, stream: bool, size: int, include: bool
) -> None:
    submit(frontend, stream=stream, stop=("nowhere", "ee, gr"), include_stop=include)
    frontend.upward[0].clear()
    before = "one two thr"
    library = tokenizer("byte_level")
    needed = next(count for count in range(len(IDS)) if "ee, gr" in library.decode(IDS[:count]))
    for start in range(0, len(IDS), size):
        frontend.batch(batch((1, 0, IDS[start : start + size], Finish.NONE)))
        client.take()
    answer = client.answer()
    assert (answer.text, answer.finish, answer.tokens) == (before + "ee, gr" * include, Finish.STOP, needed)
    assert answer.extras[-1].stop_reason == "ee, gr"
    assert list(frontend.upward[0]) == [StopHit(1, 0, needed)]
    assert frontend.statistics().requests == 1
    frontend.batch(batch((1, 0, [], Finish.STOP)))
    client.take()
    assert frontend.statistics().requests == 0


def test_a_stop_string_in_the_schedulers_last_row_needs_no_word(frontend: Frontend, client: Client) -> None:
    submit(frontend, stop=("two",))
    frontend.upward[0].clear()
    frontend.batch(batch((1, 0, IDS, Finish.LENGTH)))
    client.take()
    assert (client.answer().text, client.answer().finish) == ("one ", Finish.STOP)
    assert not frontend.upward[0]
    assert frontend.statistics().requests == 0


def test_a_stop_does_not_match_inside_the_echo(frontend: Frontend, client: Client) -> None:
    submit(frontend, prompt="say four", echo=True, stop=("four", "r on"))
    play(frontend, client, IDS[:3], Finish.LENGTH)
    echoed = "say four" + tokenizer("byte_level").decode(IDS[:3])
    assert (client.answer().text, client.answer().finish) == (echoed, Finish.LENGTH)


def test_stop_strings_count_after_min_tokens(frontend: Frontend, client: Client) -> None:
    submit(frontend, stop=("e",), sampling=Sampling(min_tokens=len(IDS)))
    play(frontend, client, [*IDS, *IDS])
    assert client.answer().text == TEXT + "on"
    assert client.answer().finish is Finish.STOP


@pytest.mark.parametrize(
    ("include", "skip", "text"), [(False, True, "one"), (True, True, "one"), (True, False, "one</s>")]
)
def test_the_token_that_ends_is_text_only_when_asked_for(
    frontend: Frontend, client: Client, include: bool, skip: bool, text: str
) -> None:
    submit(frontend, include_stop=include, skip_special_tokens=skip)
    ids = tokenizer("byte_level").encode("one").ids
    play(frontend, client, [*ids, EOS], Finish.STOP)
    assert (client.answer().text, client.answer().tokens) == (text, len(ids) + 1)


def test_a_stop_token_of_the_request_is_the_reason(frontend: Frontend, client: Client) -> None:
    submit(frontend)
    frontend.batch(batch((1, 0, IDS[:3], Finish.STOP), extras=[TokenExtra(row=0, stop_token=IDS[2])]))
    client.take()
    assert client.answer().text == tokenizer("byte_level").decode(IDS[:2])
    assert client.answer().extras[0].stop_reason == IDS[2]


def test_what_was_held_goes_out_at_the_end(frontend: Frontend, client: Client) -> None:
    submit(frontend, stop=("four five",))
    smile = tokenizer("byte_level").encode(" 😀").ids
    play(frontend, client, [*IDS, *smile[:-1]], Finish.LENGTH)
    text = tokenizer("byte_level").decode([*IDS, *smile[:-1]])
    assert client.answer().text == text
    assert text.endswith("\ufffd") or len(smile) == 1


def test_refusals_go_to_the_client_and_nowhere_else(frontend: Frontend, client: Client) -> None:
    submit(frontend, prompt="", add_special_tokens=False)
    submit(frontend, 2, sampling=Sampling(stop_token_ids=(10**6,)))
    client.take()
    assert [rejected.status for rejected in client.rejected.values()] == [400, 400]
    assert not frontend.upward[0]
    assert frontend.statistics().requests == 0


def test_the_schedulers_rejection_ends_what_is_open(frontend: Frontend, client: Client) -> None:
    submit(frontend, n=2, stop=("two",))
    frontend.batch(batch((1, 0, IDS, Finish.NONE), (1, 1, IDS[:1], Finish.NONE)))
    frontend.reject(Rejected(id=1, status=500, message="lost"))
    client.take()
    assert client.answer(1, 0).finish is Finish.STOP
    assert client.rejected[1].status == 500
    assert frontend.statistics().requests == 0
    frontend.reject(Rejected(id=1, status=500, message="lost"))
    frontend.batch(batch((1, 1, IDS, Finish.STOP)))


def test_a_rejection_of_what_has_ended_is_swallowed(frontend: Frontend, client: Client) -> None:
    submit(frontend, stop=("two",))
    frontend.batch(batch((1, 0, IDS, Finish.NONE)))
    frontend.reject(Rejected(id=1, status=500, message="lost"))
    client.take()
    assert client.answer().finish is Finish.STOP
    assert not client.rejected


def test_an_abort_goes_up_and_its_end_comes_down(frontend: Frontend, client: Client) -> None:
    submit(frontend)
    frontend.upward[0].clear()
    frontend.abort(1)
    frontend.abort(99)
    assert list(frontend.upward[0]) == [Abort(1)]
    frontend.batch(batch((1, 0, IDS[:1], Finish.ABORT)))
    client.take()
    assert client.answer().finish is Finish.ABORT


def test_an_abort_wins_over_a_prompt_being_made(frontend: Frontend, client: Client) -> None:
    request = SubmitText(id=1, prompt="one", n=2, sampling=Sampling())
    frontend.open(API, request)
    assert frontend.wants(1)
    made = frontend.make(request, 0.0)
    frontend.abort(1)
    assert not frontend.wants(1)
    frontend.close(1, made)
    client.take()
    assert [client.answer(1, choice).finish for choice in range(2)] == [Finish.ABORT] * 2
    assert not frontend.upward[0]
    assert frontend.statistics().requests == 0


def test_an_api_that_leaves_has_its_requests_aborted() -> None:
    frontend = make_frontend(apis=(1, 2))
    submit(frontend, 1, 1)
    submit(frontend, 2, 2)
    frontend.open(1, SubmitText(id=3, prompt="one", sampling=Sampling()))
    frontend.upward[0].clear()
    frontend.leave_api(1)
    assert list(frontend.upward[0]) == [Abort(1)]
    frontend.batch(batch((1, 0, IDS[:1], Finish.ABORT), (2, 0, IDS[:1], Finish.NONE)))
    assert frontend.statistics().requests == 1


def test_what_is_wanted_in_one_piece_goes_out_in_large_ones(frontend: Frontend, client: Client) -> None:
    """So that little of it is written again when the tokenizer is lost."""
    submit(frontend, stream=False, sampling=Sampling(logprobs=0))
    for _ in range(MOST_KEPT):
        frontend.batch(batch((1, 0, IDS[:1], Finish.NONE)))
    client.take()
    assert client.answer().tokens == MOST_KEPT
    frontend.batch(batch((1, 0, IDS[:2], Finish.LENGTH)))
    client.take()
    answer = client.answer()
    assert (answer.rows, answer.token_ids) == (2, [IDS[0]] * MOST_KEPT + IDS[:2])


def test_draining_refuses_what_is_new_and_finishes_the_rest(frontend: Frontend, client: Client) -> None:
    submit(frontend, 1)
    frontend.upward[0].clear()
    frontend.draining = True
    submit(frontend, 2)
    assert not frontend.idle()
    frontend.batch(batch((1, 0, IDS, Finish.LENGTH)))
    assert not frontend.idle()
    client.take()
    assert frontend.idle()
    assert client.answer(1).text == TEXT
    assert client.rejected[2].status == 503


def test_status_goes_to_every_api_and_to_those_that_join_later(frontend: Frontend, client: Client) -> None:
    frontend.report(STATUS)
    frontend.report(STATUS)
    client.take()
    assert client.others == [STATUS]
    frontend.join_api(2)
    late = Client(frontend, 2)
    late.take()
    assert late.others == [STATUS]


def test_a_text_that_cannot_be_made_ends_its_request_alone(
    frontend: Frontend, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(frontend, 1, stop=("zzz",))
    submit(frontend, 2)
    frontend.upward[0].clear()
    choice = frontend._requests[1].choices[0]

    def advance(self: Choice, *given: Any) -> Delta:
        if self is choice:
            raise ZeroDivisionError
        return real(self, *given)

    real = Choice.advance
    monkeypatch.setattr(Choice, "advance", advance)
    frontend.batch(batch((1, 0, IDS[:1], Finish.NONE), (2, 0, IDS[:1], Finish.NONE)))
    client.take()
    assert client.answer(1).finish is Finish.ERROR
    assert client.answer(1).extras[-1].error
    assert client.answer(2).finish is Finish.NONE
    assert list(frontend.upward[0]) == [StopHit(1, 0, 0)]
    frontend.batch(batch((1, 0, IDS[:1], Finish.STOP)))
    assert frontend.statistics().requests == 1


def test_a_prompt_that_cannot_be_made_is_an_error_of_its_request(
    frontend: Frontend, client: Client, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(type(vocabulary("byte_level")), "encode", lambda *_, **__: 1 // 0)
    submit(frontend)
    assert isinstance(frontend.answer(Tokenize(id=2, prompt="x"), 0.0), Rejected)
    client.take()
    assert client.rejected[1].status == 500
    assert "Zero" not in client.rejected[1].message
    lines = [(record.getMessage(), record.__dict__["fields"]) for record in caplog.records]
    assert lines == [("prompt_failed", {"request": "1", "trace_id": ""}), ("question_failed", {"request": "2"})]


def test_questions_are_answered(frontend: Frontend) -> None:
    assert frontend.answer(Detokenize(3, pack("i", IDS)), 0.0) == Detokenized(3, TEXT)
    refused = frontend.answer(Detokenize(3, b"x"), 0.0)
    assert isinstance(refused, Rejected)
    assert (refused.id, refused.status) == (3, 400)


@pytest.mark.parametrize("seed", range(30))
def test_random_lives_end_once(seed: int) -> None:
    """Requests of two apis, cut anyhow, with stops, aborts, rejections, lost peers and slow links."""
    chance = random.Random(seed)
    frontend = make_frontend(apis=(1, 2))
    clients = {1: Client(frontend, 1), 2: Client(frontend, 2)}
    expected: dict[int, tuple[int, int]] = {}  # id → api, n
    open_choices: dict[tuple[int, int], int] = {}  # what the scheduler runs → tokens so far
    for request in range(1, 40):
        api, n = chance.choice((1, 2)), chance.choice((1, 1, 3))
        expected[request] = (api, n)
        stop = chance.choice(((), ("two",), ("zzz", "你好")))
        submit(frontend, request, api, n=n, stop=stop, stream=chance.random() < 0.7, echo=chance.random() < 0.3)
        for _ in range(chance.randrange(6)):
            scheduler_turn(chance, frontend, open_choices)
            if chance.random() < 0.1:
                frontend.abort(chance.randrange(1, request + 1))
            clients[chance.choice((1, 2))].take(chance.randrange(4))
    while open_choices or frontend.upward[0]:
        scheduler_turn(chance, frontend, open_choices)
    for api in clients:
        clients[api].take()
    for request, (api, n) in expected.items():
        client = clients[api]
        ended = [key for key, answer in client.answers.items() if key[0] == request and answer.finish]
        assert request in client.rejected or len(ended) == n
    statistics = frontend.statistics()
    assert (statistics.requests, statistics.dispatch.upward, statistics.outward) == (0, 0, 0)


def scheduler_turn(chance: random.Random, frontend: Frontend, running: dict[tuple[int, int], int]) -> None:
    """Take what came up, and give some of the running choices some tokens."""
    ended: list[tuple[int, int, list[int], Finish]] = []
    while frontend.upward[0] and chance.random() < 0.9:
        message = frontend.upward[0].popleft()
        match message:
            case SubmitTokens() if chance.random() < 0.1:
                frontend.reject(Rejected(id=message.id, status=429, message="full"))
            case SubmitTokens():
                running.update({(message.id, choice): 0 for choice in range(message.n)})
            case StopHit(request, choice):
                if running.pop((request, choice), None) is not None:
                    ended.append((request, choice, [], Finish.STOP))
            case Abort(request):
                for key in [key for key in running if key[0] == request]:
                    del running[key]
                    ended.append((*key, [], Finish.ABORT))
    rows = []
    for key in [key for key in running if chance.random() < 0.5]:
        start = running[key]
        count = chance.choice((1, 1, 4))
        running[key] = start + count
        finish = Finish.NONE
        if start + count >= len(IDS):
            finish = chance.choice((Finish.LENGTH, Finish.STOP))
            del running[key]
        rows.append((*key, IDS[start : start + count], finish))
    frontend.batch(batch(*ended, *rows))


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_with_the_text_and_the_prompts_when_asked_for(
    frontend: Frontend, client: Client, stream: bool
) -> None:
    submit(frontend, stream=stream, with_token_ids=True, n=2)
    sent = frontend.upward[0].popleft()
    assert isinstance(sent, SubmitTokens)
    frontend.batch(batch((1, 0, IDS[:1], Finish.NONE), (1, 1, IDS[:2], Finish.NONE)))
    client.take()
    frontend.batch(batch((1, 0, [*IDS[1:], EOS], Finish.STOP), (1, 1, IDS[2:], Finish.LENGTH)))
    client.take()
    first, second = client.answer(1, 0), client.answer(1, 1)
    assert first.token_ids == [*IDS, EOS]
    assert second.token_ids == IDS
    assert [extra.prompt_token_ids for extra in first.extras if extra.prompt_token_ids] == [sent.token_ids]
    assert all(extra.prompt_token_ids is None for extra in second.extras)
    assert first.text == second.text == TEXT


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_end_where_a_stop_string_does(frontend: Frontend, client: Client, stream: bool) -> None:
    submit(frontend, stream=stream, with_token_ids=True, stop=("two",))
    play(frontend, client, IDS)
    answer = client.answer()
    assert answer.token_ids == IDS[: answer.tokens]
    assert 0 < answer.tokens < len(IDS)


def test_nobody_else_gets_the_prompts_token_ids(frontend: Frontend, client: Client) -> None:
    submit(frontend)
    play(frontend, client, [*IDS, EOS], Finish.STOP)
    assert all(extra.prompt_token_ids is None for extra in client.answer().extras)


@pytest.mark.parametrize("stream", [False, True])
def test_without_detokenization_there_are_ids_alone(frontend: Frontend, client: Client, stream: bool) -> None:
    submit(frontend, stream=stream, with_token_ids=True, detokenize=False)
    play(frontend, client, [*IDS, EOS], Finish.STOP)
    answer = client.answer()
    assert answer.text == ""
    assert answer.token_ids == [*IDS, EOS]
