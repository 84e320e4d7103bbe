"""The queue is bounded in tokens and in time: who finds it full or waits in it too long is told when to come again.

Order is not touched by it, and who has had a slot once is not turned away any more.
"""

from __future__ import annotations

from penstock.engine_core.scheduling.lifecycle import end
from penstock.engine_core.scheduling.request import Request
from penstock.engine_core.scheduling.state import State
from penstock.protocol.errors import Overloaded
from penstock.protocol.messages import Finish, Rejected, SubmitTokens

UNKNOWN = 1.0  # seconds to come again in, where nothing has ended lately


def check_room(state: State, message: SubmitTokens) -> None:
    """Raise Overloaded if the prompts that wait leave no room for this one.

    An empty queue takes any, and one that goes on after a crash is not new to the server.
    """
    most, waiting = state.options.max_queued_tokens, state.queue.tokens
    if most and waiting and waiting + len(message.token_ids) // 4 > most and not message.written:
        told = f"prompts of {waiting} tokens are waiting; at most {most} are allowed to (--max-queued-tokens)"
        raise Overloaded(told, retry_after=retry_after(state))


def expire(state: State, now: float) -> None:
    """Turn away who has waited for its first slot for longer than anybody should."""
    most = state.options.max_queue_time
    if not most:
        return
    late = {choice.request: None for choice in state.queue if now - choice.request.since >= most}
    for request in late:
        if not had_slot(request):
            refuse(state, request, most)


def had_slot(request: Request) -> bool:
    """Whether any of it has run, here or where it came from."""
    if request.message.written or request.spawned > len(request.choices):
        return True
    return any(choice.last_step or choice.slot >= 0 for choice in request.choices.values())


def refuse(state: State, request: Request, seconds: float) -> None:
    """End a request of which nothing has run; its client is told after how many seconds it was given up."""
    told = f"the request has waited for {seconds:g} s without a free slot (--max-queue-time)"
    error = Overloaded(told, retry_after=retry_after(state))
    request.spawned = request.message.n  # what waits for its first choice's prompt is refused with it
    for choice in tuple(request.choices.values()):
        end(state, choice, Finish.ABORT)
    state.totals.rejected += 1
    state.outbox(request.source).reject(
        Rejected(
            id=request.message.id, status=error.status, message=error.message, code=error.code,
            retry_after=error.retry_after,
        )
    )  # fmt: skip


def retry_after(state: State) -> float:
    """Seconds in which half of what waits has probably drained, at the rate of late."""
    rate = state.totals.drain_rate
    return len(state.queue) / 2 / rate if rate > 0 else UNKNOWN
