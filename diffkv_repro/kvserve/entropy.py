"""Entropy coding of codes with the statistics of their own stream: asymmetric numeral systems and range coding.

Symbols of few levels are coded several at a time, as digits of one number below 256: the coder's time goes by symbol.

The histogram of each context travels with the stream, as 16-bit counts. constriction turns the same counts into the
same model on both sides, so nothing depends on a machine's floating point beyond IEEE single precision.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import constriction
import numpy as np
import torch

from diffkv_repro.core.packing import packed_bytes
from diffkv_repro.kvserve.codecs import (
    CODECS,
    PIECE,
    Codec,
    CodecError,
    Coded,
    bits_of,
    pack_symbols,
    unpack_symbols,
)
from diffkv_repro.kvserve.registry import require_choice

_STORED, _CODED = b"\0", b"\1"
_MOST = 65535
_RUN = 256  # symbols for every entry of a histogram of combinations, which then costs at most 1/16 bit a symbol


@dataclass(frozen=True)
class Entropy(Codec):
    """``per`` says what has a histogram of its own: the whole ``stream``, or each ``channel`` as in CacheGen.

    A stream that would not shrink is bit-packed instead; a first byte says so.
    """

    per: str = "stream"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_choice("per", self.per, ("stream", "channel"))

    @property
    def channelwise(self) -> bool:
        """Whether channels are contexts of their own."""
        return self.per == "channel"

    def encode(self, symbols: np.ndarray, levels: int, contexts: int = 1) -> Coded:
        if not symbols.size:
            return Coded(_STORED, b"")
        joint = _together(levels, symbols.size // contexts)
        rows = _joined(symbols.reshape(contexts, -1), levels, joint)
        counts = _counts(rows, levels**joint)
        words = self._compress(rows, [_model(row) for row in counts])
        model = _CODED + counts.astype("<u2").tobytes()
        payload = words.astype("<u4").tobytes()
        if len(model) + len(payload) > 1 + packed_bytes(symbols.size, bits_of(levels)):
            return Coded(_STORED, pack_symbols(symbols, levels))
        return Coded(model, payload)

    def decode(self, data: bytes, count: int, levels: int, contexts: int = 1) -> np.ndarray:
        data = bytes(data)
        kind, body = data[:1], data[1:]
        if kind == _STORED:
            return unpack_symbols(body, count, levels)
        joint = _together(levels, count // contexts)
        size = 2 * levels**joint * contexts
        if kind != _CODED or len(body) < size or (len(body) - size) % 4 or not count:
            raise CodecError(f"{len(data)} bytes are no entropy code of {contexts} contexts of {levels} levels")
        counts = np.frombuffer(body, dtype="<u2", count=size // 2).reshape(contexts, -1)
        if not counts.any(axis=1).all():
            raise CodecError("a histogram is empty")
        words = np.frombuffer(body, dtype="<u4", offset=size).astype(np.uint32)
        try:
            rows = self._expand(words, [_model(row) for row in counts], -(-(count // contexts) // joint))
        except (ValueError, AssertionError) as error:
            raise CodecError(f"not an entropy code of {count} symbols: {error}") from error
        return _parted(rows, levels, joint, count // contexts)

    @abstractmethod
    def _compress(self, rows: np.ndarray, models: list) -> np.ndarray:
        """Words uint32 of ``rows`` uint8 [contexts, n]."""

    @abstractmethod
    def _expand(self, words: np.ndarray, models: list, count: int) -> np.ndarray:
        """The rows, uint8 [contexts, count]."""


@CODECS.add
@dataclass(frozen=True)
class Ans(Entropy):
    """Asymmetric numeral systems, KVServe's default codec (there on the GPU, by nvCOMP)."""

    name: ClassVar[str] = "ans"
    format_id: ClassVar[int] = 5

    def _compress(self, rows: np.ndarray, models: list) -> np.ndarray:
        coder = constriction.stream.stack.AnsCoder()
        for row, model in zip(reversed(rows), reversed(models), strict=True):  # a stack: what goes in last comes first
            for piece in reversed(_pieces(row)):
                coder.encode_reverse(piece.astype(np.int32), model)
        return coder.get_compressed()

    def _expand(self, words: np.ndarray, models: list, count: int) -> np.ndarray:
        coder = constriction.stream.stack.AnsCoder(words)
        rows = _rows(coder, models, count)
        if not coder.is_empty():
            raise CodecError("words are left over")
        return rows


@CODECS.add
@dataclass(frozen=True)
class RangeCoding(Entropy):
    """Range coding: arithmetic coding by words, what CacheGen's coder does by bits."""

    name: ClassVar[str] = "range"
    format_id: ClassVar[int] = 6

    def _compress(self, rows: np.ndarray, models: list) -> np.ndarray:
        coder = constriction.stream.queue.RangeEncoder()
        for row, model in zip(rows, models, strict=True):
            for piece in _pieces(row):
                coder.encode(piece.astype(np.int32), model)
        return coder.get_compressed()

    def _expand(self, words: np.ndarray, models: list, count: int) -> np.ndarray:
        coder = constriction.stream.queue.RangeDecoder(words)
        rows = _rows(coder, models, count)
        if not coder.maybe_exhausted():
            raise CodecError("words are left over")
        return rows


def _pieces(row: np.ndarray) -> list[np.ndarray]:
    """The coders take 32 bits a symbol: four times what it needs, so not all of a row at once."""
    return [row[start : start + PIECE] for start in range(0, len(row), PIECE)]


def _rows(coder: Any, models: list, count: int) -> np.ndarray:
    """``count`` symbols of every model in turn, uint8 [models, count]."""
    rows = np.empty((len(models), count), dtype=np.uint8)
    for row, model in zip(rows, models, strict=True):
        for piece in _pieces(row):
            piece[:] = coder.decode(model, len(piece))
    return rows


def _together(levels: int, count: int) -> int:
    """How many symbols of a run of ``count`` are coded as one: up to 256 combinations, as long as the histogram of the
    combinations stays small beside the run."""
    joint = 1
    while levels ** (joint + 1) <= 256 and count >= _RUN * levels ** (joint + 1):
        joint += 1
    return joint


def _joined(rows: np.ndarray, levels: int, joint: int) -> np.ndarray:
    """Rows uint8 [contexts, n] with ``joint`` symbols in one, [contexts, ceil(n / joint)]; zeros fill the last."""
    missing = -rows.shape[1] % joint
    if joint == 1:
        return rows
    digits = (np.pad(rows, ((0, 0), (0, missing))) if missing else rows).reshape(len(rows), -1, joint)
    number = digits[..., 0].copy()
    for index in range(1, joint):
        number *= np.uint8(levels)
        number += digits[..., index]
    return number


def _parted(rows: np.ndarray, levels: int, joint: int, count: int) -> np.ndarray:
    """The inverse, flat: ``count`` symbols a row."""
    if joint == 1:
        return rows[:, :count].ravel()
    digits = np.empty((*rows.shape, joint), dtype=np.uint8)
    for index in range(joint - 1, 0, -1):
        above = rows // np.uint8(levels)
        digits[..., index] = rows - above * np.uint8(levels)
        rows = above
    digits[..., 0] = rows
    return digits.reshape(len(rows), -1)[:, :count].ravel()


def _counts(rows: np.ndarray, levels: int) -> np.ndarray:
    """Histograms [contexts, levels] of ``rows``, brought to 16 bits; what occurs keeps at least 1."""
    counts = np.stack([torch.bincount(torch.from_numpy(row), minlength=levels).numpy() for row in rows])
    most = counts.max(axis=1, keepdims=True)
    scaled = np.where(most > _MOST, counts * _MOST // np.maximum(most, 1), counts)
    return np.maximum(scaled, counts > 0)


def _model(counts: np.ndarray) -> constriction.stream.model.Categorical:
    return constriction.stream.model.Categorical(counts.astype(np.float32), perfect=False)
