"""The worker's half of the vLLM connector: frames into an engine's blocks, and blocks into frames. Needs no vLLM."""

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor

from diffkv_repro.core.errors import first_line
from diffkv_repro.kvserve.assets import Assets
from diffkv_repro.kvserve.codecs import CodecUnavailable
from diffkv_repro.kvserve.engine_profiles import lossless, try_out
from diffkv_repro.kvserve.frame import Frame
from diffkv_repro.kvserve.frame_store import FrameStore, Receipt
from diffkv_repro.kvserve.header import FrameError
from diffkv_repro.kvserve.heads import HeadScores
from diffkv_repro.kvserve.layout import KVLayout, LayerKV
from diffkv_repro.kvserve.vllm_layout import PagedLayer, in_model_order
from diffkv_repro.kvserve.vllm_plans import Load, Report, Save, Saved
from diffkv_repro.kvserve.vllm_settings import ConnectorSettings

# Below "vllm", so that vLLM's own logging shows it.
log = logging.getLogger(f"vllm.{__name__}")
_ROOM = 4  # bytes of a frame are at most so many times those of the raw cache, and a little
_SLACK = 1 << 20


class Transfer:
    """Loads and saves for one engine, whose blocks hold ``block_size`` tokens.

    Nothing that a store or a frame does makes it raise: a load that fails is reported by its blocks, so that the engine
    computes their tokens, and a save that fails is one that did not happen.
    """

    def __init__(self, settings: ConnectorSettings, layout: KVLayout, store: FrameStore, block_size: int) -> None:
        self.layout, self.store, self.block_size = layout, store, block_size
        self.library = settings.library()
        self._receipts = self.library is not None
        profiles = {name: self.library.profile(name) for name in ["none", *self.library.names]} if self.library else {}
        self._profiles = profiles or {"": settings.chosen()}
        self._assets = Assets(heads=HeadScores.load(settings.head_scores) if settings.head_scores else None)
        self._layers: list[PagedLayer] = []
        # Blocks that do not hold just what the model computes from its tokens: a frame of them would go on as if.
        self._impure: set[int] = set()
        self._failed: set[int] = set()
        self._saved: list[Saved] = []
        self._lost: list[str] = []

    def register(self, caches: Mapping[str, Tensor], order: Tensor | None) -> None:
        """Take over the engine's caches, and try out every profile on random keys and values.

        ``order`` as in :class:`PagedLayer`. Raises ValueError for caches that are not the layout's, and for a profile
        that cannot be used here.
        """
        layers = [PagedLayer(tensor, order) for tensor in in_model_order(caches)]
        first, want = layers[0], self.layout
        found = (len(layers), first.kv_heads, first.head_dim, first.tensor.dtype)
        if found != (want.layers, want.kv_heads, want.head_dim, want.dtype):
            raise ValueError(
                f"the engine's caches are {found} (layers, KV heads, head_dim, dtype); expected are {want}"
            )
        if self.block_size % first.slots:
            raise ValueError(f"blocks of {self.block_size} tokens do not divide into the kernel's {first.slots}")
        for profile in self._profiles.values():
            try_out(profile, self.layout, self._assets)
        self._layers = layers

    def load(self, loads: Sequence[Load], fresh: Iterable[int] = ()) -> None:
        """Put frames into blocks; those of ``fresh`` were given out for this step."""
        self._impure.difference_update(fresh)
        for one in loads:
            try:
                self._load(one)
            except (FrameError, CodecUnavailable, OSError) as error:
                self._fail(one, first_line(error))
                if isinstance(error, FrameError):
                    self._discard(one)
            except Exception:
                log.exception("loading frame %s failed", one.key.name)
                self._fail(one, "see above")

    def save(self, saves: Sequence[Save]) -> None:
        """Put blocks into frames."""
        for one in saves:
            if not self._impure.isdisjoint(one.blocks[: -(-one.key.tokens // self.block_size)]):
                log.info("frame %s is not stored: a part of it was loaded with losses, or not at all", one.key.name[:8])
                continue
            try:
                self._save(one)
            except (OSError, ValueError, CodecUnavailable) as error:
                log.warning("frame %s is not stored: %s", one.key.name[:8], first_line(error))
            except Exception:
                log.exception("storing frame %s failed", one.key.name)

    def take_failed(self) -> set[int]:
        """Blocks of loads that failed since the last call."""
        failed, self._failed = self._failed, set()
        return failed

    def take_report(self) -> Report | None:
        """What happened since the last call, None for nothing."""
        report = Report(tuple(self._saved), tuple(self._lost))
        self._saved, self._lost = [], []
        return report if report != Report() else None

    def _load(self, one: Load) -> None:
        began = time.perf_counter()
        data = self.store.get(one.key.name, _ROOM * self.layout.raw_bytes(one.key.tokens) + _SLACK)
        fetched = time.perf_counter()
        frame = Frame.from_bytes(data, self.layout, limit=self.layout.raw_bytes(one.key.tokens))
        header = frame.header
        if header.metadata.get("key") != one.key.name or (header.start, header.tokens) != (0, one.key.tokens):
            raise FrameError(f"it is of {header.tokens} tokens from {header.start} of another prompt")
        blocks = self._kernel_blocks(one.blocks)
        if not lossless(header.profile):
            self._impure.update(self._touched(one))
        for own, layer in zip(self._layers, frame.layers(), strict=True):
            if layer.kept is not None:
                raise FrameError("it lacks tokens, which attention would have to know")
            own.write(blocks, LayerKV(layer.key[:, : one.stop], layer.value[:, : one.stop]), one.start)
        decoded = time.perf_counter()
        log.info("tokens %d to %d of frame %s loaded: %d bytes", one.start, one.stop, one.key.name[:8], len(data))
        if header.metadata.get("receipt"):
            try:
                self.store.acknowledge(one.key.name, Receipt(fetched - began, decoded - fetched, len(data)))
            except Exception as error:  # the frame is loaded all the same
                log.warning("the receipt of frame %s could not be given: %s", one.key.name[:8], first_line(error))

    def _save(self, one: Save) -> None:
        spent = 0.0

        def timed(pieces: Iterator[bytes]) -> Iterator[bytes]:
            nonlocal spent
            while True:
                began = time.perf_counter()
                piece = next(pieces, None)
                spent += time.perf_counter() - began
                if piece is None:
                    return
                yield piece

        blocks = self._kernel_blocks(one.blocks)
        layers = (layer.read(blocks, one.key.tokens) for layer in self._layers)
        metadata = {"key": one.key.name, "receipt": self._receipts}
        profile = self._profiles[one.profile]
        pieces = profile.stream(layers, self.layout, one.key.tokens, assets=self._assets, metadata=metadata)
        began = time.perf_counter()
        written = self.store.put(one.key.name, timed(pieces))
        whole = time.perf_counter() - began
        self._saved.append(Saved(one.key.name, spent, max(whole - spent, 0.0), written))
        raw = self.layout.raw_bytes(one.key.tokens)
        log.info(
            "frame %s stored: %d tokens, %d bytes, 1/%.2f of the cache", one.key.name[:8], one.key.tokens, written,
            raw / written,
        )  # fmt: skip

    def _kernel_blocks(self, blocks: Sequence[int]) -> list[int]:
        """Blocks of the engine's tables as those of its kernels, which may be a fraction of them."""
        parts = self.block_size // self._layers[0].slots
        return [block * parts + part for block in blocks for part in range(parts)]

    def _touched(self, one: Load) -> tuple[int, ...]:
        return one.blocks[one.start // self.block_size : -(-one.stop // self.block_size)]

    def _fail(self, one: Load, reason: str) -> None:
        log.warning("frame %s cannot be used, its tokens are computed here: %s", one.key.name[:8], reason)
        self._impure.update(self._touched(one))
        self._failed.update(self._touched(one))
        self._lost.append(one.key.name)

    def _discard(self, one: Load) -> None:
        try:
            self.store.discard(one.key.name)
        except Exception as error:  # its load has failed already
            log.warning("frame %s could not be removed: %s", one.key.name[:8], first_line(error))
