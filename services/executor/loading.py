"""The weights of an executor, from files or the host's memory, and their checks: hashes of files, the self-test."""

from __future__ import annotations

import hashlib
import logging
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
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
from penstock.engine_core.loading.checksums import check_hash, published_hashes
from penstock.engine_core.loading.kept_weights import Part, Parts
from penstock.engine_core.models import registry
from penstock.engine_core.models.decoder import Decoder
from penstock.engine_core.models.draft_spec import DraftSpec, read_draft
from penstock.engine_core.models.eagle import EagleHead, build_head
from penstock.engine_core.models.layers import pack
from penstock.engine_core.models.spec import ModelSpec
from penstock.engine_core.models.vision.tower import Tower
from penstock.engine_core.models.weight_files import find_files, stored_names
from penstock.engine_core.tokenizer.codec import read_codec
from penstock.kernels.chip import chip_of
from penstock.protocol.config import Config
from penstock.protocol.control import FIRST_VERSION
from penstock.protocol.errors import ConfigError, ModelError
from penstock.protocol.speculation import FLAG, HEADS, WITH_MODEL, read_speculative
from penstock.services.executor.kept_weights import KeptWeights
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


def build_draft(config: Config, spec: DraftSpec | None, model: Decoder, length: int) -> Draft | None:
    """The draft model of this executor without its weights, in the model's dtype on its device; on a stage before the
    last there is none, but for what others must know of it. `spec` is the result of `find_draft`."""
    if spec is None:
        return None
    asked = read_speculative(config.scheduler.speculative_config)
    found = Draft(None, spec.layers, asked.num_speculative_tokens, aux_layers=spec.aux_layers)
    placement = model.placement
    if not placement.group.ends:
        return found
    if spec.head is not None:
        return replace(found, model=build_head(spec.head, model, length))
    draft = registry.build(spec.layers, placement.dtype, placement.device, length, invariant=placement.invariant)
    return replace(found, model=draft)


class Loading:
    """The weights of one executor's parts. They are restored from the host's memory where an earlier image of the
    process has kept them, and read from files where it has not, or what was kept turns out to be damaged."""

    def __init__(
        self, config: Config, model: Decoder, tower: Tower | None, draft: Draft | None, folder: Path, kept: KeptWeights,
        key: str,
    ) -> None:  # fmt: skip
        """folder: of the model. key: of all that decides about the weights and their layout."""
        self._config = config
        self._model = model
        self._tower = tower
        self._draft = draft
        self._folder = folder
        self.kept = kept
        self._key = key
        self.path, self.version = "", FIRST_VERSION  # empty: the folder that the server started with
        self.restored = False  # else what the files have was read

    def load(self) -> Draft | None:
        """Restore weights that were kept, or read files. The draft model is returned with its size. Raises ModelError
        for a wrong tensor."""
        table = self.kept.restore(self.parts, self._key, self._model.placement.device)
        if table is not None:
            self.path, self.version, self.restored = table.path, table.version, True
        else:
            self._read()
        if self._draft is None or self._draft.model is None:
            return self._draft
        assert isinstance(self._draft.model, Decoder | EagleHead), "it has weights"
        return replace(self._draft, weight_bytes=self._draft.model.weight_bytes)

    def reserve(self) -> None:
        """Begin to reserve the host's memory for a copy of the weights."""
        self.kept.reserve(self.parts)

    def keep(self, path: str, version: str) -> None:
        """Copy the weights as they are now; path and version are what they have become."""
        self.kept.keep(self.parts, self._key, path, version)

    @property
    def parts(self) -> Parts:
        """All that has weights, by name."""
        found: dict[str, Part] = {"model": self._model}
        found |= {f"pooling {at}": layer for at, layer in enumerate(self._model.projection.layers)}
        if self._tower is not None:
            found["vision"] = self._tower
        if self._draft is not None and self._draft.model is not None:
            assert isinstance(self._draft.model, Decoder | EagleHead), "it has weights"
            found["draft"] = self._draft.model
        return found

    def _read(self) -> None:
        model, asked = self._config.model, read_speculative(self._config.scheduler.speculative_config)
        draft = None if self._draft is None else self._draft.model
        with torch.inference_mode():
            loading.load(self._model, self._folder, model.load_format, model.seed, self._tower)
            if isinstance(draft, EagleHead):
                loading.fill_head(draft, folder.draft_folder(asked, self._folder), model.load_format, model.seed + 1)
            elif isinstance(draft, Decoder):
                loading.load(draft, folder.draft_folder(asked, self._folder), model.load_format, model.seed + 1)
            for part in self.parts.values():
                pack(dict(part.destinations()))


def key_of(
    config: Config, index: int, spec: ModelSpec, draft: DraftSpec | None, dtype: torch.dtype, device: torch.device
) -> str:
    """The same where an executor's weights lie alike, and its steps take the same memory."""
    told = (config.model, config.scheduler.speculative_config, config.executor.enforce_eager, spec, draft, str(dtype),
            chip_of(device).name, str(torch.__version__), index)  # fmt: skip
    return hashlib.sha256(msgspec.json.encode(told)).hexdigest()


def folders_of(config: Config, path: Path, drafting: DraftSpec | None) -> list[Path]:
    """Folders whose weights are read."""
    if drafting is None:
        return [path]
    asked = read_speculative(config.scheduler.speculative_config)
    return list(dict.fromkeys((path, folder.draft_folder(asked, path))))


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
    """Files that are being hashed, unless that has been done: `stamp` tells whether they have changed since."""

    def __init__(self, files: int, checks: Sequence[Future[None]], stamp: str, *, done: bool = False) -> None:
        self.stamp = stamp
        self._files = files
        self._checks = checks
        self._done = done

    def finish(self) -> str:
        """Wait for all of them; the result in words. Raises ModelError for the first damaged file."""
        if self._done:
            return "files have not changed since their SHA-256 was checked"
        for check in self._checks:
            check.result()
        if not self._checks:
            return "not verified: nothing names their SHA-256"
        return f"SHA-256 of {len(self._checks)} of {self._files} files"


@contextmanager
def verification(
    config: Config, index: int, folders: Sequence[Path], verified: str = ""
) -> Iterator[Verification | None]:
    """Hash the files of these folders that have a published hash, for as long as the context. None where nothing is to
    be checked: weights are random, it is switched off, or another executor of this host does it. verified: the stamp of
    files that were hashed before. Raises ModelError."""
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
    stamp = stamp_of(hashes)
    if stamp == verified:
        yield Verification(len(files), (), stamp, done=True)
        return
    threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // 2, len(hashes)))
    pool = ThreadPoolExecutor(threads, "verify")
    try:
        checks = [pool.submit(check_hash, path, digest) for path, digest in hashes.items()]
        yield Verification(len(files), checks, stamp)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def stamp_of(hashes: Mapping[Path, str]) -> str:
    """Of files and the hashes that they should have, as long as neither changes. Raises ModelError for a file that is
    gone."""
    found = hashlib.sha256()
    for path, digest in hashes.items():
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"{path}: {error.strerror}") from None
        found.update(
            f"{path}\0{digest} {status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns}\0".encode()
        )
    return found.hexdigest()


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
