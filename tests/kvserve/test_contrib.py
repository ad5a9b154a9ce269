"""A codec takes one file: in the package's own folder, in a user's file, or in an installed package."""

import importlib.util
import sys

import pytest
from kvserve_helpers import kv_of, layout_of, same, sent

from diffkv_repro.kvserve import CODECS, Profile, contrib
from diffkv_repro.kvserve.frame import FrameError
from diffkv_repro.kvserve.header import Header

THEIRS = '''
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from diffkv_repro.kvserve.codecs import CODECS, Codec, CodecError, Coded, require_levels


@CODECS.add
@dataclass(frozen=True)
class Runs(Codec):
    """Run lengths, up to ``longest``."""

    longest: int = 255
    name: ClassVar[str] = "runs"
    format_id: ClassVar[int] = 200

    def encode(self, symbols, levels, contexts=1):
        edges = np.flatnonzero(np.diff(symbols)) + 1
        whole = np.split(symbols, edges)
        pieces = [run[i : i + self.longest] for run in whole for i in range(0, len(run), self.longest)]
        return Coded(b"", b"".join(bytes([len(piece), piece[0]]) for piece in pieces if len(piece)))

    def decode(self, data, count, levels, contexts=1):
        pairs = np.frombuffer(bytes(data), dtype=np.uint8)
        if len(pairs) % 2 or pairs[::2].sum(dtype=np.int64) != count:
            raise CodecError(f"these are no runs of {count} symbols")
        return require_levels(np.repeat(pairs[1::2], pairs[::2]), levels)
'''


@pytest.fixture
def registry(monkeypatch):
    """Registrations of a test end with it."""
    monkeypatch.setattr(CODECS, "_by_name", dict(CODECS._by_name))
    monkeypatch.setattr(CODECS, "_by_id", dict(CODECS._by_id))
    return CODECS


def load(path):
    spec = importlib.util.spec_from_file_location("their_codec", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_codec_in_a_users_own_file_is_a_part_like_any_other(tmp_path, registry, monkeypatch):
    path = tmp_path / "their_codec.py"
    path.write_text(THEIRS)
    layout = layout_of()
    kv = kv_of(layout, 30, "constant")
    with pytest.raises(ValueError, match="unknown codec 'runs'"):
        Profile.parse("none | uniform | runs")
    module = load(path)
    profile = Profile.parse("none | uniform K16 V16 | runs longest=9")
    assert profile.codec == module.Runs(longest=9)
    assert Profile.from_yaml(profile.to_yaml()) == Profile.parse(str(profile)) == profile
    assert same(sent(profile, kv, layout), sent(Profile.parse("none | uniform K16 V16 | none"), kv, layout))
    with pytest.raises(ValueError, match="is already registered"):
        load(path)
    # Whoever has not loaded the file refuses its frames, by their format id.
    frame = profile.encode(kv, layout)
    monkeypatch.delitem(CODECS._by_name, "runs")
    monkeypatch.delitem(CODECS._by_id, 200)
    data = memoryview(frame.to_bytes())
    taken = iter(data[start : start + 1] for start in range(len(data)))
    with pytest.raises(FrameError, match="unknown codec format id 200"):
        Header.read(lambda count: b"".join(next(taken) for _ in range(count)), layout, 1 << 30)


def test_an_installed_package_names_its_parts_in_an_entry_point(tmp_path, registry, monkeypatch):
    (tmp_path / "theirs.py").write_text(THEIRS)
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{contrib.GROUP}]\nruns = theirs\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert contrib.register()[-1] == "theirs"
        assert "runs" in CODECS.names
    finally:
        sys.modules.pop("theirs", None)


def test_every_file_of_the_folder_is_found():
    assert "diffkv_repro.kvserve.contrib.deflate" in contrib.register()
    assert type(CODECS.make("deflate")).__module__ == "diffkv_repro.kvserve.contrib.deflate"
