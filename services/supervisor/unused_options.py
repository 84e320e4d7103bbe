"""Options that are set and change nothing: with this model, on this device, or without another option.

`penstock serve` logs them at the start, with the reason. Such an option is not refused, for one file of options may be
for several machines and models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol import groups
from penstock.protocol.config import Config, fields
from penstock.protocol.media import image_limit
from penstock.protocol.served_models import several
from penstock.protocol.speculation import FLAG, SpeculativeConfig, read_speculative
from penstock.services.supervisor import logs
from penstock.services.tracing.startup import settings_of

log = logging.getLogger(__name__)


class Facts(NamedTuple):
    """What decides whether the options of a model have an effect."""

    config: Config
    spec: ModelSpec
    on_gpu: bool | None  # None: its executors are on other hosts


class Case(NamedTuple):
    """Options, with spaces between them, that have no effect where `holds`."""

    why: str
    holds: Callable[[Facts], bool]
    options: str


CASES = (
    Case("the model runs on a CPU", lambda it: it.on_gpu is False, "enforce_eager tune"),
    Case("the model runs on a CPU", lambda it: it.on_gpu is False and not several(it.config),
         "gpu_memory_utilization base_gpu_id"),
    Case("the model runs on a GPU", lambda it: it.on_gpu is True, "cpu_threads"),
    Case("weights are not random, and requests have seeds of their own",
         lambda it: it.config.model.load_format != "dummy", "seed"),
    Case("the model sees no images", lambda it: it.spec.vision is None and image_limit(it.config.model) > 0,
         "limit_mm_per_prompt"),
    Case("the server takes no images", lambda it: it.spec.vision is None or not image_limit(it.config.model),
         "mm_encoder_cache_tokens mm_encoder_budget media_workers media_timeout media_memory media_max_pixels "
         "media_max_bytes allowed_media_domains"),
    Case("the model has no recurrent layers", lambda it: not it.spec.recurrences, "state_snapshots state_host_memory"),
    Case("the model is an encoder, which caches nothing", lambda it: it.spec.encoder,
         "block_size enable_prefix_caching kv_cache_dtype kv_cache_memory kv_host_memory kv_disk kv_disk_size "
         "kv_store"),
    Case("the model writes no text", lambda it: it.spec.headless,
         "speculative_config tool_call_parser reasoning_parser grammar_workers grammar_compile_timeout "
         "grammar_compile_memory grammar_max_bytes grammar_cache_entries grammar_cache_bytes mask_threads"),
    Case("it needs --enable-lora", lambda it: not it.config.model.enable_lora, "max_loras max_lora_rank max_cpu_loras"),
    Case("it needs --tensor-parallel-size", lambda it: it.config.model.tensor_parallel_size == 1, "expert_parallel"),
    Case("it needs --data-parallel-size", lambda it: it.config.model.data_parallel_size == 1, "placement"),
    Case("it needs --prefill-replicas", lambda it: not it.config.model.prefill_replicas, "max_local_prefill_length"),
    Case("each executor is a group of its own", lambda it: groups.group_size(it.config.model) == 1, "rendezvous"),
    Case("it needs --idle-timeout, --admin-address or several models",
         lambda it: not (it.config.scheduler.idle_timeout or it.config.api.admin_address or several(it.config)),
         "keep_weights"),
    Case("it needs several models", lambda it: not several(it.config), "model_turn max_unloaded_requests"),
    Case("it needs --trust-request-chat-template", lambda it: not it.config.tokenizer.trust_request_chat_template,
         "template_workers template_timeout template_memory"),
    Case("it needs --uds", lambda it: not it.config.api.uds, "uds_mode"),
    Case("it needs --ssl-certfile", lambda it: not it.config.api.ssl_certfile, "ssl_keyfile_password"),
    Case("it needs --ssl-ca-certs", lambda it: not it.config.api.ssl_ca_certs, "ssl_cert_reqs"),
    Case("it needs --allowed-origins", lambda it: not it.config.api.allowed_origins, "allowed_methods allowed_headers"),
    Case("it needs --max-stored-responses", lambda it: not it.config.api.max_stored_responses,
         "max_stored_bytes response_dir"),
    Case("it needs --otlp-endpoint", lambda it: settings_of(it.config.trace) is None,
         "otlp_protocol trace_sampling_ratio trace_steps trace_tokens"),
)  # fmt: skip


def unused_options(models: Sequence[Facts]) -> dict[str, str]:
    """The flags that are set and have no effect on any of the models, each with the reason."""
    found: dict[str, str] = {}
    for field in fields():
        set_for = [it for it in models if getattr(getattr(it.config, field.section), field.name) != field.default]
        cases = [case for case in CASES if field.name in case.options.split()]
        why = [next((case.why for case in cases if case.holds(it)), "") for it in set_for]
        if why and all(why):
            found[field.flag] = why[0]
    drafting = [read_speculative(it.config.scheduler.speculative_config) for it in models]
    for key in ("prompt_lookup_max", "prompt_lookup_min"):
        methods = [it.method for it in drafting if getattr(it, key) != getattr(SpeculativeConfig(), key)]
        if methods and "ngram" not in methods:
            found[f"{FLAG} {key}"] = "method ngram alone looks up"
    return found


def warn_of_unused_options(models: Sequence[Facts]) -> None:
    """A line of the log for each reason."""
    found = unused_options(models)
    for why in dict.fromkeys(found.values()):
        logs.warning(log, "options_without_effect", options=" ".join(each for each in found if found[each] == why),
                     reason=why)  # fmt: skip
