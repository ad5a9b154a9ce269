"""``diffkv-repro search`` and ``exhaustive`` on a real model, tiny."""

import json

import pytest
from typer.testing import CliRunner

from diffkv_repro.cli import app
from diffkv_repro.kvserve.controller import Controller
from diffkv_repro.kvserve.exhaustive import Exhaustive
from diffkv_repro.kvserve.pareto import ProfileLibrary
from diffkv_repro.kvserve.space import SPACES, Space

SIZES = ["--tokens", "48", "--continuation", "8", "--documents", "1"]


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("The river rose in the night and the mill stood still. " * 40)
    return folder


def test_a_folder_of_texts_is_searched_and_gone_on_with(tmp_path, texts):
    out = tmp_path / "found"
    command = ["search", "-o", out, "--workload", texts, "--space", "artifact", "--budget", 4, "--cold-start", 2,
               "--min-quality", 0.2, "--executor", "serial", *SIZES]  # fmt: skip
    first = run(*command)
    assert first.exit_code == 0, first.output
    assert "of 144 candidates evaluated" in first.output
    assert "ratios measured: " in first.output, "a log of a run without a terminal shows that it goes on"
    found = json.loads((out / "search.json").read_text())
    assert found["evaluations"] == len(found["steps"]) <= 4
    assert found["provenance"]["config"]["sources"] == [str(texts)]
    library = ProfileLibrary.load(out / "library.json")
    entry = library.entries[0]
    assert entry.workload == "texts"
    profiles = library.for_controller(entry.model, entry.device)
    assert Controller(profiles)

    refused = run(*command)
    assert refused.exit_code == 2
    assert "--resume" in refused.output
    again = run(*command, "--resume")
    assert again.exit_code == 0
    repeated = json.loads((out / "search.json").read_text())
    assert repeated | {"provenance": 0} == found | {"provenance": 0}

    unreachable = run(*command, "--resume", "--min-quality", 1.9)
    assert unreachable.exit_code == 1
    assert "no profile keeps a quality of 1.9; the highest of those tried is" in unreachable.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space", "huge"], "unknown space 'huge'; allowed are none"),
        (["--workload", "no-such-folder"], "unknown text source 'no-such-folder'"),
        (["--executor", "threads"], "executor is 'threads'; allowed are serial"),
        (["--acquisition", "ucb"], "unknown acquisition 'ucb'"),
        (["--continuation", "48"], "continuation is 48; allowed are 1 to 47"),
        (["--sample", "9"], "9 documents are wanted; allowed are 1 to"),
    ],
)
def test_what_a_user_can_mend_is_one_line(tmp_path, texts, arguments, message):
    given = [] if "--workload" in arguments else ["--workload", texts]
    result = run("search", "-o", tmp_path / "x", "--executor", "serial", *SIZES, *given, *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output


def test_help_has_an_example():
    text = " ".join(run("search", "--help").output.split())
    for word in ("--model", "--workload", "--space", "--budget", "--min-quality", "--resume", "--executor", "Example"):
        assert word in text


def test_exhaustive_is_a_table_that_goes_on(tmp_path, texts, monkeypatch):
    from diffkv_repro.core import paths

    monkeypatch.setattr(paths, "cache_dir", lambda: tmp_path / "cache")
    whole = SPACES["artifact"]
    monkeypatch.setitem(SPACES, "few", Space("few", whole.transforms, whole.quantizers[::60], whole.codecs))
    path = tmp_path / "table.json"
    for _ in range(2):
        result = run("exhaustive", "-o", path, "--workload", texts, "--space", "few", *SIZES)
        assert result.exit_code == 0, result.output
    table = Exhaustive.load(path)
    assert table.ratio.shape == (3, 1)
    assert table.candidates.name == "few"
    assert table.best(0.1) == int(table.mean_ratio.argmax())
    with pytest.raises(ValueError, match="no candidate has a quality of 5"):
        table.best(5)
    path.write_text(path.read_text().replace(table.ids[0], "0" * 12))
    with pytest.raises(ValueError, match="has changed since"):
        _ = Exhaustive.load(path).candidates
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no evaluated space"):
        Exhaustive.load(path)
