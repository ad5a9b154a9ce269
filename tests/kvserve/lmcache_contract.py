"""The serde in LMCache's own machinery: run by test_lmcache.py with a Python that has LMCache 0.5.6.

python -m pytest tests/kvserve/lmcache_contract.py
"""

import time

import lmcache.v1.distributed.serde as serdes
import pytest
import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1ManagerConfig, L1MemoryManagerConfig
from lmcache.v1.distributed.l1_manager import L1Manager
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
from lmcache.v1.distributed.l2_adapters.serde_wrapper import SerdeL2AdapterWrapper

from diffkv_repro.kvserve import KV, KVLayout, Profile
from diffkv_repro.kvserve.lmcache_serde import KVServeSerializer, SerdeSettings, register, require_version

LAYERS, TOKENS, HEADS, DIM = 3, 32, 2, 16
SHAPE = torch.Size([2, LAYERS, TOKENS, HEADS * DIM])
RAW = SHAPE.numel() * 2
LAYOUT = MemoryLayoutDesc(shapes=[SHAPE], dtypes=[torch.float16])


def key_of(name, model="some/model"):
    return ObjectKey(chunk_hash=name.encode().ljust(32, b"."), model_name=model, kv_rank=0)


def serde_of(**settings):
    config = L2AdapterConfigBase._parse_serde_config({"serde": {"type": "kvserve", "kv_heads": HEADS, **settings}})
    return serdes.create_serde_processor(config)


@pytest.fixture
def memory():
    manager = L1Manager(L1ManagerConfig(L1MemoryManagerConfig(size_in_bytes=1 << 24, use_lazy=False, shm_name="")))
    yield manager
    manager.close()


class Machine:
    """A file adapter behind the serde, as LMCache's storage manager builds it."""

    def __init__(self, folder, memory, **settings):
        self.folder, self.memory = folder, memory
        config = FSL2AdapterConfig.from_dict({"type": "fs", "base_path": str(folder)})
        self.adapter = SerdeL2AdapterWrapper(FSL2Adapter(config), serde_of(**settings), memory)

    def object(self, key, chunk):
        reserved = self.memory.reserve_write([key], [False], LAYOUT, tag="test")
        obj = reserved[key][1]
        obj.tensor.copy_(chunk)
        return obj

    def store(self, key, chunk):
        task = self.adapter.submit_store_task([key], [self.object(key, chunk)])
        return wait(lambda: self.adapter.pop_completed_store_tasks().get(task)).is_successful()

    def load(self, key, name="back"):
        obj = self.object(key_of(name), torch.full(SHAPE, 7.0))
        task = self.adapter.submit_load_task([key], [obj])
        return wait(lambda: self.adapter.query_load_result(task)).test(0), obj.tensor.clone()

    @property
    def files(self):
        return sorted(self.folder.rglob("*.data"))


def wait(poll):
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = poll()
        if found is not None:
            return found
        time.sleep(0.01)
    raise AssertionError("no answer within 30 s")


@pytest.fixture
def machine(tmp_path, memory):
    made = []

    def make(**settings):
        made.append(Machine(tmp_path / "l2", memory, **settings))
        return made[-1]

    yield make
    for one in made:
        one.adapter.close()


def chunk_of(seed=0):
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(torch.float16)


def test_it_is_registered_once_and_by_name():
    register()
    assert serdes.get_registered_serde_types().count("kvserve") == 1


def test_a_lossless_chunk_comes_back_to_the_bit(machine):
    one = machine(profile="none")
    assert one.store(key_of("a"), chunk_of())
    found, back = one.load(key_of("a"))
    assert found
    assert torch.equal(back, chunk_of())


def test_a_fixed_rate_takes_the_bytes_that_were_promised(machine):
    one = machine(profile="int4")
    assert one.store(key_of("a"), chunk_of())
    assert one.store(key_of("b"), torch.zeros(SHAPE))
    promised = one.adapter._serde.estimate_serialized_size(LAYOUT)
    assert [path.stat().st_size for path in one.files] == [promised, promised]
    assert promised < RAW / 2
    found, back = one.load(key_of("a"))
    assert found
    keys, values = chunk_of().unflatten(3, (HEADS, DIM)).transpose(2, 3).contiguous()
    layout = KVLayout(LAYERS, HEADS, DIM, torch.float16)
    want = Profile.named("int4").encode(KV.of(zip(keys, values, strict=True)), layout)
    for place, layer in enumerate(want.decode().layers):
        assert torch.equal(back[0, place], layer.key.transpose(0, 1).flatten(1))
        assert torch.equal(back[1, place], layer.value.transpose(0, 1).flatten(1))


def test_a_variable_rate_needs_its_share_and_is_padded_to_it(machine):
    with pytest.raises(ValueError, match=r"no fixed rate.*max_share"):
        serde_of(profile="lossless-zstd").estimate_serialized_size(LAYOUT)
    one = machine(profile="lossless-zstd", max_share=0.97)
    assert one.store(key_of("a"), chunk_of().round())
    assert [path.stat().st_size for path in one.files] == [-(-97 * RAW // 100)]
    found, back = one.load(key_of("a"))
    assert found
    assert torch.equal(back, chunk_of().round())


def test_the_size_trap_is_there(machine):
    """A serde that returns fewer bytes than it promised is stored so, and never read back: why frames are padded."""
    one = machine(profile="lossless-zstd", max_share=0.97)
    serializer = one.adapter._serde._serializer
    real = serializer.serialize

    def shorter(src, dst, key):
        return real(src, dst, key) - 1

    serializer.serialize = shorter
    assert one.store(key_of("a"), chunk_of().round())
    assert [path.stat().st_size for path in one.files] == [-(-97 * RAW // 100) - 1]
    assert not one.load(key_of("a"))[0]


def test_a_chunk_that_does_not_fit_is_not_stored(machine):
    one = machine(profile="lossless-zstd", max_share=0.3)
    assert not one.store(key_of("a"), chunk_of())
    assert one.files == []


@pytest.mark.parametrize("place", [0, 5, 60, 300, -1])
def test_damage_is_a_miss_and_nothing_is_written(machine, place):
    one = machine(profile="none")
    assert one.store(key_of("a"), chunk_of())
    (path,) = one.files
    data = bytearray(path.read_bytes())
    data[place] ^= 0x40
    path.write_bytes(data)
    found, back = one.load(key_of("a"))
    assert not found
    assert torch.equal(back, torch.full(SHAPE, 7.0, dtype=torch.float16))


def test_a_file_under_another_key_is_a_miss(machine):
    one = machine(profile="none")
    assert one.store(key_of("a"), chunk_of())
    assert one.store(key_of("b"), chunk_of(1))
    first, second = one.files
    second.write_bytes(first.read_bytes())
    assert one.load(key_of("a"), "x")[0]
    assert not one.load(key_of("b"), "y")[0]


def test_another_models_file_is_a_miss(machine):
    one = machine(profile="none")
    assert one.store(key_of("a"), chunk_of())
    assert one.store(key_of("a", "other/model"), chunk_of(1))
    mine = next(path for path in one.files if "some" in path.name)
    other = next(path for path in one.files if "other" in path.name)
    mine.write_bytes(other.read_bytes())
    assert not one.load(key_of("a"))[0]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"profile": "none", "kv_head": 2}, "no 'kv_head'; allowed are profile, kv_heads, max_share"),
        ({}, "lacks 'profile'"),
        ({"profile": "zip"}, "unknown profile 'zip'"),
        ({"profile": "none", "max_share": 0}, "max_share is 0"),
        ({"profile": "none", "max_workers": 0}, "max_workers is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(settings, words):
    with pytest.raises(ValueError, match=words):
        serde_of(**settings)


@pytest.mark.parametrize("profile", ["duoattention", "kvquant-3bit", "kvserve-default"])
def test_profiles_that_need_more_than_the_chunk_are_refused(profile):
    with pytest.raises(ValueError, match=r"cannot be used in an engine|drops tokens"):
        serde_of(profile=profile).estimate_serialized_size(LAYOUT)


def test_chunks_of_another_shape_are_refused():
    serde = serde_of(profile="none")
    with pytest.raises(ValueError, match="a chunk is"):
        serde.estimate_serialized_size(MemoryLayoutDesc([torch.Size([3, 32, 64])], [torch.float16]))
    with pytest.raises(ValueError, match="2 groups"):
        serde.estimate_serialized_size(MemoryLayoutDesc([SHAPE, SHAPE], [torch.float16] * 2))


def test_versions():
    require_version("0.5.6")
    for other in ("0.4.9", "0.6.0", "1.5.0", "dev"):
        with pytest.raises(ImportError, match=r"follows the interface of 0\.5"):
            require_version(other)


def test_it_is_what_lmcache_asks_for():
    assert not getattr(KVServeSerializer, "__abstractmethods__", ())
    assert SerdeSettings.from_kwargs({"profile": "int4", "kv_heads": 2}).max_workers == 1
