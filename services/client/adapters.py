"""The LoRA adapters that clients may ask for by name.

Names come from --lora-modules, from the folders of --lora-dir when they are first asked for, and from the operator, who
loads and unloads at run time. Api processes exchange no messages, and a client may reach any of them: so what happened
at run time stands in a file of the run directory, which is replaced as a whole and read again when it has changed. It
holds versions as well, so that all processes mean the same content by a name.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from penstock.engine_core.models.adapter_folder import CONFIG, WEIGHTS, adapter_version, read_adapter_folder
from penstock.engine_core.models.spec import ModelSpec
from penstock.protocol.adapters import NAME, read_modules
from penstock.protocol.config import Config
from penstock.protocol.errors import ConfigError, InvalidRequest, ModelError, invalid
from penstock.protocol.messages import Adapter
from penstock.services.supervisor.run_directory import private, replace_file

FILE, LOCK = "adapters.json", "adapters.lock"
FOLDER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of --lora-dir, as a request may name it
CHANGES = msgspec.json.Decoder(dict[str, Adapter | None])


class AdapterNames:
    """Names → adapters. `changes` of the run directory go before what the options say; None: unloaded."""

    def __init__(self, config: Config, spec: ModelSpec, own: tuple[str, ...]) -> None:
        """own: the model's names, which no adapter may have: ConfigError. A folder of --lora-modules that cannot be
        read is as if it were unloaded; `check` tells before a server starts, and no api process dies of it later."""
        self._spec, self._own, self._model = spec, own, config.model
        self._file = Path(config.run.run_dir) / FILE if config.run.run_dir else None
        self.directory = Path(config.api.lora_dir).resolve() if config.api.lora_dir else None
        if self.directory is not None and not os.path.isdir(self.directory):
            raise ConfigError("--lora-dir", config.api.lora_dir, "it must be a directory")
        self._folders: dict[str, Path] = {}  # of --lora-modules
        self._fixed: dict[str, Adapter] = {}
        for module in read_modules(config.api.lora_modules):
            if module.name in own:
                raise ConfigError("--lora-modules", module.name, "the model itself has this name")
            folder = self._folders[module.name] = Path(module.path).expanduser().resolve()
            with suppress(ModelError):
                self._fixed[module.name] = Adapter(module.name, str(folder), adapter_version(folder))
        self._changes: dict[str, Adapter | None] = {}
        self._seen: tuple[int, int] | None = None  # inode and time of change of the file as it was read
        self._refresh()

    def check(self) -> None:
        """Read the headers of all that --lora-modules names. Raises ModelError for the first that cannot be served."""
        for name, folder in self._folders.items():
            self._look(name, folder)

    def find(self, name: str) -> Adapter | None:
        """The adapter of this name; None: there is none. Raises InvalidRequest for a folder of --lora-dir that cannot
        be served."""
        self._refresh()
        if name in self._changes:
            return self._changes[name]
        if name in self._fixed:
            return self._fixed[name]
        if self.directory is None or not FOLDER.fullmatch(name) or not os.path.isfile(self.directory / name / CONFIG):
            return None
        return self._change(name, self._checked(name, self.directory / name), again=False)

    def names(self) -> tuple[str, ...]:
        """All that have been loaded."""
        self._refresh()
        return tuple(name for name, adapter in (self._fixed | self._changes).items() if adapter is not None)

    def load(self, name: str, path: str) -> Adapter:
        """Have a name mean what a folder below --lora-dir holds now. Raises InvalidRequest."""
        assert self.directory is not None
        if not NAME.fullmatch(name) or name in self._own:
            why = "the model itself has this name" if name in self._own else "it has letters, digits and . _ : @ / + -"
            raise invalid("lora_name", f": {why}")
        found = self._change(name, self._checked(name, self.directory / path, "lora_path"), again=True)
        assert found is not None
        return found

    def given(self, name: str, path: str) -> Adapter:
        """What a folder of this machine holds now, for who may name any: a program, no client. Raises
        InvalidRequest."""
        return self._served(name, Path(path).expanduser().resolve(), "lora_request")

    def unload(self, name: str) -> None:
        """No request finds the name any more; those that run go on. A folder of --lora-dir stays unloaded as well."""
        self._change(name, None, again=True)

    def _checked(self, name: str, folder: Path, param: str = "model") -> Adapter:
        """Raises InvalidRequest unless the folder is an adapter, all of it below --lora-dir, whatever links say."""
        assert self.directory is not None
        found = folder.resolve()
        inside = [(found / part).resolve().is_relative_to(self.directory) for part in ("", CONFIG, WEIGHTS)]
        if not all(inside) or found == self.directory:
            message = "the adapter's folder and its files must be below --lora-dir"
            raise InvalidRequest(message, param="lora_path")
        return self._served(name, found, param)

    def _served(self, name: str, folder: Path, param: str) -> Adapter:
        try:
            return self._read(name, folder)
        except ModelError as error:
            message = str(error).replace(f"{folder}/", "").replace(f"{folder}: ", "")
            raise InvalidRequest(message, param=param, code="adapter_failed") from None

    def _read(self, name: str, folder: Path) -> Adapter:
        self._look(name, folder)
        return Adapter(name, str(folder), adapter_version(folder))

    def _look(self, name: str, folder: Path) -> None:
        try:
            read_adapter_folder(folder, self._spec, self._model.max_lora_rank, experts=self._model.lora_experts)
        except ModelError as error:
            raise ModelError(f"the adapter {name!r} cannot be served: {error}") from None

    def _change(self, name: str, adapter: Adapter | None, *, again: bool) -> Adapter | None:
        """Let every api process know. `again`: whatever another one has said of the name."""
        with self._locked():
            self._refresh()
            if again or name not in self._changes:
                self._changes[name] = adapter
                if self._file is not None:
                    replace_file(self._file, msgspec.json.encode(self._changes))
        return self._changes[name]

    @contextmanager
    def _locked(self) -> Iterator[None]:
        if self._file is None:
            yield
            return
        with open(self._file.with_name(LOCK), "wb", opener=private) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process holds it for one write
            yield

    def _refresh(self) -> None:
        if self._file is None:
            return
        with suppress(FileNotFoundError):  # nothing has happened at run time
            found = os.stat(self._file)
            if (found.st_ino, found.st_mtime_ns) != self._seen:
                self._seen = found.st_ino, found.st_mtime_ns
                self._changes = CHANGES.decode(self._file.read_bytes())
