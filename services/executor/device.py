"""The GPU's driver and the kernel's timers, set up before torch is imported."""

from __future__ import annotations

import contextlib
import ctypes

LIBRARY = "libcuda.so.1"
DEVICE_ERROR = "AcceleratorError"  # torch's name for the driver's errors; every later call fails with it again
GROUP_ERRORS = ("DistError", "DistBackendError", "DistNetworkError", "DistStoreError")  # torch's, of a lost member
GLOO = "gloo"  # in the messages of its errors, which have no type of their own
PR_SET_TIMERSLACK = 29  # prctl(2)


def begin_device(index: int) -> None:
    """Open the GPU's driver. It needs no torch and runs outside of Python, so a thread can do it during the imports."""
    if open_device(index):
        open_compiler()


def open_compiler() -> None:
    """Load Triton's own driver module, which it compiles where its cache is empty. It imports no torch."""
    with contextlib.suppress(ImportError):
        from triton.backends.nvidia.driver import CudaUtils

        CudaUtils()


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
