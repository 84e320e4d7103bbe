"""The answer while it grows: who is woken when, and what is counted."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from penstock.protocol.errors import (
    DeadlineExceeded,
    GrammarFailure,
    InvalidRequest,
    Overloaded,
    RequestError,
    Unavailable,
)
from penstock.protocol.messages import Finish
from penstock.protocol.outputs import TextExtra
from penstock.services.client.output_collector import Choice, OutputCollector
from penstock.services.metrics.requests import Timings


def collector(*, stream: bool, prompts: int = 1, n: int = 1) -> OutputCollector:
    return OutputCollector(prompts, n, stream=stream, timings=Timings(), now=10.0)


async def test_a_stream_wakes_for_every_step_and_a_whole_answer_for_its_end() -> None:
    streamed, whole = collector(stream=True), collector(stream=False)
    waiting = [asyncio.ensure_future(each.get()) for each in (streamed, whole)]
    await asyncio.sleep(0)
    for each in (streamed, whole):
        each.put(0, "a", 1, Finish.NONE, None, 11.0)
        each.notify()
    await asyncio.sleep(0)
    assert [task.done() for task in waiting] == [True, False]
    whole.put(0, "b", 1, Finish.LENGTH, None, 12.0)
    whole.notify()
    (choice,) = await waiting[1]
    assert choice.take_text() == "ab"
    assert (choice.tokens, choice.finish) == (2, Finish.LENGTH)


class Bucket:
    """A tap whose client reads, or does not."""

    def __init__(self) -> None:
        self.open = True
        self.text = ""

    def __call__(self, collector: OutputCollector, updated: list[Choice]) -> bool:
        if self.open:
            self.text += "".join(choice.take_text() for choice in updated)
        return self.open


async def test_a_tap_takes_what_comes_and_the_task_sleeps_on() -> None:
    streamed, bucket = collector(stream=True, n=2), Bucket()
    waiting = asyncio.ensure_future(streamed.get(bucket))
    await asyncio.sleep(0)
    for text in ("a", "b"):
        streamed.put(0, text, 1, Finish.NONE, None, 11.0)
        streamed.put(1, text.upper(), 1, Finish.NONE, None, 11.0)
        assert bucket.text in ("", "aA")  # not before the batch is complete
        streamed.notify()
    await asyncio.sleep(0)
    assert (bucket.text, waiting.done()) == ("aAbB", False)
    streamed.put(0, "c", 1, Finish.STOP, None, 11.0)
    streamed.notify()
    assert bucket.text == "aAbBc"  # the other choice goes on
    streamed.put(1, "C", 1, Finish.STOP, None, 11.0)
    streamed.notify()
    (choice,) = await waiting  # the end is the task's
    assert (choice.index, choice.take_text(), bucket.text) == (1, "C", "aAbBc")


async def test_a_tap_that_is_shut_wakes_the_task() -> None:
    streamed, bucket = collector(stream=True), Bucket()
    bucket.open = False
    waiting = asyncio.ensure_future(streamed.get(bucket))
    await asyncio.sleep(0)
    streamed.put(0, "a", 1, Finish.NONE, None, 11.0)
    streamed.notify()
    (choice,) = await waiting
    assert (choice.take_text(), bucket.text) == ("a", "")
    bucket.open = True
    streamed.put(0, "b", 1, Finish.NONE, None, 11.0)
    streamed.notify()  # the task is about its own business: it finds the news itself
    assert bucket.text == ""
    assert [choice.take_text() for choice in await streamed.get(bucket)] == ["b"]


async def test_news_that_came_before_anybody_waited() -> None:
    waiting = collector(stream=True)
    waiting.put(0, "a", 1, Finish.NONE, None, 11.0)
    (choice,) = await waiting.get()
    assert choice.take_text() == "a"
    assert choice.take_text() == ""


@pytest.mark.parametrize("stream", [True, False])
async def test_errors_and_departures_end_the_wait(stream: bool) -> None:
    failed, left = collector(stream=stream), collector(stream=stream)
    waiting = [asyncio.ensure_future(each.get()) for each in (failed, left)]
    await asyncio.sleep(0)
    failed.fail(Unavailable("first"))
    failed.fail(Unavailable("second"))
    left.disconnect()
    await asyncio.gather(*waiting)
    assert failed.error is not None
    assert failed.error.message == "first"
    assert left.error is None
    assert left.ended


async def test_rows_after_the_end_change_nothing() -> None:
    waiting = collector(stream=True)
    waiting.put(0, "a", 1, Finish.STOP, None, 11.0)
    waiting.put(0, "b", 1, Finish.LENGTH, None, 12.0)
    (choice,) = await waiting.get()
    assert choice.take_text() == "a"
    assert (choice.finish, choice.tokens) == (Finish.STOP, 1)


def test_usage_counts_each_prompt_once() -> None:
    waiting = collector(stream=False, prompts=2, n=2)
    for index in (1, 0, 3, 2):
        # Choices after the first find the whole prompt in the cache; that is not what the client is told.
        cached = 4 if index % 2 == 0 else 16
        extra = TextExtra(row=0, prompt_tokens=20, cached_tokens=cached)
        waiting.put(index, "a", 3, Finish.STOP, extra, 11.0)
    usage = waiting.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) == (40, 12, 8)


def test_gaps_are_timed_per_choice() -> None:
    timings = Timings()
    waiting = OutputCollector(1, 2, stream=True, timings=timings, now=10.0)
    for time, index in ((10.5, 0), (10.6, 1), (10.7, 0), (10.7, 1)):
        waiting.put(index, "a", 1, Finish.NONE, None, time)
        waiting.notify()
    assert waiting.first_token == 10.5
    first, gaps = timings.first_token.statistics(), timings.inter_token.statistics()
    assert (sum(first.counts), first.total) == (1, pytest.approx(0.5))
    assert (sum(gaps.counts), gaps.total) == (2, pytest.approx(0.3))


def test_token_ids_wait_to_be_taken() -> None:
    whole = collector(stream=False, n=2)
    whole.put(0, "a", 1, Finish.NONE, TextExtra(row=0, prompt_token_ids=b"1234"), 0.0, (), b"5678")
    whole.put(0, "b", 1, Finish.NONE, None, 0.0, (), memoryview(b"9012"))
    whole.put(1, "c", 1, Finish.STOP, None, 0.0)
    first, second = whole.choices
    assert (first.take_token_ids(), first.take_token_ids()) == (b"56789012", b"")
    assert second.take_token_ids() == b""
    assert whole.prompts[0].token_ids == b"1234"


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("gone", code="draining", retry_after=2.0),
        Overloaded("full", retry_after=7.0),
        DeadlineExceeded("late"),
        GrammarFailure("stuck"),
        InvalidRequest("wrong", param="n", code="invalid_value"),
    ],
)
async def test_an_error_is_raised_as_a_copy_so_that_the_kept_one_holds_no_frame(error: RequestError) -> None:
    found = collector(stream=False)
    assert found.failure is None
    found.fail(error)
    with contextlib.suppress(RequestError):
        raise found.failure or AssertionError
    assert found.error is error
    assert error.__traceback__ is None
    assert type(found.failure) is type(error)
    assert (str(found.failure), vars(found.failure)) == (str(error), vars(error))


def test_versions_are_those_of_the_tokens_that_count() -> None:
    """A process that was lost may have told more than it delivered; what is behind a stop string is no output."""
    found = collector(stream=True, n=2)
    found.put(0, "a", 1, Finish.NONE, TextExtra(row=0, weights=((0, "0"),)), 11.0)
    found.put(0, "b", 1, Finish.NONE, TextExtra(row=0, weights=((1, "0"),)), 11.0)
    found.put(0, "c", 0, Finish.NONE, TextExtra(row=0, weights=((2, "1"),)), 11.0)
    assert found.choices[0].versions == [(0, "0")]
    found.put(0, "d", 2, Finish.NONE, TextExtra(row=0, weights=((2, "2"), (3, "3"))), 11.0)
    assert found.choices[0].versions == [(0, "0"), (2, "2"), (3, "3")]
    found.put(0, "e", 0, Finish.STOP, TextExtra(row=0, weights=((4, "4"),)), 11.0)
    found.put(1, "e", 0, Finish.STOP, TextExtra(row=0, weights=((0, "3"),)), 11.0)
    assert found.choices[0].versions == [(0, "0"), (2, "2"), (3, "3")]
    assert found.versions == ["0", "2", "3"]
