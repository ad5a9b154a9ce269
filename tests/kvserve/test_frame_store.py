"""A folder of frames: found by content, whole or absent, bounded, for several readers and writers."""

import math
import os
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffkv_repro.core.files import WriteError
from diffkv_repro.kvserve.frame_store import (
    GRAIN,
    STORES,
    FolderStore,
    FrameMissing,
    FrameStore,
    Receipt,
    open_store,
    prompt_keys,
)
from diffkv_repro.kvserve.header import FrameError

TOKENS = st.lists(st.integers(0, 2**31), max_size=5 * GRAIN)


@given(TOKENS, TOKENS)
def test_prompts_share_exactly_the_keys_of_their_common_beginning(first, second):
    a, b = prompt_keys(first, "m"), prompt_keys(second, "m")
    assert [key.tokens for key in a] == list(range(len(first) // GRAIN * GRAIN, 0, -GRAIN))
    common = sum(first[:at] == second[:at] for at in range(GRAIN, min(len(first), len(second)) + 1, GRAIN))
    assert len(set(a) & set(b)) == common


def test_everything_that_matters_changes_the_key():
    tokens = list(range(40))
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    names = {prompt_keys(tokens, identity)[0].name for identity in ("a", "b", "a\0b", "a\0", "")}
    assert len(names | {prompt_keys(swapped, "a")[0].name}) == 6
    assert prompt_keys([*tokens[:39], 7], "a") == prompt_keys(tokens, "a"), "a part of a grain has no key"
    assert prompt_keys(tokens, "a") == prompt_keys(tuple(tokens), "a")
    assert prompt_keys(tokens[: GRAIN - 1], "a") == []


def test_a_frame_is_found_by_the_first_name_that_is_there(tmp_path):
    store = FolderStore(tmp_path)
    assert isinstance(store, FrameStore)
    assert store.find([]) is None
    assert store.find(["a", "b"]) is None
    assert store.put("b", [b"12", b"345"]) == 5
    assert store.find(["a", "b"]) == 1
    store.put("a", [b"6"])
    assert store.find(["a", "b"]) == 0
    assert (store.get("b", 5), store.get("a", 9)) == (b"12345", b"6")
    store.discard("a")
    store.discard("a")
    assert store.find(["a", "b"]) == 1


def test_a_frame_that_another_process_puts_is_found_though_the_folder_was_just_listed(tmp_path):
    mine, other = FolderStore(tmp_path), FolderStore(tmp_path)
    for name in "bcdefg":
        assert mine.find(["a", name]) is None
        other.put(name, [b"x"])
        assert mine.find(["a", name]) == 1


def test_an_old_listing_is_kept_and_a_changed_folder_is_listed_again(tmp_path):
    store = FolderStore(tmp_path)
    store.put("b", [b"x"])
    os.utime(tmp_path, (time.time() - 60,) * 2)
    assert store.find(["a", "b"]) == 1
    (tmp_path / "c.kvsf").write_bytes(b"x")
    assert store.find(["a", "c"]) == 1


def test_a_writer_that_fails_leaves_nothing(tmp_path):
    store = FolderStore(tmp_path)

    def pieces():
        yield b"half"
        raise RuntimeError("encoding failed")

    with pytest.raises(RuntimeError, match="encoding failed"):
        store.put("a", pieces())
    assert store.find(["a"]) is None
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_there_or_too_large_is_said(tmp_path):
    store = FolderStore(tmp_path)
    with pytest.raises(FrameMissing, match="frame a is not in"):
        store.get("a", 10)
    store.put("a", [b"12345"])
    with pytest.raises(FrameError, match="more than 4 bytes"):
        store.get("a", 4)
    for name in ("../a", "a/b", "", "a.b"):
        with pytest.raises(ValueError, match="allowed are letters and digits"):
            store.get(name, 10)


def test_a_folder_that_cannot_be_written_is_a_write_error(tmp_path):
    store = FolderStore(tmp_path / "store")
    (tmp_path / "store").rmdir()
    (tmp_path / "store").write_text("a file")
    with pytest.raises(WriteError, match="cannot write"):
        store.put("a", [b"x"])


def test_what_was_used_longest_ago_goes(tmp_path):
    store = FolderStore(tmp_path, most_bytes=100)
    for age, name in ((50, "a"), (40, "b"), (30, "c")):
        store.put(name, [bytes(30)])
        os.utime(tmp_path / f"{name}.kvsf", (time.time() - age,) * 2)
    store.get("a", 30)
    store.put("d", [bytes(30)])
    assert [store.find([name]) for name in "abcd"] == [0, None, 0, 0]
    store.put("e", [bytes(300)])
    assert [store.find([name]) for name in "abcde"] == [None, None, None, None, 0]
    with pytest.raises(ValueError, match="most_bytes is 0"):
        FolderStore(tmp_path, most_bytes=0)


def test_receipts_come_once_and_to_those_who_wait(tmp_path):
    writer, reader, stranger = FolderStore(tmp_path), FolderStore(tmp_path), FolderStore(tmp_path)
    reader.acknowledge("a", Receipt(0.5, 0.25, 100))
    reader.acknowledge("b", Receipt(1.0, 2.0, 300))
    assert stranger.receipts(["c"]) == {}
    assert writer.receipts(["a", "c"]) == {"a": Receipt(0.5, 0.25, 100)}
    assert writer.receipts(["a"]) == {}
    assert writer.receipts(["b"]) == {"b": Receipt(1.0, 2.0, 300)}
    assert list((tmp_path / "receipts").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"fetch": 1}', '{"fetch": -1, "decode": 1, "sent_bytes": 1}',
                                  '{"fetch": 1e999, "decode": 1, "sent_bytes": 1}'])  # fmt: skip
def test_a_receipt_that_is_none_is_thrown_away(tmp_path, text):
    store = FolderStore(tmp_path)
    (tmp_path / "receipts").mkdir()
    (tmp_path / "receipts" / "a.1.receipt.json").write_text(text)
    assert store.receipts(["a"]) == {}


def test_receipts_that_nobody_waits_for_go_in_time(tmp_path):
    store = FolderStore(tmp_path)
    store.acknowledge("a", Receipt(0, 0, 0))
    (path,) = (tmp_path / "receipts").iterdir()
    store.receipts(["b"])
    assert path.exists()
    os.utime(path, (time.time() - 7200,) * 2)
    store.receipts(["b"])
    assert not path.exists()


def test_stores_are_opened_by_their_address(tmp_path, monkeypatch):
    assert isinstance(open_store(str(tmp_path / "new")), FolderStore)
    with pytest.raises(ValueError, match="store is 'mine://x:1'; allowed are a folder"):
        open_store("mine://x:1")
    monkeypatch.setitem(STORES, "mine", lambda address, *, most_bytes, **own: (address, most_bytes, own))
    assert open_store("mine://x:1") == ("mine://x:1", math.inf, {})
    assert open_store("mine://x:1", keys="k") == ("mine://x:1", math.inf, {"keys": "k"})
    with pytest.raises(ValueError, match="keys is given with a folder"):
        open_store(str(tmp_path), keys="k")
