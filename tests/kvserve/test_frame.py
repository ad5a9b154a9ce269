"""What arrives is what was sent, byte for byte, or is refused with the reason before it takes memory."""

import io
import tracemalloc
import zlib

import pytest
import torch
from kvserve_helpers import DTYPES, assets_of, error_of, kv_of, layout_of, same, sent

from diffkv_repro.kvserve.codecs import CodecUnavailable
from diffkv_repro.kvserve.entropy import Ans
from diffkv_repro.kvserve.frame import Frame, receive
from diffkv_repro.kvserve.header import FrameError, Header
from diffkv_repro.kvserve.layout import KV, KVLayout
from diffkv_repro.kvserve.profile import Profile
from diffkv_repro.kvserve.quantizers import Uniform
from diffkv_repro.kvserve.transforms import Delta, Hadamard

PROFILE = Profile((Hadamard(), Delta()), Uniform(12, 8), Ans())


def frame_of(layout=None, tokens=37, profile=PROFILE, **about):
    layout = layout or layout_of()
    return profile.encode(kv_of(layout, tokens), layout, **about)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 37])
def test_a_frame_is_its_bytes(dtype, tokens):
    layout = layout_of(dtype=dtype)
    kv = kv_of(layout, tokens, start=11)
    frame = PROFILE.encode(kv, layout, metadata={"request": "é", "n": 1})
    arrived = Frame.from_bytes(frame.to_bytes(), layout)
    assert arrived.header == frame.header
    assert arrived.header.metadata == {"request": "é", "n": 1}
    assert (arrived.header.start, arrived.header.tokens, arrived.header.profile) == (11, tokens, PROFILE)
    assert arrived.to_bytes() == frame.to_bytes()
    assert same(arrived.decode(), frame.decode())
    assert error_of(arrived.decode(), kv) < 1


def test_both_byte_counts_add_up():
    layout = layout_of(3, 2, 64)
    frame = frame_of(layout, 500, Profile.named("int4"))
    values = 2 * 3 * 2 * 64 * 500
    assert frame.code_bytes == values // 2
    scales = 2 * 3 * 2 * 500 * 4
    lengths = 3 * (24 + 2 + 2 * 4)
    assert frame.nbytes == len(frame.to_bytes()) == values // 2 + scales + lengths + len(frame.header.packed)
    assert frame.code_ratio == 4
    assert frame.ratio == 2 * values / frame.nbytes


def test_ratios_divide_16_bits_whatever_the_dtype():
    frames = [frame_of(layout_of(dtype=dtype), 200) for dtype in DTYPES]
    assert frames[0].ratio == pytest.approx(frames[2].ratio, rel=0.02)


def test_a_stream_is_the_frame_and_is_made_and_taken_layer_by_layer():
    layout = layout_of(4)
    kv = kv_of(layout, 50)
    taken = []

    def layers():
        for index, layer in enumerate(kv.layers):
            taken.append(index)
            yield layer

    pieces = PROFILE.stream(layers(), layout, 50)
    whole = next(pieces)
    assert taken == []
    whole += next(pieces)
    assert taken == [0]
    whole += b"".join(pieces)
    frame = PROFILE.encode(kv, layout)
    assert whole == frame.to_bytes()
    source = io.BytesIO(whole)
    arriving = receive(exactly(source), layout)
    first = next(arriving)
    assert source.tell() == len(frame.header.packed) + len(frame.sections[0])
    assert torch.equal(first.key, frame.decode().layers[0].key)
    assert same(KV((first, *arriving)), frame.decode())


def exactly(source):
    def read(count):
        data = source.read(count)
        if len(data) < count:
            raise FrameError("truncated")
        return data

    return read


def test_every_truncation_is_refused():
    layout = layout_of(2, 1, 3)
    data = frame_of(layout, 4).to_bytes()
    for length in range(len(data)):
        with pytest.raises(FrameError, match="truncated"):
            Frame.from_bytes(data[:length], layout)
    with pytest.raises(FrameError, match="3 bytes follow the frame"):
        Frame.from_bytes(data + b"123", layout)


def test_every_flipped_bit_is_refused():
    layout = layout_of(1, 1, 3)
    data = frame_of(layout, 3).to_bytes()
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1 << index % 8
        with pytest.raises(FrameError):
            Frame.from_bytes(damaged, layout).decode()


def test_sections_cannot_change_places_or_frames():
    layout = layout_of()
    frame, other = frame_of(layout), frame_of(layout, metadata={"request": 2})
    head, (first, second) = frame.header.packed, frame.sections
    with pytest.raises(FrameError, match="section 0 says layer 1"):
        Frame.from_bytes(head + second + first, layout)
    with pytest.raises(FrameError, match="layer 1 is damaged: its checksum"):
        Frame.from_bytes(head + first + other.sections[1], layout)


@pytest.mark.parametrize(
    "other",
    [
        layout_of(3), layout_of(kv_heads=4), layout_of(head_dim=20), layout_of(dtype=torch.bfloat16),
        layout_of(rope="rope_theta=1e6"), layout_of(model="another"),
    ],
    ids=["layers", "heads", "head_dim", "dtype", "rope", "weights"],
)  # fmt: skip
def test_a_frame_of_another_model_is_refused(other):
    with pytest.raises(FrameError, match="another model"):
        Frame.from_bytes(frame_of().to_bytes(), other)


def resigned(data, **changes):
    """``data`` with a header field changed and its checksum made right again."""
    offsets = {
        "magic": (0, 4),
        "version": (4, 2),
        "size": (6, 4),
        "start": (23, 8),
        "tokens": (31, 8),
        "codec": (73, 1),
    }
    size = int.from_bytes(data[6:10], "little")
    data = bytearray(data)
    for name, value in changes.items():
        at, length = offsets[name]
        data[at : at + length] = value.to_bytes(length, "little")
    data[size - 4 : size] = zlib.crc32(data[: size - 4]).to_bytes(4, "little")
    return bytes(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": 0}, "no frame"),
        ({"version": 2}, "frame version 2; this is version 1"),
        ({"size": 2**31}, "takes 2147483648 bytes"),
        ({"tokens": 0}, "a frame of 0 tokens"),
        ({"tokens": 2**40}, "allowed are 17179869184"),
        ({"tokens": 2**63}, "allowed are 17179869184"),
        ({"tokens": 38}, "layer 0 is damaged"),
        ({"start": 2**63}, "start is 9223372036854775808"),
        ({"codec": 99}, "unknown codec format id 99"),
        ({"codec": 1}, "no parameter 'per'"),
    ],
)
def test_absurd_headers_are_refused_before_memory_is_taken(changes, message):
    data = resigned(frame_of().to_bytes(), **changes)
    tracemalloc.start()
    with pytest.raises(FrameError, match=message):
        Frame.from_bytes(data, layout_of()).decode()
    assert tracemalloc.get_traced_memory()[1] < 2_000_000
    tracemalloc.stop()


def test_a_reader_may_expect_less():
    data = frame_of().to_bytes()
    raw = layout_of().raw_bytes(37)
    assert Frame.from_bytes(data, layout_of(), limit=raw).header.tokens == 37
    with pytest.raises(FrameError, match=f"{raw} bytes of KV; allowed are {raw - 1}"):
        Frame.from_bytes(data, layout_of(), limit=raw - 1)


def test_a_section_that_claims_too_much_is_not_waited_for():
    frame = frame_of()
    asked = []

    def read(count):
        asked.append(count)
        return source.read(count)

    section = bytearray(frame.sections[0])
    section[8:16] = (2**40).to_bytes(8, "little")
    source = io.BytesIO(frame.header.packed + section)
    with pytest.raises(FrameError, match="says layer 0, 1099511627776 bytes"):
        Frame.read(read, layout_of())
    assert max(asked) < 10_000


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PROFILE.encode(kv_of(layout_of(3), 5), layout_of()), "kv has 3 layers, the layout 2"),
        (lambda: PROFILE.encode(kv_of(layout_of(kv_heads=2), 5), layout_of()), r"key is torch.float16 \(2, 5, 16\)"),
        (
            lambda: PROFILE.encode(kv_of(layout_of(), 5), layout_of(dtype=torch.float32)),
            "the layout says torch.float32",
        ),
        (lambda: PROFILE.encode(kv_of(layout_of(), 0), layout_of()), "tokens is 0"),
        (lambda: frame_of(metadata={"much": "x" * 70_000}), "metadata take 70011 bytes"),
        (lambda: frame_of(metadata=[1]), r"metadata is \[1\]"),
        (lambda: KV.of([(torch.zeros(2, 1, 3, 4),) * 2]), "a batch of 1"),
        (lambda: list(PROFILE.stream(kv_of(layout_of(1), 5).layers, layout_of(), 5)), "1 layers came"),
        (lambda: list(PROFILE.stream(kv_of(layout_of(3), 5).layers, layout_of(), 5)), "more layers came"),
        (lambda: KVLayout(0, 1, 1), "layers is 0"),
        (lambda: KVLayout(1, 1, 1, torch.int8), "dtype is torch.int8; allowed are float16, bfloat16, float32"),
        (lambda: Header(PROFILE, layout_of(), -1, 5), "start is -1"),
        (
            lambda: Profile().encode([(torch.zeros(3, 5, 16, device="meta").half(),) * 2] * 2, layout_of()),
            "on meta; fra",
        ),
    ],
)
def test_what_cannot_be_sent_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_gpu_codec_is_refused_at_both_ends_where_there_is_none():
    profile = Profile.named("kvserve-default-gpu")
    layout = layout_of()
    try:
        profile.codec.require()
    except CodecUnavailable:
        with pytest.raises(CodecUnavailable, match="codec nvcomp-ans needs"):
            profile.encode(kv_of(layout, 5), layout, assets=assets_of(layout, 5))
    else:
        assert error_of(sent(profile, kv_of(layout, 5), layout, assets_of(layout, 5)), kv_of(layout, 5)) < 2


def test_a_batch_of_one_and_a_position_go_along():
    layout = layout_of()
    kv = KV.of([(key[None], value[None]) for key, value in kv_of(layout, 6).pairs], start=4)
    assert same(sent(Profile(), kv, layout), kv)
