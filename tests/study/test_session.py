"""What a notebook publishes lands whole or not at all, and its own check is strict."""

import json
import shutil
import subprocess
import sys

import plotly.graph_objects as go
import pytest

from diffkv_repro.core.files import WriteError
from diffkv_repro.study import ClaimFailed, Measurement, Study, drawing
from diffkv_repro.study.claims import load_claims
from diffkv_repro.study.gallery import write_gallery
from diffkv_repro.study.pages import redraw
from diffkv_repro.study.records import read_record
from diffkv_repro.study.verdicts import judge_all

MEASURED = {"nine": Measurement(9), "big": Measurement(7.5, "x", 3)}


def plot():
    return go.Figure(go.Scatter(x=[1, 2], y=[3, 4])).update_layout(title="t")


def make_study(**options):
    return Study("90_good", **({"profile": "cpu", "output": "out", "seed": 4, "model": "m"} | options))


@pytest.fixture
def no_browser(monkeypatch):
    def refuse(self, *arguments, **options):
        raise RuntimeError("no Chrome here")

    monkeypatch.setattr(go.Figure, "to_image", refuse)


def test_publish_writes_record_and_page(project, no_browser):
    study = make_study()
    study.config["weights"] = "w"
    figure = study.publish("diffkv-fig90", plot(), MEASURED, basis="made up")
    folder = project / "out"
    assert sorted(path.name for path in folder.iterdir()) == ["diffkv-fig90.html", "diffkv-fig90.json", "plotly.min.js"]
    record = read_record(folder, "diffkv-fig90")
    assert record.measurements == MEASURED
    assert record.provenance["config"] == {"model": "m", "weights": "w"}
    assert (record.profile, record.provenance["seed"]) == ("cpu", 4)
    assert record.plot["data"][0]["type"] == "scatter"
    page = (folder / "diffkv-fig90.html").read_text()
    assert 'src="plotly.min.js"' in page
    assert "made up" in figure.layout.annotations[-1].text
    assert "seed 4" in figure.layout.annotations[-1].text


def test_without_a_browser_there_is_no_stale_picture(project, no_browser, caplog):
    (project / "out").mkdir()
    (project / "out" / "diffkv-fig90.png").write_bytes(b"of an earlier run")
    make_study().publish("diffkv-fig90", plot(), MEASURED)
    assert not (project / "out" / "diffkv-fig90.png").exists()
    assert "no PNG of diffkv-fig90: no browser could draw it" in caplog.text


def test_a_picture_where_a_browser_is_found():
    image = drawing.png_image("x", drawing.finish(plot(), "foot"))
    found = any(map(shutil.which, ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser")))
    assert (image or b"")[:4] == (b"\x89PNG" if found else b"")


def test_what_does_not_belong_is_refused(project):
    study = make_study()
    with pytest.raises(ValueError, match=r"diffkv-fig91 is not of notebook 90_good; it has diffkv-fig90"):
        study.publish("diffkv-fig91", None, {})
    with pytest.raises(ValueError, match="no claim of diffkv-fig90 asks for ten"):
        study.publish("diffkv-fig90", None, {"ten": Measurement(10)})
    with pytest.raises(ValueError, match=r"claims.yaml has no figure of notebook '77_none'"):
        Study("77_none", profile="cpu", output="out", seed=0)


def test_check_is_strict(project):
    study = make_study()
    with pytest.raises(ClaimFailed, match="measured nothing"):
        study.check()
    study.publish("diffkv-fig90", None, MEASURED | {"nine": Measurement(8)})
    with pytest.raises(ClaimFailed, match=r"diffkv-fig90-nine: It is nine. measured 8, expected == 9"):
        study.check()
    study.publish("diffkv-fig90", None, MEASURED)
    assert list(study.check().data["verdict"]) == ["pass", "pass"]


def test_check_ignores_what_another_run_measured(project, monkeypatch):
    study = make_study()
    study.publish("diffkv-fig90", None, MEASURED)
    monkeypatch.setenv("DIFFKV_REPRO_RUN", "another")
    with pytest.raises(ClaimFailed, match="measured nothing"):
        study.check()


def test_a_full_disk_leaves_the_earlier_figure(project, no_browser):
    study = make_study()
    study.publish("diffkv-fig90", plot(), MEASURED)
    folder = project / "out"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    code = f"""
import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import plotly.graph_objects as go
from diffkv_repro.study import Measurement, Study, drawing
drawing.png_image = lambda *_: None
study = Study("90_good", profile="cpu", output={str(folder)!r}, seed=5)
plot = go.Figure(go.Scatter(y=list(range(20_000))))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
study.publish("diffkv-fig90", plot, {{"nine": Measurement(9), "big": Measurement(1.0)}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"WriteError: [Errno 27] cannot write {folder}/diffkv-fig90.json: File too large" in done.stderr
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_an_output_folder_that_cannot_be_written(project):
    (project / "file").write_text("")
    with pytest.raises(WriteError, match=r"cannot write .*file/diffkv-fig90"):
        make_study(output="file").publish("diffkv-fig90", None, MEASURED)


def test_a_page_that_cannot_be_replaced_leaves_the_earlier_record(project, no_browser):
    study = make_study()
    study.publish("diffkv-fig90", plot(), MEASURED)
    page = project / "out" / "diffkv-fig90.html"
    before = (project / "out" / "diffkv-fig90.json").read_text()
    page.unlink()
    page.mkdir()
    with pytest.raises(WriteError, match=r"diffkv-fig90\.html"):
        study.publish("diffkv-fig90", plot(), MEASURED | {"big": Measurement(8)})
    assert (project / "out" / "diffkv-fig90.json").read_text() == before


def test_profiles_decide_the_device(project):
    devices = {profile: make_study(profile=profile).device for profile in ("smoke", "cpu", "gpu", "full")}
    assert devices == {"smoke": "cpu", "cpu": "cpu", "gpu": "cuda", "full": "cuda"}


def test_gallery_shows_verdicts_and_what_is_missing(project, no_browser):
    make_study().publish("diffkv-fig90", plot(), MEASURED)
    figures = load_claims(project / "claims.yaml")
    judged = judge_all(figures.values(), project / "out", project)
    page = write_gallery(project / "out", figures.values(), judged).read_text()
    assert "4 claims: 2 pass, 0 refuted, 0 fail, 2 not run." in page
    assert '<iframe data-src="diffkv-fig90.html"' in page
    assert "pass</span></td><td>It is nine.</td>" in page
    assert "<td>diffkv-fig92</td>" in page
    assert "http" not in page, "the page must work without a network"


def test_the_figure_survives_as_data(project, no_browser):
    figure = make_study().publish("diffkv-fig90", plot(), MEASURED)
    stored = json.loads((project / "out" / "diffkv-fig90.json").read_text())["plot"]
    again = go.Figure(stored).update_layout(template=drawing.TEMPLATE)
    assert again.to_plotly_json() == figure.to_plotly_json()


def test_a_figure_with_a_foot_keeps_it_above_the_next():
    figure = drawing.finish(go.Figure(go.Scatter(x=[1], y=[2])), "first<br>line")
    height = figure.layout.height
    drawing.finish(figure, "second")
    (foot,) = figure.layout.annotations
    assert foot.text == "first<br>line<br>second"
    assert figure.layout.height > height
    assert foot.yshift == 4 - figure.layout.margin.b


def test_a_figure_drawn_anew_has_the_new_look_and_the_old_numbers(project, no_browser):
    study = make_study()
    lines = [go.Scatter(x=[1, 2], y=[3, place], mode="lines", line_color=drawing.PALETTE[place]) for place in (0, 1)]
    study.publish("diffkv-fig90", go.Figure(lines), MEASURED, basis="made up")
    before = read_record(study.folder, "diffkv-fig90")
    old = json.loads((study.folder / "diffkv-fig90.json").read_text())
    for trace in old["plot"]["data"]:
        trace["line"].pop("dash")
    (study.folder / "diffkv-fig90.json").write_text(json.dumps(old))
    (study.folder / "diffkv-fig90.html").unlink()
    assert redraw(study.folder, "diffkv-fig90")
    assert read_record(study.folder, "diffkv-fig90") == before
    assert "made up" in (study.folder / "diffkv-fig90.html").read_text()
    assert not redraw(study.folder, "diffkv-fig91")
    study.publish("diffkv-fig90", None, MEASURED)
    assert not redraw(study.folder, "diffkv-fig90")
