"""Whether a scheduler, and each of its parts, is as empty as a new one: asked after every request has ended."""

from __future__ import annotations

from penstock.engine_core.scheduling.encoder_cache import EncoderCache
from penstock.engine_core.scheduling.request_queue import RequestQueue
from penstock.engine_core.scheduling.running_batch import NON_FINITE, StopTokenCounts
from penstock.engine_core.scheduling.scheduler import Scheduler


def is_idle(scheduler: Scheduler) -> bool:
    """Nothing is left: no request, no step in flight, nothing behind the fence or in the queue."""
    state = scheduler._state
    maps = len(state.requests) + len(state.prefilling) + len(state.kv.in_flight_prefixes) + len(state.quarantine)
    moving = len(state.queue) + len(state.steps.in_flight) + len(state.kv.fence)
    empty = state.slots.free == state.slots.count and state.slots.blocks.committed == 0
    maps += 0 if state.kv.recurrent is None else len(state.kv.recurrent.coming)
    maps += not rows_are_free(state.encoder_cache)
    if (host := state.kv.host) is not None:
        maps += sum(
            map(len, (host.waiting, host.fetching, host.spilling, host.fetches, host.spills, host.transfers.handovers))
        )
        maps += len(state.kv.prefix.copying)
        storage = host.storage
        maps += len(storage.waiting) + len(storage.loading) + len(storage.storing) + len(storage.lookups.open)
        maps += len(storage.loads) + len(storage.stores)
    return maps + moving == 0 and empty and is_clean(state.stop_tokens) and is_empty(state.queue)


def is_clean(counts: StopTokenCounts) -> bool:
    """Whether every token that was added was removed again; the entry of NON_FINITE stays."""
    return counts.ids == {NON_FINITE}


def rows_are_free(cache: EncoderCache) -> bool:
    """Whether no sequence holds rows or waits for them."""
    return not (cache._asked or cache._held or cache._fence or cache.statistics().held)


def is_empty(queue: RequestQueue) -> bool:
    """Whether nothing waits and nothing runs: no client has an account."""
    return not queue._levels
