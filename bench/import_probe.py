"""Where the time before the first token goes that is not ours: importing PyTorch, loading its libraries, starting CUDA.

Every figure is the median over processes of its own; this process imports neither PyTorch nor Triton, so that it maps
none of their files. The steps:

- "import": `import torch` alone; with the garbage collector off; CPU time of user and system beside the wall clock;
  page faults; modules without a compiled file on disk (Python compiles those at every start).
- "libraries": each shared library that `import torch` loads, by `dlopen`, in the order in which it does that itself.
- "cuda": the driver and the device's primary context through the driver's own library, and through PyTorch.
- "triton": its import, and the hash of its own files before the first kernel.
- "cold": the same import after the files have left the page cache, alone and with threads that read ahead.
- "overlap": from nothing to a tensor on the device, a tokenizer and Triton's hash; one after another, and overlapped.
- "modules": what `python -X importtime` has at the top.

Run: python bench/import_probe.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 300

# Runs before each script: a clock, a place for figures, and how to load a library without the interpreter's lock.
HEAD = """
import time
BEGAN = time.perf_counter()
import ctypes, importlib.util, json, os, resource, sys, threading
found = {}
class took:
    def __init__(self, name): self.name = name
    def __enter__(self): self.began = time.perf_counter()
    def __exit__(self, *error): found[self.name] = found.get(self.name, 0.0) + time.perf_counter() - self.began
libc = ctypes.CDLL(None)
libc.dlopen.restype = ctypes.c_void_p
def dlopen(path, flags=2): return libc.dlopen(os.fsencode(path), ctypes.c_int(flags)) is not None
def folder(package): return importlib.util.find_spec(package).submodule_search_locations[0]
def lib(name): return os.path.join(folder("torch"), "lib", name)
def libraries():
    import glob
    yield lib("libtorch_global_deps.so"), 0x102
    for name in ("cublasLt", "cublas", "cudnn", "nvrtc", "nvrtc-builtins", "cudart", "cupti", "cufft", "curand",
                 "nvJitLink", "cusparse", "cusparseLt", "cusolver", "nccl", "nvshmem_host", "cufile"):
        for path in sys.path:
            places = glob.glob(f"{path}/nvidia/*/lib/lib{name}.so.*[0-9]")
            if places:
                yield places[0], 2
                break
    for name in ("libc10.so", "libtorch_cpu.so", "libc10_cuda.so", "libtorch_cuda.so"):
        if os.path.exists(lib(name)):
            yield lib(name), 2
def context():
    with took("libcuda.so.1"): driver = ctypes.CDLL("libcuda.so.1")
    with took("cuInit"): error = driver.cuInit(0)
    held = ctypes.c_void_p()
    with took("primary context"): error = error or driver.cuDevicePrimaryCtxRetain(ctypes.byref(held), 0)
    if error: raise OSError(f"CUDA error {error}")
"""
TAIL = "\nfound['total'] = time.perf_counter() - BEGAN\nprint(json.dumps(found), flush=True)\n"

IMPORT = """
if OPTION == "gc off":
    import gc; gc.disable()
before = resource.getrusage(resource.RUSAGE_SELF)
with took("import torch"): import torch
after = resource.getrusage(resource.RUSAGE_SELF)
found |= {"user": after.ru_utime - before.ru_utime, "system": after.ru_stime - before.ru_stime,
          "major faults": after.ru_majflt - before.ru_majflt, "minor faults": after.ru_minflt - before.ru_minflt,
          "blocks read": after.ru_inblock - before.ru_inblock, "modules": len(sys.modules)}
cached = [getattr(module, "__cached__", None) for module in list(sys.modules.values())]
found["without .pyc"] = sum(isinstance(path, str) and not os.path.exists(path) for path in cached)
"""
LIBRARIES = """
for path, flags in libraries():
    with took(os.path.basename(path)): loaded = dlopen(path, flags)
    if not loaded: found[os.path.basename(path) + " (failed)"] = found.pop(os.path.basename(path))
with took("import torch after them"): import torch
"""
CUDA_DRIVER = """
context()
with took("import torch"): import torch
with took("is_available"): torch.cuda.is_available()
with took("first tensor"): torch.empty(1, device="cuda"); torch.cuda.synchronize()
"""
CUDA_TORCH = CUDA_DRIVER.replace("context()\n", "")
TRITON = """
with took("import triton"): import triton
with took("triton_key"): triton.runtime.cache.triton_key()
with took("import torch"): import torch
with took("driver"): torch.cuda.is_available() and triton.runtime.driver.active.get_current_target()
"""
COLD = """
def files():
    import glob
    for top in (folder("torch"), folder("triton"), *glob.glob(os.path.dirname(folder("torch")) + "/nvidia")):
        for where, _, names in os.walk(top):
            wanted = [name for name in names if name.endswith((".so", ".pyc", ".py")) or ".so." in name]
            yield from (os.path.join(where, name) for name in wanted)
def advise(path, advice):
    try: handle = os.open(path, os.O_RDONLY)
    except OSError: return
    try: os.posix_fadvise(handle, 0, 0, advice)
    finally: os.close(handle)
def read(path):
    handle = os.open(path, os.O_RDONLY)
    try:
        while os.read(handle, 16 << 20): pass
    finally: os.close(handle)
paths = list(files())
for path in paths: advise(path, os.POSIX_FADV_DONTNEED)
BEGAN = time.perf_counter()
large = sorted((path for path in paths if os.path.getsize(path) > 1 << 20), key=os.path.getsize, reverse=True)
if OPTION == "advised":
    with took("advising"): [advise(path, os.POSIX_FADV_WILLNEED) for path in large]
if OPTION == "read by 8 threads":
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(8)
    pending = [pool.submit(read, path) for path in large if "/torch/lib/" in path or "/nvidia/" in path]
before = resource.getrusage(resource.RUSAGE_SELF)
with took("import torch"): import torch
after = resource.getrusage(resource.RUSAGE_SELF)
found |= {"major faults": after.ru_majflt - before.ru_majflt, "blocks read": after.ru_inblock - before.ru_inblock}
"""
OVERLAP = """
parts = OPTION.split("+")
def load():
    with took("(libraries)"): [dlopen(*library) for library in libraries()]
def start():
    try: context()
    except OSError as fault: found["(no context)"] = 0.0
if "gc" in parts:
    import gc; gc.disable()
with took("import tokenizers"): import tokenizers
threads = [threading.Thread(target=job) for name, job in (("cuda", start), ("libs", load)) if name in parts]
for thread in threads: thread.start()
def tokenizer():
    with took("tokenizer"): tokenizers.Tokenizer.from_file(TOKENIZER)
if "libs" in parts: tokenizer()
with took("import torch"): import torch
with took("import triton"): import triton
def key():
    with took("(triton_key)"): triton.runtime.cache.triton_key()
    if torch.cuda.is_available():
        triton.runtime.driver.active.get_current_target()
        with took("(first tensor)"): torch.empty(1, device="cuda"); torch.cuda.synchronize()
side = threading.Thread(target=key); side.start()
if "libs" not in parts: tokenizer()
with took("waiting for the rest"): [thread.join() for thread in (side, *threads)]
"""
SCRIPTS = {
    "import": (IMPORT, ("", "gc off")),
    "libraries": (LIBRARIES, ("",)),
    "cuda": (CUDA_DRIVER, ("by the driver's library",)),
    "cuda by torch": (CUDA_TORCH, ("",)),
    "triton": (TRITON, ("",)),
    "overlap": (OVERLAP, ("serial", "gc", "cuda", "cuda+gc", "libs", "cuda+libs", "cuda+libs+gc")),
    "cold": (COLD, ("alone", "advised", "read by 8 threads")),
}


def run(script: str, option: str, tokenizer: str) -> dict[str, float]:
    """Run one script in a process and return what it found; of one that fails, the reason under "fault"."""
    text = f"OPTION = {option!r}\nTOKENIZER = {tokenizer!r}\n{HEAD}{script}{TAIL}"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    if done.returncode != 0:
        return {f"fault: {done.stderr.strip().splitlines()[-1][:160]}": 0.0}
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def probe(name: str, option: str, rounds: int, tokenizer: str) -> dict[str, Any]:
    """The medians of one script."""
    script = SCRIPTS[name][0]
    starts = [run(script, option, tokenizer) for _ in range(rounds)]
    keys = list(dict.fromkeys(key for start in starts for key in start))
    return {
        "step": name,
        "option": option,
        **{key: round(statistics.median(start.get(key, 0.0) for start in starts), 4) for key in keys},
    }


def modules(count: int) -> dict[str, Any]:
    """What the import of PyTorch is made of, in seconds: modules by their own time, and sums by top-level package."""
    command = [sys.executable, "-X", "importtime", "-c", "import torch"]
    lines = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False).stderr.splitlines()
    own: dict[str, float] = {}
    whole: dict[str, float] = {}
    for line in lines:
        cells = line.removeprefix("import time:").split("|")
        if len(cells) == 3 and cells[0].strip().isdigit():
            name = cells[2].strip()
            own[name] = own.get(name, 0.0) + int(cells[0]) / 1e6
            whole[name] = int(cells[1]) / 1e6
    packages: dict[str, float] = defaultdict(float)
    for name, seconds in own.items():
        top = name.partition(".")[0]
        packages["(standard library)" if top in sys.stdlib_module_names else top] += seconds

    def top(times: dict[str, float]) -> dict[str, float]:
        return {name: round(times[name], 4) for name in sorted(times, key=times.__getitem__, reverse=True)[:count]}

    return {"step": "modules", "own_s": top(own), "cumulative_s": top(whole), "package_s": top(packages)}


def show(row: dict[str, Any]) -> None:
    """Print one row: times in seconds as they were taken, small ones of libraries left out."""
    print(f"{row['step']} {row.get('option', '')}".strip(), flush=True)
    for name, value in row.items():
        if isinstance(value, dict):
            print(f"  {name}")
            for inner, seconds in value.items():
                print(f"    {seconds:9.3f}  {inner}")
        elif isinstance(value, int | float) and not (".so" in name and value < 0.005):
            print(f"  {value:11.3f}  {name}", flush=True)


def facts() -> dict[str, str]:
    """The machine, asked of a process that may import PyTorch."""
    code = "import json, torch, bench.common as c; print(json.dumps(c.machine_facts(torch.device(c_device))))"
    code = code.replace("c_device", "'cuda' if torch.cuda.is_available() else 'cpu'")
    done = subprocess.run([sys.executable, "-c", code], env=_environment(), capture_output=True, text=True, check=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def _write_tokenizer(folder: str) -> str:
    code = f"import pathlib, bench.startup as s; s.write_tokenizer(pathlib.Path({folder!r}), 128256)"
    subprocess.run([sys.executable, "-c", code], env=_environment(), check=True, timeout=LIMIT_S)
    return str(Path(folder) / "tokenizer.json")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", default=",".join([*SCRIPTS, "modules"]), help="with commas")
    parser.add_argument("--top", type=int, default=25, help="modules to list")
    parser.add_argument("--json", type=Path, default=None, help="where to write")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = _write_tokenizer(folder)  # and the files of PyTorch are in the page cache from here on
        for step in args.steps.split(","):
            options = SCRIPTS[step][1] if step != "modules" else ("",)
            for option in options:
                found = modules(args.top) if step == "modules" else probe(step, option, args.rounds, tokenizer)
                rows.append(found)
                show(found)
    if args.json is not None:
        args.json.write_text(json.dumps({**facts(), "rows": rows}, indent=1) + "\n")
        print(f"-> {args.json}")


if __name__ == "__main__":
    main()
