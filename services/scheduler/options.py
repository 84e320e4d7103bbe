"""What the scheduler is built with: the configuration, the model, and what the executors of the group agree to."""

from __future__ import annotations

import logging

import msgspec

from penstock.engine_core.models.vision_spec import VisionSpec
from penstock.engine_core.scheduling.executor_group import ExecutorGroup
from penstock.engine_core.scheduling.options import SchedulingOptions, SpeculationOptions
from penstock.protocol.adapters import host_adapters
from penstock.protocol.config import Config
from penstock.protocol.engine_config import ON
from penstock.protocol.errors import ConfigError
from penstock.protocol.groups import replica_role
from penstock.protocol.speculation import WITH_MODEL, read_speculative
from penstock.services.links.link import Peer
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)


class ModelFacts(msgspec.Struct, frozen=True):
    """What the scheduler needs to know of the model."""

    max_model_len: int
    vocab_size: int
    encoder: bool = False
    recurrent: bool = False  # it has recurrent layers
    vision: VisionSpec | None = None  # it sees images


def scheduling_options(
    config: Config, facts: ModelFacts, executors: ExecutorGroup[Peer], masks: int, replica: int = 0
) -> SchedulingOptions:
    """For a group that is complete. `masks` is how many a step has room for. Raises ConfigError for steps that have no
    room for an image."""
    model, options = config.model, config.scheduler
    check_step_tokens(facts.vision if executors.encoder_rows else None, executors.step_tokens, model.max_num_seqs)
    places, host_places = executors.state_places if facts.recurrent else (0, 0)
    return SchedulingOptions(
        blocks=executors.blocks,
        block_size=model.block_size,
        windows=executors.first.windows,
        max_model_len=facts.max_model_len,
        max_num_seqs=model.max_num_seqs,
        max_num_batched_tokens=executors.step_tokens,
        vocab_size=facts.vocab_size,
        encoder=facts.encoder,
        prefix_caching=options.enable_prefix_caching and not facts.encoder,
        policy=options.scheduling_policy,
        fairness=options.fairness == ON,
        speculation=speculation_options(config, executors, masks, recurrent=facts.recurrent),
        max_queued_tokens=options.max_queued_tokens,
        max_queue_time=options.max_queue_time,
        stages=model.pipeline_parallel_size,
        ahead=ahead(config),
        depth=depth(config),
        recurrent=facts.recurrent,
        state_places=places,
        state_host_places=host_places,
        host_blocks=executors.host_blocks,
        disk_blocks=executors.disk_blocks,
        kv_store=executors.kv_store,
        copiers=len(executors.caching),
        role=replica_role(replica, model),
        replica=replica,
        addresses=executors.addresses,
        adapter_places=executors.adapter_places,
        adapter_memory=host_adapters(model),
        executors=len(executors.peers),
        encoder_rows=executors.encoder_rows,
        encoders=len(executors.encoding),
        image_token=-1 if facts.vision is None else facts.vision.token_id,
        mutual=facts.vision is not None and facts.vision.mutual,
        trace_tokens=config.trace.trace_tokens,
        epoch=executors.epoch,
    )


def check_step_tokens(vision: VisionSpec | None, tokens: int, max_num_seqs: int) -> None:
    """Raise ConfigError where steps of so many tokens have no room for an image, which one step computes whole, beside
    all sequences that decode."""
    if vision is not None and vision.mutual and tokens < (least := vision.pooled + max_num_seqs - 1):
        why = (
            f"one step computes all {vision.pooled} tokens of an image, beside up to {max_num_seqs - 1} others "
            f"(--max-num-seqs): it must be at least {least}"
        )
        raise ConfigError("--max-num-batched-tokens", tokens, why)


def ahead(config: Config) -> int:
    """Steps that a sequence has in flight, at most: the next one is planned while one runs, or it is not."""
    return 2 if config.scheduler.overlap else 1


def depth(config: Config) -> int:
    """Steps in flight: one for each stage of the pipeline, and with overlap one that waits for the first."""
    return config.model.pipeline_parallel_size - 1 + ahead(config)


def speculation_options(
    config: Config, executors: ExecutorGroup[Peer], masks: int, *, recurrent: bool = False
) -> SpeculationOptions:
    """Drafts are verified under masks, so a step has no more of them than there is room for masks."""
    asked = read_speculative(config.scheduler.speculative_config)
    most = asked.num_speculative_tokens
    if asked.method in WITH_MODEL and most > executors.draft_tokens:
        most = executors.draft_tokens
        logs.warning(log, "fewer_drafts", asked=asked.num_speculative_tokens, executors_make=most,
                        reason="executors were started with another --speculative-config")  # fmt: skip
    options = SpeculationOptions(**(msgspec.structs.asdict(asked) | {"num_speculative_tokens": most}))
    if recurrent:
        options = msgspec.structs.replace(options, max_row_drafts=asked.num_speculative_tokens)
    if not masks:
        return options
    room = max(0, masks - config.model.max_num_seqs)
    return msgspec.structs.replace(options, max_step_drafts=min(options.max_step_drafts, room))
