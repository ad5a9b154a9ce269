"""CUDA C++ compiled at run time with NVRTC, which comes with torch: no nvcc, no headers, cubins kept on disk."""

import ctypes
import hashlib
import os
import site
import sys
from functools import cache
from pathlib import Path

from diffkv_repro.core.files import atomic_path
from diffkv_repro.core.paths import cache_dir

_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # of CUfunction_attribute


class CompileError(RuntimeError):
    """NVRTC refused the source; the message is its log."""


@cache
def _nvrtc() -> ctypes.CDLL:
    places = [Path(place) for place in (*sys.path, *site.getsitepackages()) if place]
    found = [file for place in dict.fromkeys(places) for file in sorted(place.glob("nvidia/*/lib/libnvrtc.so.*"))]
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    found += sorted(Path(home).glob("lib64/libnvrtc.so*"))
    for name in [*map(str, found), "libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]:
        if ".alt." in name:
            continue
        try:
            # NVRTC opens its builtins by bare name, which finds them only where they are loaded already.
            for builtins in Path(name).parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise OSError(
        "libnvrtc was not found: it comes with a CUDA build of torch, with `pip install nvidia-cuda-nvrtc`, or with "
        "the CUDA toolkit (CUDA_HOME)"
    )


@cache
def available() -> bool:
    """Whether NVRTC can be loaded."""
    try:
        _nvrtc()
    except OSError:
        return False
    return True


def compile_cubin(source: str, defines: dict[str, int], arch: str, headers: dict[str, str] | None = None) -> bytes:
    """Machine code of ``source`` for ``arch`` (``sm_90``); from disk the second time.

    ``defines`` are preprocessor symbols, ``headers`` the texts of the files that it includes, by name.

    Raises :class:`CompileError` with the compiler's log, ``OSError`` where there is no NVRTC.
    """
    library = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--device-as-default-execution-space"]
    options += [f"-D{name}={value}" for name, value in defines.items()]
    headers = headers or {}
    key = hashlib.sha256(
        repr((source, sorted(headers.items()), options, major.value, minor.value)).encode()
    ).hexdigest()[:24]
    kept = cache_dir() / "cubin" / f"{key}.cubin"
    if kept.exists():
        return kept.read_bytes()
    program = ctypes.c_void_p()
    texts, names = (
        (ctypes.c_char_p * len(headers))(*(part.encode() for part in side)) for side in (headers.values(), headers)
    )
    created = library.nvrtcCreateProgram(
        ctypes.byref(program), source.encode(), b"kernel.cu", len(headers), texts, names
    )
    _check(library, created)
    try:
        arguments = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        if library.nvrtcCompileProgram(program, len(options), arguments):
            size = ctypes.c_size_t()
            library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            library.nvrtcGetProgramLog(program, log)
            raise CompileError(log.value.decode(errors="replace"))
        size = ctypes.c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, code))
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    kept.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(kept) as temporary:
        temporary.write_bytes(code.raw)
    return code.raw


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = ctypes.c_char_p
        raise RuntimeError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")


class Function:
    """A kernel of a cubin, loaded into the context that torch made current."""

    def __init__(self, cubin: bytes, name: str, shared_bytes: int) -> None:
        self._driver = ctypes.CDLL("libcuda.so.1")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._shared = shared_bytes
        self._call("cuModuleLoadData", ctypes.byref(self._module), cubin)
        self._call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())
        # More than 48 KiB, static shared memory included, has to be asked for.
        self._call("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)

    def launch(self, grid: tuple[int, int, int], threads: int, stream: int, arguments: ctypes.Structure) -> None:
        """Enqueue on ``stream`` (a ``cudaStream_t`` as an int); ``arguments`` is the kernel's one parameter."""
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        place = (self._shared, ctypes.c_void_p(stream))
        self._call("cuLaunchKernel", self._function, *grid, threads, 1, 1, *place, pointers, None)

    def _call(self, name: str, *arguments) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status:
            text = ctypes.c_char_p()
            self._driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")
