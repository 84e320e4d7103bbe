"""The rows that the project publishes, as workloads.

Each fixes every request to the last token id, so two servers are given the same load.
"""

from __future__ import annotations

from penstock.services.bench.workload import FREE, Variant, Workload

OBJECT = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 99999},
        "name": {"type": "string", "maxLength": 12},
        "ok": {"type": "boolean"},
    },
    "required": ["id", "name", "ok"],
    "additionalProperties": False,
}  # fmt: skip
LONG_ARRAY = {"type": "array", "items": OBJECT, "minItems": 200, "maxItems": 300}
JSON = Variant(
    "json", {"response_format": {"type": "json_schema", "json_schema": {"name": "rows", "schema": LONG_ARRAY}}}
)
FILTERED = Variant("sampled", {"temperature": 0.8, "top_p": 0.95, "top_k": 40})
SEEDED = Variant("seeded", {"temperature": 0.8, "top_p": 0.95, "top_k": 40, "seed": 1234})
LOGPROBS = Variant("logprobs", {"logprobs": 5})
PENALTIES = Variant("penalties", {"frequency_penalty": 0.5, "presence_penalty": 0.5, "temperature": 0.7})


def closed(name: str, size: tuple[int, int], count: int, concurrency: int, *variants: Variant) -> Workload:
    """A row of fixed lengths in a closed loop."""
    tokens_in, tokens_out = size
    return Workload(name=name, input=(tokens_in, tokens_in), output=(tokens_out, tokens_out), requests=count,
                    concurrency=concurrency, warmup=min(concurrency, 64), variants=variants or (FREE,))  # fmt: skip


ROWS: tuple[Workload, ...] = (
    closed("lat_bs1", (128, 256), 4, 1),
    closed("ttft_128", (128, 256), 8, 1),
    closed("ttft_1024", (1024, 8), 16, 1),
    closed("ttft_8192", (8192, 8), 8, 1),
    closed("ttft_32000", (32000, 8), 4, 1),
    closed("bs8", (512, 256), 16, 8),
    closed("bs64", (512, 256), 128, 64),
    closed("thr_c256", (1024, 256), 512, 256),
    closed("decode_c256", (128, 512), 256, 256),
    Workload(name="mixed_256", input=(100, 1024), output=(100, 1024), requests=256, concurrency=256, warmup=64,
             variants=(FREE,)),
    Workload(name="offline_256", input=(100, 1024), output=(100, 1024), requests=256, concurrency=256, warmup=64,
             temperature=0.6, variants=(FREE,)),
    Workload(name="prefix4k", input=(128, 128), output=(64, 64), requests=128, concurrency=64, prefix=4096,
             variants=(FREE,)),
    closed("free_c64", (128, 256), 128, 64),
    closed("json_c64", (128, 256), 128, 64, JSON),
    closed("json_c1", (128, 256), 4, 1, JSON),
    closed("free_c256", (128, 256), 256, 256),
    closed("json_c256", (128, 256), 256, 256, JSON),
    closed("half_json_c64", (128, 256), 128, 64, JSON, FREE),
    closed("sample_c64", (128, 256), 128, 64, FILTERED),
    closed("half_seeded_c64", (128, 256), 128, 64, SEEDED, FREE),
    closed("logprobs_c64", (128, 256), 128, 64, LOGPROBS),
    closed("penalties_c64", (128, 256), 128, 64, PENALTIES),
)  # fmt: skip
