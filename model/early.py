"""What a process that is about to import PyTorch can begin before: its shared libraries, the GPU, Triton's hash.

`import torch` is most of a warm start (3.6 s of 5.6 on an H200 machine), and it holds the interpreter's lock while it
loads a few gigabytes of libraries. Here another thread loads them first, through the C library's own ``dlopen``: a
foreign call lets go of the lock, which ``ctypes.CDLL`` and an import keep. So the thread that loads the model can read
its tokenizer meanwhile, which is work under the lock. After the libraries the same thread starts CUDA, never during:
the loader and the driver each have a lock, and might want each other's. By the time PyTorch asks, the device is there.

Nothing depends on it. Whatever fails here fails silently, and is met again, with a message, by those who need it. The
variable MONOGRAPH_EARLY=0 turns it off.
"""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

SWITCH = "MONOGRAPH_EARLY"
# Hashing lets go of the interpreter's lock 800 times and would wait the usual 5 ms for it each time.
SWITCH_INTERVAL_S = 0.0005

# One beginning at a time: a second would take the first one's settings of the interpreter for the caller's.
_BEGINNING = threading.Lock()

# What PyTorch loads before its own libraries, in its order: one of an earlier place could otherwise pull in a stranger.
_CUDA_LIBRARIES = (
    ("cublas", "cublasLt"),
    ("cublas", "cublas"),
    ("cudnn", "cudnn"),
    ("cuda_nvrtc", "nvrtc"),
    ("cuda_nvrtc", "nvrtc-builtins"),
    ("cuda_runtime", "cudart"),
    ("cuda_cupti", "cupti"),
    ("cufft", "cufft"),
    ("curand", "curand"),
    ("nvjitlink", "nvJitLink"),
    ("cusparse", "cusparse"),
    ("cusparselt", "cusparseLt"),
    ("cusolver", "cusolver"),
    ("nccl", "nccl"),
    ("nvshmem", "nvshmem_host"),
    ("cufile", "cufile"),
)


class Beginning:
    """Work under way on other threads.

    Args:
        folder: Of the installed PyTorch.
        gpu: Number of the CUDA device to start; None for none.

    Attributes:
        loaded: The libraries that were loaded, once ``join`` has returned.
        started: Whether the device was started, likewise.
    """

    def __init__(self, folder: Path, gpu: int | None) -> None:
        self.loaded: list[Path] = []
        self.started = False
        self._folder = folder
        self._gpu = gpu if (folder / "lib" / "libtorch_cuda.so").exists() else None
        # Found before anything else is loaded, and quick: it tells a machine without a GPU.
        self._driver = None if self._gpu is None else _driver()
        self._threads: list[threading.Thread] = []
        self._begin(self._work)

    def hash_triton(self) -> None:
        """Import Triton and have it hash itself, if a GPU is to be used: its cache of kernels asks for that."""
        if self._driver is not None:
            with suppress(Exception):
                from triton.runtime import cache

                self._begin(cache.triton_key)  # type: ignore[attr-defined, unused-ignore]

    def join(self) -> None:
        """Wait until all of it is done."""
        for thread in self._threads:
            thread.join()

    def _begin(self, work: Callable[[], object]) -> None:
        def quietly() -> None:
            with suppress(Exception):
                work()

        thread = threading.Thread(target=quietly, name="early")
        thread.start()
        self._threads.append(thread)

    def _work(self) -> None:
        libc = ctypes.CDLL(None)
        libc.dlopen.argtypes, libc.dlopen.restype = (ctypes.c_char_p, ctypes.c_int), ctypes.c_void_p
        for path, mode in libraries(self._folder, sys.path):
            if libc.dlopen(os.fsencode(path), mode) is None:
                break  # PyTorch knows other places to look in
            self.loaded.append(path)
        if self._driver is not None and self._gpu is not None:
            self.started = _start_cuda(self._driver, self._gpu)


@contextmanager
def beginning(device: object) -> Iterator[Beginning | None]:
    """Begin what can be, during a ``with`` statement that imports PyTorch; all threads have ended when it has.

    The garbage collector rests meanwhile: an import makes only what stays, and looking through it costs a tenth.

    Args:
        device: As for ``monograph.load``.

    Yields:
        What was begun; None if PyTorch is imported already, while another thread is at it, or where that is not done:
        beside Linux, and if it is turned off.
    """
    folder = _torch_folder()
    if folder is None or not _BEGINNING.acquire(blocking=False):
        yield None
        return
    collects, interval = gc.isenabled(), sys.getswitchinterval()
    gc.disable()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    try:
        begun = Beginning(folder, gpu_number(device))
        try:
            yield begun
        finally:  # a process that ended with CUDA half started would end badly
            begun.join()
    finally:
        sys.setswitchinterval(interval)
        if collects:
            gc.enable()
        _BEGINNING.release()


def gpu_number(device: object) -> int | None:
    """The CUDA device that is to be started, counted as CUDA_VISIBLE_DEVICES has it; None for none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return None  # all are hidden
    match = re.fullmatch(r"(?:auto|cuda)|cuda:(\d{1,3})", str(device))
    return int(match[1] or 0) if match else None


def libraries(folder: Path, places: list[str]) -> Iterator[tuple[Path, int]]:
    """The libraries that ``import torch`` would load first, in its order, and how it loads each.

    Args:
        folder: Of PyTorch.
        places: Where NVIDIA's packages may be installed: ``sys.path``.
    """
    lib, local = folder / "lib", os.RTLD_NOW
    yield lib / "libtorch_global_deps.so", os.RTLD_NOW | os.RTLD_GLOBAL
    if not (lib / "libtorch_cuda.so").exists():
        yield lib / "libtorch_cpu.so", local
        return
    version = re.search(r"^cuda\b[^=]*= *'(\d+)", (folder / "version.py").read_text(), re.MULTILINE)
    if version is None:
        return  # ROCm, or unheard of
    for package, name in _CUDA_LIBRARIES:
        found = (_first(Path(place), package, version[1], f"lib{name}.so.*[0-9]") for place in places)
        path = next(filter(None, found), None)
        if path is not None:
            yield path, local
    yield lib / "libtorch_cuda.so", local


def _first(place: Path, package: str, version: str, pattern: str) -> Path | None:
    for where in (place / "nvidia" / package, place / "nvidia" / f"cu{version}", place / package):
        found = next((where / "lib").glob(pattern), None)
        if found is not None:
            return found
    return None


def _torch_folder() -> Path | None:
    """Where PyTorch is, if it can be begun with."""
    off = os.environ.get(SWITCH, "1").strip().lower() in ("0", "off", "false", "no")
    if off or sys.platform != "linux" or "torch" in sys.modules or "TORCH_USE_RTLD_GLOBAL" in os.environ:
        return None
    try:
        spec = find_spec("torch")
    except (ImportError, ValueError):
        return None
    places = None if spec is None else spec.submodule_search_locations
    return Path(next(iter(places))) if places else None


def _driver() -> Any:
    """NVIDIA's driver library; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def _start_cuda(driver: Any, gpu: int) -> bool:
    """Start the driver and hold the device's primary context, the one that PyTorch uses, until the process ends."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    calls: tuple[Callable[[], int], ...] = (
        lambda: driver.cuInit(0),
        lambda: driver.cuDeviceGet(ctypes.byref(device), gpu),
        lambda: driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    )
    return all(call() == 0 for call in calls)
