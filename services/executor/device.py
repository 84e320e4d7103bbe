"""The GPU's driver, the machine's memory and the kernel's timers, without torch."""

from __future__ import annotations

import ctypes
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

from penstock.kernels.triton_names import open_compiler
from penstock.protocol.engine_config import ExecutorConfig

LIBRARY = "libcuda.so.1"
NEEDS_GPU = "it needs a GPU: a CPU's products depend on the batch"  # --batch-invariant does
MAJOR, MINOR = 75, 76  # CUdevice_attribute of the compute capability
DEVICE_ERROR = "AcceleratorError"  # torch's name for the driver's errors; every later call fails with it again
GROUP_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")  # torch's, of a lost member
GLOO = "gloo"  # in the messages of its errors, which have no type of their own
PR_SET_TIMERSLACK = 29  # prctl(2)
MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")
RECLAIMABLE = ("active_file", "inactive_file", "slab_reclaimable")  # lines of memory.stat


def begin_device(index: int) -> None:
    """Open the GPU's driver. It needs no torch and runs outside of Python, so a thread can do it during the imports."""
    if open_device(index):
        open_compiler()


def open_device(index: int, library: str = LIBRARY) -> bool:
    """Have the driver make the primary context of GPU number `index`, which torch shares. Returns whether it did.

    Takes half a second or more, outside of Python. Errors are left to torch to report. Source: CUDA driver API,
    cuDevicePrimaryCtxRetain.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), index):
        return False
    return not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)


def gpu_number(options: ExecutorConfig, index: int) -> int:
    """Of executor number `index`, on its host."""
    return options.base_gpu_id + index - options.first_executor


class Gpu(NamedTuple):
    """A GPU as the driver describes it."""

    memory: int  # bytes
    capability: int  # 90 of sm_90
    name: str


def find_gpus(library: str = LIBRARY) -> tuple[Gpu, ...]:
    """The GPUs that this process may use, CUDA_VISIBLE_DEVICES respected; none without a driver that works.

    Makes no context, so nothing of a GPU is taken. Source: CUDA driver API, cuDeviceTotalMem and cuDeviceGetAttribute.
    """
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return ()
    count, device, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    major, minor, name = ctypes.c_int(), ctypes.c_int(), ctypes.create_string_buffer(256)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return ()
    found = []
    for index in range(count.value):
        if (
            driver.cuDeviceGet(ctypes.byref(device), index)
            or driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), MINOR, device)
            or driver.cuDeviceGetName(name, len(name), device)
        ):
            return ()
        found.append(Gpu(size.value, 10 * major.value + minor.value, name.value.decode(errors="replace")))
    return tuple(found)


def foreign_accelerator(torch: Path | None = None) -> str:
    """What the installed torch was built for, if that is neither CUDA nor a CPU: "ROCm", "XPU", or "".

    torch: its folder. Its version.py is read as text: importing torch takes seconds.
    """
    if torch is None:
        found = importlib.util.find_spec("torch")
        if found is None or found.origin is None:
            return ""
        torch = Path(found.origin).parent
    version = torch / "version.py"
    text = version.read_text() if version.exists() else ""
    for name, variable in (("ROCm", "hip"), ("XPU", "xpu")):
        if re.search(rf"^{variable}\b[^=\n]*=\s*['\"]", text, re.MULTILINE):
            return name
    return ""


def available_memory(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Bytes that this process could still take without swapping: the kernel's estimate, or what the control group
    leaves where that is less. Cached files, a model's own among them, are given back when memory is wanted, so neither
    counts them as taken. Sources: proc(5), MemAvailable; the kernel's cgroup-v2 documentation, memory.max and
    memory.stat."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, current = cgroup / "memory.max", cgroup / "memory.current"
    if limit.exists() and current.exists():
        allowed = limit.read_text().strip()
        if allowed != "max":
            taken = max(0, int(current.read_text()) - reclaimable(cgroup / "memory.stat"))
            available = min(available, max(0, int(allowed) - taken))
    return available


def reclaimable(stat: Path) -> int:
    """Bytes of a control group that the kernel gives back by itself."""
    if not stat.exists():
        return 0
    fields = dict(line.split() for line in stat.read_text().splitlines() if line)
    return sum(int(fields.get(name, 0)) for name in RECLAIMABLE)


def is_device_error(error: BaseException) -> bool:
    """Whether the device's context is lost: only a new process gets a new one."""
    return any(kind.__name__ == DEVICE_ERROR for kind in type(error).__mro__) or "CUDA error" in str(error)


def is_group_error(error: BaseException) -> bool:
    """Whether another member of the group could not be reached, perhaps because it has ended."""
    if type(error).__name__ in GROUP_ERRORS:
        return True
    return isinstance(error, RuntimeError) and GLOO in str(error)


def set_timer_slack(nanoseconds: int) -> None:
    """Set the timer slack of the calling thread and of those that it starts; by default it is 50 microseconds. A
    refusal is ignored. Source: prctl(2), PR_SET_TIMERSLACK."""
    ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(nanoseconds), 0, 0, 0)
