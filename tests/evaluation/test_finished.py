"""Finished answers survive whatever ends the process, and never answer for something else."""

import os
import signal
import sqlite3

import pytest

from diffkv_repro.core.files import WriteError
from diffkv_repro.evaluation.finished import Finished, identity_of
from diffkv_repro.evaluation.methods import make_method
from diffkv_repro.models import load_model
from tests.tiny import save, tiny_llama


def test_answers_come_back_as_they_were(tmp_path):
    answers = {"a": [-0.1 - 0.2, True], "b": "text\n", "c": [float("-inf"), False], "d": {"deep": [1, None]}}
    first = Finished(tmp_path / "new" / "folder" / "done.db", {"model": "m"})
    first.put(([name, {"until": ["x"], "n": 1}], answer) for name, answer in answers.items())
    first.close()
    second = Finished(tmp_path / "new" / "folder" / "done.db", {"model": "m"})
    for name, answer in answers.items():
        assert second.get([name, {"n": 1, "until": ["x"]}]) == answer
    assert second.get(["a", {"until": ["x"], "n": 2}]) is None


def test_answers_of_another_identity_are_not_seen(tmp_path):
    one, other = (Finished(tmp_path / "done.db", {"method": name}) for name in ("one", "other"))
    one.put([("request", 1)])
    assert other.get("request") is None
    other.put([("request", 2)])
    assert (one.get("request"), other.get("request")) == (1, 2)
    one.put([("request", 3)])
    assert (one.get("request"), other.get("request")) == (3, 2)


def test_without_a_path_nothing_is_kept():
    nothing = Finished(None, {})
    nothing.put([("request", 1)])
    assert nothing.get("request") is None
    nothing.close()


def test_what_was_put_is_there_after_a_kill(tmp_path):
    child = os.fork()
    if child == 0:
        store = Finished(tmp_path / "done.db", {})
        for index in range(5):
            store.put([(index, index), (-index - 1, index)])
        store._table.execute("INSERT INTO finished VALUES ('half', 'of a transaction')")
        os.kill(os.getpid(), signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    store = Finished(tmp_path / "done.db", {})
    assert [store.get(index) for index in range(-5, 6)] == [4, 3, 2, 1, 0, 0, 1, 2, 3, 4, None]
    assert sqlite3.connect(tmp_path / "done.db").execute("SELECT count(*) FROM finished").fetchone() == (10,)


def test_processes_that_write_at_once_lose_nothing(tmp_path):
    path, children = tmp_path / "done.db", []
    for writer in range(4):
        children.append(os.fork())
        if children[-1] == 0:
            failed = 1
            try:
                store = Finished(path, {})  # all of them find no table
                for index in range(50):
                    store.put([((writer, index), index), ("shared", "whole")])
                    failed = int(store.get((writer, index)) != index)
                    if failed:
                        break
            finally:
                os._exit(failed)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 4
    store = Finished(path, {})
    assert all(store.get((writer, index)) == index for writer in range(4) for index in range(50))
    assert store.get("shared") == "whole"


def test_other_files_are_refused_by_name(tmp_path):
    (tmp_path / "notes.txt").write_text("not a data base, but long enough to be taken for one " * 20)
    with pytest.raises(ValueError, match=r"notes\.txt does not hold finished answers"):
        Finished(tmp_path / "notes.txt", {})
    with pytest.raises(WriteError, match="cannot be opened"):
        Finished(tmp_path, {})


def test_identity_holds_what_answers_depend_on(tmp_path):
    loaded = load_model(str(save(tiny_llama(), tmp_path / "a")), device="cpu")
    other = load_model(str(save(tiny_llama(max_position_embeddings=128), tmp_path / "b")), device="cpu")
    policy = make_method(window=8)
    found = identity_of(loaded, policy, "packed")
    loaded.tokenizer.pad_token = "w0"
    loaded.tokenizer(["w1", "w1 w2"], padding=True)  # what a use leaves behind in the tokenizer does not count
    assert identity_of(loaded, policy, "packed") == found
    assert identity_of(loaded, policy, "simulated") != found
    assert identity_of(loaded, make_method(window=9), "packed") != found
    assert identity_of(other, policy, "packed") != found
    loaded.tokenizer.add_tokens(["w97"])
    assert identity_of(loaded, policy, "packed") != found
