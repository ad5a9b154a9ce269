import os
import resource
import subprocess
import sys

import pytest

from diffkv_repro.core.files import WriteError, atomic_path, sha256_of, write_text


def test_writes_and_replaces(tmp_path):
    target = tmp_path / "deep" / "er" / "a.json"
    write_text(target, "one")
    write_text(target, "two ä")
    assert target.read_text(encoding="utf-8") == "two ä"
    assert [path.name for path in target.parent.iterdir()] == ["a.json"]
    assert target.stat().st_mode & 0o777 == 0o666 & ~os.umask(os.umask(0o022))


def test_an_exception_leaves_what_was_there(tmp_path):
    target = write_text(tmp_path / "a.txt", "before")

    def half_way():
        with atomic_path(target) as temporary:
            temporary.write_text("after")
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        half_way()
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]


def test_a_folder_in_the_way_is_named(tmp_path):
    blocker = write_text(tmp_path / "file", "")
    with pytest.raises(WriteError, match=r"cannot write .*file/a\.txt: File exists"):
        write_text(blocker / "a.txt", "x")


def test_a_full_disk_is_named_and_leaves_nothing(tmp_path):
    """A limit on file size stands in for a full disk: the same error path, and no privileges needed."""
    target = write_text(tmp_path / "a.txt", "before")
    code = (
        "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "from pathlib import Path; from diffkv_repro.core.files import write_text\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"write_text(Path({str(target)!r}), 'x' * 100_000)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"WriteError: [Errno 27] cannot write {target}: File too large" in done.stderr
    assert target.read_text() == "before"
    assert list(tmp_path.iterdir()) == [target]
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY


def test_sha256(tmp_path):
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert sha256_of(write_text(tmp_path / "abc", "abc")) == known
