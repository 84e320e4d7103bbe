"""Options of the model and the engine: what every process agrees on, what the scheduler and the executors take.

config.py has the other sections, and says what an option is.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from penstock.protocol import limits
from penstock.protocol.option import Option

MOST_EXECUTORS = 512  # of one server; each opens a few descriptors at its scheduler
ON, OFF = "on", "off"  # --fairness
FCFS, PRIORITY = "fcfs", "priority"  # --scheduling-policy
QUANTIZATIONS = ("none", "fp8", "int8", "int4")  # of weights that are rounded while they load
KV_AUTO, KV_MODEL, KV_FP8 = "auto", "bfloat16", "fp8"  # --kv-cache-dtype


# An option stands on two or three lines, not on six.
# fmt: off


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that all processes share; their hash is checked in every handshake."""

    model: Annotated[
        str, Option("folder in Hugging Face layout or hub id; empty: penstock-demo, the embedded model")
    ] = ""
    revision: Annotated[str, Option("hub revision: branch, tag or commit")] = ""
    served_model_name: Annotated[
        str, Option("names that clients use; empty: the model's own; may be repeated", several=True, greedy=True,
                    metavar="NAME")
    ] = ""
    dtype: Annotated[
        str,
        Option("arithmetic type; auto: the checkpoint's on a GPU, on a CPU the same or float32, by a trial",
               choices=("auto", "float32", "bfloat16", "float16")),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        Option("type of cached keys and values; fp8: e4m3 with the checkpoint's scales, or scales of 1; bfloat16: "
               "the same as --dtype; auto: fp8 if the checkpoint says so",
               choices=(KV_AUTO, KV_MODEL, KV_FP8)),
    ] = KV_AUTO
    load_format: Annotated[
        str, Option("where weights come from; auto: from safetensors; dummy: random, for benchmarks",
                    choices=("auto", "safetensors", "dummy"))
    ] = "auto"
    quantization: Annotated[
        str, Option("quantize an unquantized model while it loads: fp8 and int8 by output, int4 in groups",
                    choices=QUANTIZATIONS)
    ] = "none"
    allow_wrong_output: Annotated[
        bool, Option("serve even if the output is known to be wrong, for benchmarks; synthetic_acceptance needs it")
    ] = False
    verify_weights: Annotated[
        bool, Option("check the SHA-256 of weight files if SHA256SUMS, the hub cache or a download has it")
    ] = True
    max_model_len: Annotated[int, Option("max tokens of prompt plus output; 0: the model's own", 0, 1 << 24)] = 0
    block_size: Annotated[int, Option("tokens per KV block", 1, 256)] = 16
    max_num_seqs: Annotated[int, Option("max requests that run at once, counting each of n choices", 1, 4096)] = 256
    max_num_batched_tokens: Annotated[
        int, Option("token budget of one step; 0: 8192 on a GPU, 512 on a CPU", 0, 1 << 20)
    ] = 0
    tensor_parallel_size: Annotated[
        int, Option("GPUs that share every layer (heads, MLP width and vocabulary)", 1, 64)
    ] = 1
    expert_parallel: Annotated[
        bool, Option("each GPU holds whole experts rather than a share of every expert; for mixtures of experts")
    ] = False
    pipeline_parallel_size: Annotated[int, Option("stages that the layers are divided into", 1, 64)] = 1
    data_parallel_size: Annotated[
        int, Option("replicas behind one API; each is a group of GPUs with the whole model and a cache", 1, 64)
    ] = 1
    prefill_replicas: Annotated[
        int, Option("replicas, of --data-parallel-size, that compute prompts for the others, which decode; needs "
                    "--kv-host-memory; 0: each replica does both", 0, 63)
    ] = 0
    pooler: Annotated[
        str,
        Option("hidden state that becomes a text's vector; auto: as the model's folder says, else the last, or for "
               "encoders the mean",
               choices=("auto", "mean", "last", "cls")),
    ] = "auto"
    scorer: Annotated[
        str,
        Option("how pairs of texts are scored: by the cosine of their vectors, or by a yes or no, prompted like "
               "Qwen3-Reranker; auto: by the model's classifier, else as its folder says, else cosine",
               choices=("auto", "cosine", "yes_no")),
    ] = "auto"
    enable_lora: Annotated[bool, Option("serve LoRA adapters together with the model")] = False
    lora_experts: Annotated[bool, Option("allow adapters of routed experts; memory is taken for every expert")] = False
    max_loras: Annotated[int, Option("max different adapters in one step; memory is allocated for each", 1, 1024)] = 8
    max_lora_rank: Annotated[int, Option("max rank of an adapter; memory is allocated for it", 1, 512)] = 16
    max_cpu_loras: Annotated[int, Option("adapters in the host's memory; 0: four times --max-loras", 0, 1 << 16)] = 0
    limit_mm_per_prompt: Annotated[
        str, Option("max images of one prompt, as a number, image=N or {\"image\": N}; 0: the vision encoder is not "
                    "loaded, and images are refused", metavar="LIMIT")
    ] = "16"
    mm_encoder_cache_tokens: Annotated[
        int, Option("image tokens whose embeddings an executor caches; 0: 16384, or what the largest image takes",
                    0, 1 << 22)
    ] = 0
    seed: Annotated[int, Option("seed of dummy weights; requests have a seed of their own", 0, 2**63 - 1)] = 0
    batch_invariant: Annotated[
        bool, Option("make a request's output independent of its batch, to the last bit; needs a GPU")
    ] = False


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the scheduler process."""

    enable_prefix_caching: Annotated[bool, Option("reuse the KV blocks of equal prefixes")] = True
    scheduling_policy: Annotated[
        str,
        Option(
            "order of waiting requests: first come, first served, or by priority, the larger first",
            choices=(FCFS, PRIORITY),
        ),
    ] = FCFS
    fairness: Annotated[
        str,
        Option("on: clients (keys, and within each its users, sessions or connections) take turns, and a client with "
               "nothing running gets a slot of the one with the most; off: requests are served as they arrive",
               choices=(ON, OFF)),
    ] = ON
    max_queued_tokens: Annotated[
        int, Option("max tokens of waiting prompts; beyond it 429 with Retry-After; 0: any number", 0, 1 << 40)
    ] = 8 << 20
    max_queue_time: Annotated[
        float, Option("max seconds that a request waits to begin; beyond it 429 with Retry-After; 0: no limit",
                      0.0, limits.MAX_TIMEOUT)
    ] = 0.0
    overlap: Annotated[bool, Option("plan step k+1 while step k runs")] = True
    speculative_config: Annotated[
        str,
        Option('speculative decoding, as a JSON object like {"method": "ngram", "num_speculative_tokens": 4}; further '
               'keys are prompt_lookup_max and prompt_lookup_min; methods draft_model and eagle need "model", a '
               'folder or hub id; method mtp uses the head in the checkpoint; '
               'empty: only predictions of requests and what a grammar forces',
               metavar="JSON"),
    ] = ""
    grammar_cache_bytes: Annotated[
        int, Option("max bytes of compiled grammars in the scheduler; beyond it 429", 1 << 20, 1 << 40)
    ] = 512 << 20
    mask_threads: Annotated[
        int, Option("threads that fill the masks of structured output; 0: a quarter of the cores, at most 4", 0, 256)
    ] = 0
    status_interval: Annotated[float, Option("seconds between heartbeats", 0.05, 10.0)] = 0.5
    idle_timeout: Annotated[
        float,
        Option("seconds without a request after which executors give their GPUs back, until the next request loads the "
               "model again; 0: never", 0.0, limits.MAX_TIMEOUT)
    ] = 0.0


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the executor processes."""

    device: Annotated[
        str, Option("where the model runs; auto: on a GPU if there is one", choices=("auto", "cpu", "cuda"))
    ] = "auto"
    gpu_memory_utilization: Annotated[float, Option("share of the GPU's memory Penstock may use", 0.05, 0.99)] = 0.9
    kv_cache_memory: Annotated[
        int,
        Option("bytes of KV cache, beside which snapshots of recurrent states take their own; 0: from free memory",
               0, 1 << 50),
    ] = 0
    state_snapshots: Annotated[
        int,
        Option("snapshots of recurrent layers' states that an executor holds for prefix hits; 0: as many as a quarter "
               "of the memory for caches has room for, at most eight for each slot", 0, 1 << 20),
    ] = 0
    state_host_memory: Annotated[
        int, Option("bytes of an executor's host memory for snapshots that have no more room on its GPU", 0, 1 << 50)
    ] = 0
    kv_host_memory: Annotated[
        int,
        Option("bytes of an executor's host memory for KV blocks that have no more room on its GPU, from where prefix "
               "hits come back; pinned at the start; 0: none", 0, 1 << 50),
    ] = 0
    kv_disk: Annotated[
        str, Option("folder of KV blocks on disk, where a later start finds them again; needs --kv-host-memory; "
                    "empty: none", metavar="FOLDER")
    ] = ""
    kv_disk_size: Annotated[int, Option("bytes that each executor's KV blocks may take there", 0, 1 << 50)] = 0
    kv_store: Annotated[
        str, Option("Mooncake store through which servers of the same model share KV blocks, with its settings as "
                    "?NAME=VALUE&...; needs --kv-host-memory; empty: none", metavar="mooncake://HOST:PORT")
    ] = ""
    mm_encoder_budget: Annotated[
        float, Option("share of the device's time that the vision encoder may take while requests are decoded",
                      0.01, 1.0)
    ] = 0.25
    keep_weights: Annotated[
        bool, Option("leave the weights in the host's memory while executors sleep, from where they are loaded sooner "
                     "than from files; takes as many bytes as they have on the GPUs, from the start on")
    ] = False
    enforce_eager: Annotated[bool, Option("never capture CUDA graphs")] = False
    tune: Annotated[
        bool, Option("measure which kernels are fastest for matrix products, at the first start on a chip for which no "
                     "measurements ship; off: rules decide")
    ] = True
    cpu_threads: Annotated[int, Option("torch threads on a CPU; 0: by a trial", 0, 1024)] = 0
    rendezvous: Annotated[
        str,
        Option("where the executors of groups on several hosts meet: the first one's address, a port for each replica "
               "from this one on; empty: a file of the run directory",
               metavar="tcp://HOST:PORT"),
    ] = ""
    first_executor: Annotated[
        int,
        Option("number of this host's first executor, which has its first GPU; `penstock serve` counts them itself",
               0, MOST_EXECUTORS - 1),
    ] = 0
    base_gpu_id: Annotated[
        int, Option("the first GPU of this host's executors, or of each model's where there are several", 0, 63)
    ] = 0
