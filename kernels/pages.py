"""What the Triton kernels share: addresses in unified pages, and the quantiser of ``core.quantize`` bit for bit.

A layout reaches a kernel as ``FIELDS`` compile-time integers a tier, one tier after the other (:func:`geometry`). The
pool is passed as int16 (codes and scales) and as int32 (scores, positions, pairs of anything): no kernel casts a
pointer. Byte offsets are 64-bit: a page id times the page size leaves 32 bits soon.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

FIELDS = tl.constexpr(10)
(
    KEY_BITS, VALUE_BITS, KEY_GROUPS, VALUE_GROUPS, TOKENS, KEY_SCALES, VALUES, VALUE_SCALES, SCORES, POSITIONS,
) = (tl.constexpr(index) for index in range(FIELDS.value))  # fmt: skip
_INF = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(65504.0)


def geometry(layouts) -> tuple[int, ...]:
    """The ``PageLayout`` s of all tiers as the integers that kernels are compiled for."""
    numbers: list[int] = []
    for own in layouts:
        precision = own.precision
        numbers += [precision.key_bits, precision.value_bits, max(own.key_groups, 1), max(own.value_groups, 1)]
        numbers += [own.tokens, *own.offsets[1:]]
    return tuple(numbers)


def padded(head_dim: int) -> int:
    """Channels of a tile: a power of two, and at least the 16 of a matrix instruction."""
    return max(16, triton.next_power_of_2(head_dim))


def pool_views(pool: Tensor) -> tuple[Tensor, Tensor]:
    """The pool as int16 and as int32."""
    return pool.view(torch.int16), pool.view(torch.int32)


@triton.jit
def page_bytes_at(table, table_stride, entries, page, mask, TIER: tl.constexpr, PAGE_BYTES: tl.constexpr):
    """Byte offset int64 in the pool of the ``page``-th pages of a tier; ``table`` points to the head's first table."""
    entry = page if TIER % 2 == 0 else entries - 1 - page
    return tl.load(table + (TIER // 2) * table_stride + entry, mask=mask, other=0).to(tl.int64) * PAGE_BYTES


@triton.jit
def rounded_to(x, like):
    """``x`` float32 as the type that ``like`` points to would hold it; FP16 ends at 65504."""
    if like.dtype.element_ty == tl.float16:
        x = tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST).to(tl.float16).to(tl.float32)
    if like.dtype.element_ty == tl.bfloat16:
        # Half to even, in integers: Triton's interpreter cuts off.
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def half_below(x):
    """The largest FP16 number that is not above ``x``."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    lower = tl.where(half > 0, bits - 1, tl.where(half < 0, bits + 1, -32767))
    return tl.where(half.to(tl.float32) > x, lower.to(tl.int16).to(tl.float16, bitcast=True), half)


@triton.jit
def half_above(x):
    """The smallest FP16 number that is not below ``x`` >= 0; infinity above 65504."""
    half = x.to(tl.float16)
    bits = half.to(tl.int16, bitcast=True).to(tl.int32)
    upper = tl.where(bits < 0x7C00, bits + 1, bits)
    return tl.where(half.to(tl.float32) < x, upper.to(tl.int16).to(tl.float16, bitcast=True), half)


@triton.jit
def affine(x, own, BITS: tl.constexpr):
    """:func:`affine_to` with all the codes of ``BITS`` bits."""
    return affine_to(x, own, 2**BITS - 1)


@triton.jit
def affine_to(x, own, top):
    """Codes int32 [n, channels] from 0 to ``top`` of ``x`` float32 where ``own``, scale and zero FP16 [n]
    (``core.quantize.affine``)."""
    low = tl.min(tl.where(own, x, _INF), axis=1)
    high = tl.max(tl.where(own, x, -_INF), axis=1)
    zero = half_below(low)
    span = high - zero.to(tl.float32)
    step = tl.div_rn(span, tl.zeros_like(span) + top)
    scale = half_above(step)
    # A step that FP16 does not hold: the widest one, centred.
    wide = step > _LARGEST
    scale = tl.where(wide, _LARGEST, scale.to(tl.float32))
    zero_value = tl.where(wide, -_LARGEST / 2, zero.to(tl.float32))
    divisor = tl.where(scale > 0, scale, 1.0)
    shifted = x - zero_value[:, None]
    scaled = tl.div_rn(shifted, tl.zeros_like(shifted) + divisor[:, None])
    # Adding 1.5 * 2**23 leaves no fraction bits: the hardware's own rounding, half to even.
    rounded = (scaled + 12582912.0) - 12582912.0
    codes = tl.minimum(tl.maximum(rounded, 0.0), tl.zeros_like(rounded) + top).to(tl.int32)
    return codes, scale.to(tl.float16), zero_value.to(tl.float16)


@triton.jit
def write_side(
    units, page, slot, mask, x, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Quantise rows ``x`` float32 [n, WIDTH] and store codes and scales of slots [n] of pages at byte ``page`` [n].

    ``PAIRED`` alternates the units of neighbouring tokens, as values are stored.
    """
    per_unit: tl.constexpr = 16 // BITS
    count: tl.constexpr = HEAD_DIM // per_unit
    unit = tl.arange(0, WIDTH // per_unit)
    base = page // 2
    if BITS == 16:
        content = x.to(tl.float16).to(tl.int16, bitcast=True)
    else:
        channel = tl.arange(0, WIDTH)[None, :]
        codes = tl.zeros(x.shape, tl.int32)
        for g in tl.static_range(GROUPS):
            own = (channel >= g * (HEAD_DIM // GROUPS)) & (channel < (g + 1) * (HEAD_DIM // GROUPS))
            new, scale, zero = affine(x, own, BITS)
            codes = tl.where(own, new, codes)
            at = units + base + SCALES // 2 + (slot * GROUPS + g) * 2
            tl.store(at, scale.to(tl.int16, bitcast=True), mask=mask)
            tl.store(at + 1, zero.to(tl.int16, bitcast=True), mask=mask)
        lanes = tl.reshape(codes, (x.shape[0], WIDTH // per_unit, per_unit))
        shift = tl.arange(0, per_unit) * BITS
        content = tl.sum(lanes << shift[None, None, :], axis=2).to(tl.int16)
    if PAIRED:
        index = ((slot // 2 * count)[:, None] + unit[None, :]) * 2 + (slot % 2)[:, None]
    else:
        index = (slot * count)[:, None] + unit[None, :]
    at = units + base[:, None] + CODES // 2 + index
    tl.store(at, content, mask=mask[:, None] & (unit < count)[None, :])


@triton.jit
def read_side(
    units, page, slot, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, GROUPS: tl.constexpr,
    CODES: tl.constexpr, SCALES: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Dequantise slots [n] of pages at byte ``page`` [n] to float32 [n, WIDTH]; a few rows, each unit read again for
    each of its codes."""
    per_unit: tl.constexpr = 16 // BITS
    count: tl.constexpr = HEAD_DIM // per_unit
    channel = tl.arange(0, WIDTH)
    inside = (channel < HEAD_DIM)[None, :]
    base = (page // 2)[:, None]
    unit = channel // per_unit
    if PAIRED:
        index = ((slot // 2 * count)[:, None] + unit[None, :]) * 2 + (slot % 2)[:, None]
    else:
        index = (slot * count)[:, None] + unit[None, :]
    raw = tl.load(units + base + CODES // 2 + index, mask=inside, other=0)
    if BITS == 16:
        return raw.to(tl.float16, bitcast=True).to(tl.float32)
    codes = (raw.to(tl.int32) >> (channel % per_unit * BITS)[None, :]) & (2**BITS - 1)
    group = channel // (HEAD_DIM // GROUPS)
    at = units + base + SCALES // 2 + ((slot * GROUPS)[:, None] + group[None, :]) * 2
    scale = tl.load(at, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    zero = tl.load(at + 1, mask=inside, other=0).to(tl.float16, bitcast=True).to(tl.float32)
    # The product is exact in float32: fused with the sum or not, it rounds once.
    return zero + codes.to(tl.float32) * scale


@triton.jit
def write_tokens(
    units, words, page, slot, mask, key, value, score, position, GEOMETRY: tl.constexpr, TIER: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Quantise and store all of tokens [n]: keys and values float32 [n, WIDTH], scores float32, positions int32."""
    write_side(
        units, page, slot, mask, key, HEAD_DIM, WIDTH, GEOMETRY[TIER * FIELDS + KEY_BITS],
        GEOMETRY[TIER * FIELDS + KEY_GROUPS], 0, GEOMETRY[TIER * FIELDS + KEY_SCALES], False,
    )  # fmt: skip
    write_side(
        units, page, slot, mask, value, HEAD_DIM, WIDTH, GEOMETRY[TIER * FIELDS + VALUE_BITS],
        GEOMETRY[TIER * FIELDS + VALUE_GROUPS], GEOMETRY[TIER * FIELDS + VALUES],
        GEOMETRY[TIER * FIELDS + VALUE_SCALES], True,
    )  # fmt: skip
    scores: tl.constexpr = GEOMETRY[TIER * FIELDS + SCORES]
    positions: tl.constexpr = GEOMETRY[TIER * FIELDS + POSITIONS]
    tl.store(words + page // 4 + scores // 4 + slot, score.to(tl.int32, bitcast=True), mask=mask)
    tl.store(words + page // 4 + positions // 4 + slot, position, mask=mask)


@triton.jit
def rotated_bias(bias, table, position, mask, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """RoPE(bias, position), float32 [n, WIDTH]: what keys are stored without.

    ``bias`` points to the head's; ``table`` [positions, HEAD_DIM] holds cosines of half the channels, then sines.
    """
    half: tl.constexpr = HEAD_DIM // 2
    channel = tl.arange(0, WIDTH)
    angle = channel % half
    first = channel < half
    own = tl.load(bias + channel, mask=channel < HEAD_DIM, other=0.0)
    other = tl.load(bias + tl.where(first, channel + half, channel - half), mask=channel < HEAD_DIM, other=0.0)
    inside = mask[:, None] & (channel < HEAD_DIM)[None, :]
    at = table + position.to(tl.int64)[:, None] * HEAD_DIM + angle[None, :]
    cos = tl.load(at, mask=inside, other=0.0)
    sin = tl.load(at + half, mask=inside, other=0.0)
    return own[None, :] * cos + tl.where(first, -other, other)[None, :] * sin


@triton.jit
def tiles_of(length, PER_PAGE: tl.constexpr, BLOCK: tl.constexpr):
    """Tiles of ``BLOCK`` places that ``length`` tokens of a tier take (see :func:`locate`)."""
    places = length // PER_PAGE * (PER_PAGE + PER_PAGE % 2) + length % PER_PAGE
    return (places + BLOCK - 1) // BLOCK


@triton.jit
def locate(place, length, PER_PAGE: tl.constexpr):
    """Page and slot of places, and whether a token is there. Places come in pairs within a page, as the units of values
    do: in a page with an odd number of tokens the last one is empty."""
    places: tl.constexpr = PER_PAGE + PER_PAGE % 2
    page, slot = place // places, place % places
    return page, slot, (slot < PER_PAGE) & (page * PER_PAGE + slot < length)
