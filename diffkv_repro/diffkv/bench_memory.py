"""Time the memory managers: on the device, on the host in Python, on the host compiled (Figure 13a)."""

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv.cpu_manager import CpuManager, PythonManager
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.memory import PagedMemory

TIERS = ("K8V4", "K4V2")
SHARES = (0.3, 0.6, 0.1)
"""Of the tokens, on average: high, low, pruned."""


@dataclass(frozen=True)
class MemoryTiming:
    """Seconds of one manager in one phase at one batch size: median, least and most of ``repeats``.

    ``manager`` is ``device``, ``device, CUDA graph``, ``host, Python`` or ``host, compiled``; ``phase`` is ``prompt``
    (conservative allocation and compaction of the batch) or ``generation`` (one step of the batch). ``kernels`` says
    what the work was done with, ``threads`` how many threads of the host did it, ``clock`` what the time was read
    from: ``host``, from the call until the device is done, or ``device``, between events around the work.
    ``pages`` is the median number of pages taken and given back.
    """

    manager: str
    phase: str
    batch: int
    length: int
    layers: int
    kv_heads: int
    median: float
    least: float
    most: float
    repeats: int
    pages: int
    kernels: str
    threads: int
    clock: str
    device: str

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return asdict(self)


def bench_memory(
    batches: Sequence[int], length: int = 1024, layers: int = 32, kv_heads: int = 8,
    device: torch.device | str | None = None, *, repeats: int = 20, python_repeats: int = 3, seed: int = 0,
) -> list[MemoryTiming]:  # fmt: skip
    """Every manager that can run here, for each batch size, prompts of ``length`` tokens, copies included.

    On a CUDA device the device's manager is Triton kernels, and its generation step is timed as a replayed CUDA graph
    too; elsewhere it is their torch twin, and "device" means this CPU. The compiled manager is timed with one thread,
    with all and with some between, so that the best can be compared with; it is left out where numba is not installed.
    All managers get the same plans and grow alike: each head gains one token a step, in one tier. Heads differ in what
    they keep (:data:`SHARES` on average). Raises ValueError for sizes below 1.
    """
    for name, value in (("length", length), ("layers", layers), ("kv_heads", kv_heads), ("repeats", repeats)):
        if value < 1:
            raise ValueError(f"{name} is {value}; it must be at least 1")
    if not batches or min(batches) < 1:
        raise ValueError(f"batches are {list(batches)}; at least one, and each at least 1")
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    rows = []
    for batch in batches:
        case = _Case(batch, length, layers, kv_heads, device, repeats, python_repeats, seed)
        rows += case.time("device", case.make("device"), repeats)
        rows += case.time("host, Python", case.make("host, Python"), python_repeats)
        for threads in _thread_counts():
            with _compiled_threads(threads):
                rows += case.time("host, compiled", case.make("host, compiled"), repeats)
    return rows


def _thread_counts() -> list[int]:
    """One, four, sixteen, ... and all that numba has; none where there is no numba."""
    if importlib.util.find_spec("numba") is None:
        return []
    import numba

    most = numba.config.NUMBA_NUM_THREADS
    return sorted({4**i for i in range(8) if 4**i < most} | {most})


@contextmanager
def _compiled_threads(count: int) -> Iterator[None]:
    import numba

    torch_threads = torch.get_num_threads()  # numba changes it when it starts its own
    before = numba.get_num_threads()
    numba.set_num_threads(count)
    torch.set_num_threads(torch_threads)
    try:
        yield
    finally:
        numba.set_num_threads(before)


@dataclass(frozen=True)
class _Case:
    batch: int
    length: int
    layers: int
    kv_heads: int
    device: torch.device
    repeats: int
    python_repeats: int
    seed: int

    @cached_property
    def layouts(self) -> list[PageLayout]:
        """Of the paper's page size: 32 high tokens, the fewest, or 60 low ones."""
        precisions = [Precision.parse(name) for name in TIERS]
        return [PageLayout(precision, 128, search_page_bytes(precisions, 128)) for precision in precisions]

    def make(self, manager: str) -> "PagedMemory | CpuManager":
        """The named manager with nothing in it."""
        layouts = self.layouts
        # What the steps of all trials can take: they follow one another.
        longest = self.length + 4 * max(self.repeats, self.python_repeats) + 16
        held = -(-longest // layouts[0].tokens) + len(layouts)
        sizes = {
            "pages": held * self.batch * self.layers * self.kv_heads, "layers": self.layers, "kv_heads": self.kv_heads,
            "max_requests": self.batch, "max_tokens": longest, "device": self.device,
        }  # fmt: skip
        if manager == "device":
            return PagedMemory(layouts, watermark=0.0, pool=False, **sizes)
        if manager == "host, Python":
            return PythonManager(layouts, **sizes)
        from diffkv_repro.diffkv.cpu_manager_numba import NumbaManager  # numba is an extra

        return NumbaManager(layouts, **sizes)

    def plans(self) -> Iterator[Tensor]:
        """Lengths after a prompt, on the device."""
        generator = np.random.default_rng(self.seed)
        while True:
            # Dirichlet with few pseudo-counts: heads differ as much as those of real models do.
            shares = generator.dirichlet(6 * np.array(SHARES), size=(self.batch, self.layers, self.kv_heads))
            lengths = np.floor(shares[..., : len(TIERS)] * self.length).astype(np.int32)
            yield torch.from_numpy(lengths).to(self.device)

    def growth(self) -> Iterator[Tensor]:
        """A token for each head, in one of the tiers."""
        generator = torch.Generator().manual_seed(self.seed)
        shares = torch.tensor(SHARES[: len(TIERS)])
        while True:
            tier = torch.multinomial(shares, self.batch * self.layers * self.kv_heads, True, generator=generator)
            one = torch.nn.functional.one_hot(tier, len(TIERS)).to(torch.int32)
            yield one.view(self.batch, self.layers, self.kv_heads, len(TIERS)).to(self.device)

    def time(self, manager: str, made: "PagedMemory | CpuManager", trials: int) -> list[MemoryTiming]:
        """Both phases, one after the other."""
        slots, tokens, plans = list(range(self.batch)), [self.length] * self.batch, self.plans()
        on_device = isinstance(made, PagedMemory)
        free = made.synchronize_counts if on_device else lambda: made.free_pages
        seconds, moved = [], []
        for trial in range(trials + 2):  # two to warm up
            planned = next(plans)
            before = free()

            def prompt(planned=planned) -> None:
                made.admit(slots, tokens)
                made.compact(slots, planned, **({"validate": False} if on_device else {}))

            seconds.append(self._host_seconds(prompt))
            conservative = self.batch * self.layers * self.kv_heads * (-(-self.length // self.layouts[0].tokens) + 1)
            moved.append(2 * conservative - (before - free()))
            if trial < trials + 1:
                made.release(slots)
        rows = [self._row(manager, "prompt", made, seconds[2:], moved[2:], "host")]
        rows += self._generation(manager, made, trials, free)
        return rows

    def _generation(self, manager, made, trials: int, free: Callable[[], int]) -> list[MemoryTiming]:
        growth = self.growth()
        lengths = made.lengths if isinstance(made, PagedMemory) else made.device_lengths

        def series(step: Callable[[], object], clock: Callable[[Callable[[], object]], float]) -> tuple[list, list]:
            seconds, moved = [], []
            for _ in range(trials + 2):
                before = free()
                seconds.append(clock(step))
                moved.append(before - free())
                lengths.add_(next(growth))
            return seconds[2:], moved[2:]

        if not isinstance(made, PagedMemory):
            active = np.ones(self.batch, dtype=bool)
            timed = series(lambda: made.reserve_step(active), self._host_seconds)
            return [self._row(manager, "generation", made, *timed, "host")]
        active = torch.ones(self.batch, dtype=torch.uint8, device=self.device)
        eager = series(lambda: made.reserve_step(active), self._host_seconds)
        rows = [self._row(manager, "generation", made, *eager, "host")]
        if self.device.type == "cuda":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                made.reserve_step(active)
            for clock in ("host", "device"):
                timed = series(graph.replay, self._host_seconds if clock == "host" else self._device_seconds)
                rows.append(self._row(f"{manager}, CUDA graph", "generation", made, *timed, clock))
        return rows

    def _row(self, manager, phase, made, seconds, moved, clock) -> MemoryTiming:
        kernels = "numpy" if isinstance(made, CpuManager) else "triton" if self.device.type == "cuda" else "torch twin"
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        return MemoryTiming(
            manager=manager, phase=phase, batch=self.batch, length=self.length, layers=self.layers,
            kv_heads=self.kv_heads, median=statistics.median(seconds), least=min(seconds), most=max(seconds),
            repeats=len(seconds), pages=int(statistics.median(moved)),
            kernels="numba" if manager == "host, compiled" else kernels,
            threads=made.threads if isinstance(made, CpuManager) else torch.get_num_threads(), clock=clock, device=name,
        )  # fmt: skip

    def _host_seconds(self, call: Callable[[], object]) -> float:
        self._synchronise()
        started = time.perf_counter()
        call()
        self._synchronise()
        return time.perf_counter() - started

    def _device_seconds(self, call: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._synchronise()
        start.record()
        call()
        end.record()
        self._synchronise()
        return start.elapsed_time(end) / 1000

    def _synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
