"""Names of Triton that may change: what happens where they are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import triton

from penstock.kernels.triton_names import (
    cache_folder,
    interpreted,
    open_compiler,
    read_launch,
    set_fp_fusion,
    watch_compilations,
)

ROOT = Path(__file__).parents[2]


def test_an_executor_without_triton_says_so_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.backends.nvidia.driver", None)
    open_compiler()


def test_the_module_brings_neither_triton_nor_torch() -> None:
    """The launcher asks the driver, and must not take the seconds that either takes."""
    script = "import sys, penstock.kernels.triton_names; assert not {'torch', 'triton'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_launch_is_read_as_triton_tells_it() -> None:
    function = SimpleNamespace(preload=print)
    fn = SimpleNamespace(module="m", name="k", jit_function=function)
    assert read_launch(fn, {"specialization_data": "s"}) == ("m", "k", "s", print)
    assert read_launch(fn, {}) is None
    assert read_launch(SimpleNamespace(module="m", name="k"), {"specialization_data": "s"}) is None


def test_products_are_fused_with_sums_whatever_triton_does_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that are started later take it from the environment."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")
    monkeypatch.delitem(vars(triton.knobs.language), "default_fp_fusion", raising=False)
    assert not triton.knobs.language.default_fp_fusion
    assert set_fp_fusion()
    assert triton.knobs.language.default_fp_fusion
    monkeypatch.delitem(vars(triton.knobs.language), "default_fp_fusion")
    assert triton.knobs.language.default_fp_fusion


def test_without_triton_s_settings_the_environment_tells(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert interpreted() is triton.knobs.runtime.interpret
    assert cache_folder() == Path(triton.knobs.cache.dir)
    monkeypatch.setattr(triton, "knobs", SimpleNamespace())
    assert not set_fp_fusion()
    for value, expected in (("1", True), ("true", True), ("0", False)):
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert interpreted() is expected
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert cache_folder() == Path.home() / ".triton" / "cache"


def test_compilations_are_watched_where_triton_tells_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(jit_cache_hook=None, jit_post_compile_hook=None)
    monkeypatch.setattr(triton, "knobs", SimpleNamespace(runtime=runtime))
    assert watch_compilations(id, print)  # type: ignore[arg-type]
    assert (runtime.jit_cache_hook, runtime.jit_post_compile_hook) == (id, print)
    monkeypatch.setattr(triton, "knobs", SimpleNamespace())
    assert not watch_compilations(id, print)  # type: ignore[arg-type]


def test_a_thread_that_opens_the_compiler_waits_for_triton_to_be_imported(tmp_path: Path) -> None:
    """Triton imports its backends. A thread that begins with a backend waits for Triton, and Triton for the backend:
    the interpreter breaks that up by an error."""
    for place in ("triton/backends/nvidia", "scene"):
        (tmp_path / place).mkdir(parents=True)
    (tmp_path / "triton/backends/__init__.py").touch()
    (tmp_path / "triton/backends/nvidia/__init__.py").touch()
    (tmp_path / "triton/__init__.py").write_text("import scene\nscene.import_triton()\n")
    (tmp_path / "triton/backends/nvidia/driver.py").write_text(
        "import scene\nscene.imported.set()\nclass CudaUtils: pass\n"
    )
    (tmp_path / "scene/__init__.py").write_text(
        "from threading import Event, Thread\n"
        "from penstock.kernels.triton_names import open_compiler\n"
        "imported, thread = Event(), Thread(target=open_compiler)\n"
        "def import_triton():\n"
        "    thread.start()\n"
        "    imported.wait(0.2)\n"  # it is not set: the thread waits
        "    import triton.backends.nvidia.driver\n"
    )
    program = "import triton, scene; scene.thread.join(30); assert scene.imported.is_set()"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
