"""The vLLM connector when frames are damaged, lost or lossy, and when a store fails: a prefill is what it costs."""

import pytest
import torch
from vllm_standins import PROMPT, entry, frames, holds

from diffkv_repro.kvserve.frame_store import FolderStore, PromptKey
from diffkv_repro.kvserve.library import ProfileLibrary
from diffkv_repro.kvserve.vllm_plans import Load, Save


def truncated(data):
    return data[: len(data) // 2]


def empty(data):
    return b""


def longer(data):
    return data + b"x"


def huge(data):
    return data + bytes(1 << 22)


def flipped(data):
    return data[:-20] + bytes([data[-20] ^ 1]) + data[-19:]


@pytest.mark.parametrize("harm", [truncated, empty, longer, huge, flipped])
def test_a_damaged_frame_costs_a_prefill_and_is_thrown_away(engine, tmp_path, harm):
    engine("kv_producer").serve(PROMPT)
    (path,) = frames(tmp_path)
    path.write_bytes(harm(path.read_bytes()))
    consumer = engine("kv_consumer")
    blocks, loaded = consumer.serve(PROMPT)
    assert loaded == 144
    assert consumer.recomputed == len(PROMPT)
    assert holds(consumer, blocks, PROMPT)
    assert frames(tmp_path) == []
    engine("kv_producer").serve(PROMPT)
    fresh = engine("kv_consumer")
    assert fresh.serve(PROMPT)[1] == 144
    assert fresh.recomputed == 0


def test_every_flipped_bit_costs_a_prefill_at_most(engine, tmp_path):
    engine("kv_producer").serve(PROMPT[:32])
    (path,) = frames(tmp_path)
    data = path.read_bytes()
    for place in range(0, len(data), max(1, len(data) // 97)):
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
        consumer = engine("kv_consumer")
        blocks, _ = consumer.serve(PROMPT[:32])
        assert holds(consumer, blocks, PROMPT[:32]), place


def test_a_frame_under_another_name_is_refused(engine, tmp_path):
    producer = engine("kv_producer")
    producer.serve(PROMPT)
    (first,) = frames(tmp_path)
    producer.serve(PROMPT[::-1])
    other = next(path for path in frames(tmp_path) if path != first)
    other.write_bytes(first.read_bytes())
    consumer = engine("kv_consumer")
    blocks, _ = consumer.serve(PROMPT[::-1])
    assert holds(consumer, blocks, PROMPT[::-1])
    assert consumer.recomputed


def test_a_frame_that_goes_between_look_and_load_costs_a_prefill(engine, tmp_path, monkeypatch):
    engine("kv_producer").serve(PROMPT)
    consumer = engine("kv_consumer")
    real = FolderStore.get

    def gone(self, name, most):
        self.discard(name)
        return real(self, name, most)

    monkeypatch.setattr(FolderStore, "get", gone)
    blocks, loaded = consumer.serve(PROMPT)
    assert loaded == 144
    assert holds(consumer, blocks, PROMPT)


@pytest.mark.parametrize("error", [OSError("the disk is gone"), RuntimeError("a mistake of ours"), MemoryError()])
@pytest.mark.parametrize("verb", ["find", "get", "put", "discard", "receipts", "acknowledge"])
def test_no_failure_of_a_store_reaches_the_engine(engine, tmp_path, monkeypatch, verb, error):
    library = tmp_path / "library.yaml"
    ProfileLibrary((entry("quick", "lossless-zstd"),)).save(library)
    adaptive = {"profiles": str(library)}
    engine("kv_producer", adaptive).serve(PROMPT)
    if verb == "discard":
        (path,) = frames(tmp_path)
        path.write_bytes(b"damaged")

    def fail(*given):
        raise error

    both = engine(extra=adaptive)
    monkeypatch.setattr(FolderStore, verb, fail)
    blocks, _ = both.serve(PROMPT)
    assert holds(both, blocks, PROMPT)
    blocks, _ = both.serve(PROMPT[::-1])
    assert holds(both, blocks, PROMPT[::-1])


def test_a_lossy_frame_comes_back_as_its_profile_gives_it_and_is_not_stored_again(engine, tmp_path):
    engine("kv_producer", {"profile": "int4"}).serve(PROMPT[:96])
    both = engine(extra={"profile": "lossless-zstd"})
    blocks, loaded = both.serve(PROMPT)
    assert loaded == 96
    assert not holds(both, blocks, PROMPT)
    found = both.read(blocks, len(PROMPT))[0]
    key, _ = both.kv(PROMPT, 0)
    assert torch.equal(found.key[:, 96:], key[:, 96:])
    # Keys lie within 1, an int4 step of them is at most 2 / 15.
    assert 0 < (found.key - key).abs().max() <= 1 / 15 + 1e-3
    assert len(frames(tmp_path)) == 1, "a longer frame would carry the loss on as if it were the model's"


@pytest.mark.parametrize("profile", ["int4", "damaged"])
def test_what_shares_the_blocks_of_a_bad_load_is_not_stored_until_they_are_given_out_anew(engine, tmp_path, profile):
    engine("kv_producer", {"profile": "int4"}).serve(PROMPT[:96])
    (path,) = frames(tmp_path)
    both = engine()
    transfer, blocks = both.worker._transfer, tuple(range(10))
    both.compute(PROMPT, blocks, 0, len(PROMPT))
    if profile == "damaged":
        path.write_bytes(path.read_bytes()[:-1])
    key = PromptKey(96, path.stem)
    transfer.load([Load("a", key, 32, 96, blocks)])
    assert transfer.take_failed() == (set(blocks[2:6]) if profile == "damaged" else set())
    others = [PromptKey(tokens, f"shared{tokens}") for tokens in (32, 48, 144)]
    transfer.save([Save("b", other, blocks) for other in others])
    assert {path.stem for path in frames(tmp_path)} - {key.name} == {"shared32"}, "its blocks are before the load's"
    transfer.load([], fresh=blocks[2:6])
    transfer.save([Save("c", others[2], blocks)])
    assert "shared144" in {path.stem for path in frames(tmp_path)}


def test_a_lossless_load_may_be_stored_with_what_follows(engine, tmp_path):
    engine("kv_producer").serve(PROMPT[:96])
    both = engine()
    both.serve(PROMPT)
    assert len(frames(tmp_path)) == 2
    again = engine("kv_consumer")
    blocks, loaded = again.serve(PROMPT)
    assert (loaded, holds(again, blocks, PROMPT)) == (144, True)
