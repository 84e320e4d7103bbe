"""The arithmetic of the results: what is published about one run of one workload.

- ttft: from sending a request (opening a connection included where none was free) to its first token.
- tpot: (last token − first token) / (tokens − 1), one value per request.
- itl: time between consecutive chunks that bring tokens, all requests together; a chunk may bring several tokens when
  a server merges them, `tokens_per_chunk` tells.
- e2e: from sending a request to the end of its response.
- Rates are over the wall time from the first request sent to the last response ended. Failed requests count nowhere
  but among the errors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.services.bench.client import Record

MILLI = 1000.0


class Spread(msgspec.Struct, frozen=True):
    """A distribution in milliseconds."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    completed: int
    failed: int
    errors: dict[str, int]  # kind → how many
    error_examples: dict[str, str]
    seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    total_tokens_per_second: float
    tokens_per_chunk: float
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2e_ms: Spread | None


def spread(seconds: npt.NDArray[np.float64]) -> Spread | None:
    """The distribution of some durations, in milliseconds; None of nothing."""
    if not seconds.size:
        return None
    p50, p90, p99 = np.percentile(seconds, (50, 90, 99)) * MILLI
    rounded = (round(float(value), 4) for value in (seconds.mean() * MILLI, p50, p90, p99, seconds.max() * MILLI))
    return Spread(*rounded)


def summarize(records: Sequence[Record]) -> Summary:
    """The published figures of these requests."""
    good = [record for record in records if not record.error]
    bad = [record for record in records if record.error]
    seconds = max((r.end for r in records), default=0.0) - min((r.start for r in records), default=0.0)
    output, prompt = sum(r.tokens for r in good), sum(r.prompt_tokens for r in good)
    streamed = [r for r in good if r.events]
    long = [r for r in streamed if r.tokens > 1 and r.events > 1]
    gaps = np.frombuffer(b"".join(r.gaps for r in good), dtype=np.float64)
    per_second = 1 / seconds if seconds > 0 else 0.0
    return Summary(
        requests=len(records),
        completed=len(good),
        failed=len(bad),
        errors=dict(Counter(r.error for r in bad).most_common()),
        error_examples={r.error: r.detail for r in reversed(bad) if r.detail},
        seconds=round(seconds, 4),
        prompt_tokens=prompt,
        cached_tokens=sum(r.cached_tokens for r in good),
        output_tokens=output,
        requests_per_second=round(len(good) * per_second, 3),
        output_tokens_per_second=round(output * per_second, 2),
        total_tokens_per_second=round((output + prompt) * per_second, 2),
        tokens_per_chunk=round(output / max(1, sum(r.events for r in good)), 3),
        ttft_ms=spread(np.array([r.first - r.start for r in streamed])),
        tpot_ms=spread(np.array([(r.last - r.first) / (r.tokens - 1) for r in long])),
        itl_ms=spread(gaps),
        e2e_ms=spread(np.array([r.end - r.start for r in good])),
    )
