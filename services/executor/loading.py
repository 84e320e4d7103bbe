"""The draft model, and the checks of all weights: hashes of files, the self-test."""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from penstock.engine_core import folder, loading
from penstock.engine_core.distributed.group import Group
from penstock.engine_core.execution.draft_model import Draft
from penstock.engine_core.execution.model_runner import Runner
from penstock.engine_core.execution.self_test import read_probe, trouble, vector_trouble
from penstock.engine_core.loading import load_head
from penstock.engine_core.loading.checksums import check_hash, published_hashes
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import DraftSpec, read_draft
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.weight_files import find_files, stored_names
from penstock.engine_core.tokenizer.codec import read_codec
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.speculation import FLAG, HEADS, WITH_MODEL, read_speculative
from penstock.services.supervisor import logs

log = logging.getLogger(__name__)

OPTION = f"{FLAG} model"
MAX_THREADS = 8


def find_draft(config: Config, target: Path, spec: ModelSpec, length: int) -> DraftSpec | None:
    """The draft model or head for the model in the folder `target`; None without such a method.

    `length` is that of the longest sequence. Raises ModelError for a wrong folder and for an EAGLE head of another
    model, ConfigError for a draft model that does not fit the model.
    """
    asked = read_speculative(config.scheduler.speculative_config)
    if asked.method not in WITH_MODEL:
        return None
    path = folder.draft_folder(asked, target)
    names = stored_names(path) if asked.method in HEADS and config.model.load_format != "dummy" else None
    draft = read_draft(asked.method, path, spec, names)
    if draft.head is None:
        check_draft(path, draft.layers, target, spec, length)
    return draft


def load_weights(config: Config, model: Decoder, path: Path) -> Tower | None:
    """Fill the model and its vision encoder, which is returned where this executor has one. Raises ModelError for a
    wrong tensor."""
    tower = registry.build_tower(model)
    with torch.inference_mode():
        loading.load(model, path, config.model.load_format, config.model.seed, tower)
        pack(model.destinations())
        if tower is not None:
            pack(tower.destinations())
    return tower


def load_draft(config: Config, spec: DraftSpec | None, model: Decoder, length: int, target: Path) -> Draft | None:
    """The draft model of this executor, in the model's dtype on its device; on a stage before the last without weights.

    `spec` is the result of `find_draft`, `target` the model's folder. Raises ModelError for a wrong tensor.
    """
    if spec is None:
        return None
    asked = read_speculative(config.scheduler.speculative_config)
    found = Draft(None, spec.layers, asked.num_speculative_tokens, aux_layers=spec.aux_layers)
    placement = model.placement
    if not placement.group.ends:
        return found
    path, load_format, seed = folder.draft_folder(asked, target), config.model.load_format, config.model.seed + 1
    with torch.inference_mode():
        if spec.head is not None:
            head = load_head(path, model, length, load_format, seed, spec.head)
            pack(head.destinations())
            return replace(found, model=head, weight_bytes=head.weight_bytes)
        draft = registry.build(spec.layers, placement.dtype, placement.device, length, invariant=placement.invariant)
        loading.load(draft, path, load_format, seed)
        pack(draft.destinations())
    return replace(found, model=draft, weight_bytes=draft.weight_bytes)


def check_agreed(config: Config, spec: DraftSpec | None, group: Group) -> None:
    """Raise ConfigError on every member of the group unless all have found the same draft model: it decides about
    layers and collectives, and each member was started with its own options."""
    asked = read_speculative(config.scheduler.speculative_config)
    own = zlib.crc32(msgspec.json.encode((asked.num_speculative_tokens, spec)))
    least, most = group.all_min(own), -group.all_min(-own)
    if not least == own == most:
        text = config.scheduler.speculative_config
        raise ConfigError(FLAG, text, "the executors of a group were started with different ones, or different folders")


def check_draft(path: Path, spec: ModelSpec, target: Path, target_spec: ModelSpec, length: int) -> None:
    """Raise ConfigError unless the draft model has the model's tokens and enough positions.

    Tables may be padded to different sizes, as in models of one family, but both must hold every token.
    """
    if spec.longest < length:
        allowed = f"its positions end at {spec.longest}, but --max-model-len is {length}"
        raise ConfigError(OPTION, str(path), f"{allowed}; give at most {spec.longest}, or another draft model")
    mine, others = read_codec(path).tokens(), read_codec(target).tokens()
    if mine != others:
        place = next((at for at, pair in enumerate(zip(mine, others, strict=False)) if pair[0] != pair[1]), None)
        where = f"{len(mine)} tokens against {len(others)}"
        if place is not None:
            where = f"token {place} is {mine[place]!r} in {path} and {others[place]!r} in {target}"
        raise ConfigError(OPTION, str(path), f"its tokenizer must be the model's ({target}): {where}")
    if spec.vocab_size != target_spec.vocab_size and min(spec.vocab_size, target_spec.vocab_size) < len(mine):
        sizes = f"vocab_size is {spec.vocab_size} in {path} and {target_spec.vocab_size} in {target}"
        raise ConfigError(OPTION, str(path), f"both models must have a row for each of {len(mine)} tokens: {sizes}")


class Verification:
    """Files that are being hashed."""

    def __init__(self, files: int, checks: Sequence[Future[None]]) -> None:
        self._files = files
        self._checks = checks

    def finish(self) -> str:
        """Wait for all of them; the result in words. Raises ModelError for the first damaged file."""
        for check in self._checks:
            check.result()
        if not self._checks:
            return "not verified: nothing names their SHA-256"
        return f"SHA-256 of {len(self._checks)} of {self._files} files"


@contextmanager
def verification(config: Config, index: int, folders: Sequence[Path]) -> Iterator[Verification | None]:
    """Hash the files of these folders that have a published hash, for as long as the context. None where nothing is to
    be checked: weights are random, it is switched off, or another executor of this host does it. Raises ModelError."""
    model = config.model
    if model.load_format == "dummy" or not model.verify_weights or index != config.executor.first_executor:
        yield None
        return
    files: list[Path] = []
    hashes: dict[Path, str] = {}
    for place in folders:
        here = find_files(place)
        files += here
        hashes |= published_hashes(place, here)
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2, len(hashes)))
    pool = ThreadPoolExecutor(threads, "verify")
    try:
        yield Verification(len(files), [pool.submit(check_hash, path, digest) for path, digest in hashes.items()])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def check_output(config: Config, runner: Runner, folder: Path, *, encoder: bool = False) -> None:
    """Run the self-test. If it fails, raises ModelError, or logs a warning where wrong output is allowed."""
    if config.model.load_format == "dummy":
        return
    sizes = runner.sizes
    found = (vector_trouble if encoder else trouble)(runner, read_probe(folder, sizes.vocabulary, sizes.max_model_len))
    if found and not config.model.allow_wrong_output:
        why = "the weights are damaged, or this model is not computed rightly here"
        raise ModelError(f"{folder}: the model failed its self-test: {found}; {why} (--allow-wrong-output serves it)")
    if found:
        logs.warning(log, "output_is_wrong", reason=f"the model failed its self-test: {found}")
