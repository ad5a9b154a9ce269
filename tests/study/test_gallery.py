"""The gallery's page can be read: contrast, colours without hue, one card a figure, nothing from a network."""

import colorsys
import html.parser
import itertools
import re
from pathlib import Path

import pytest

from diffkv_repro.study import drawing
from diffkv_repro.study.claims import load_claims
from diffkv_repro.study.gallery import write_gallery
from diffkv_repro.study.gallery_page import COLOURS, STYLE
from diffkv_repro.study.plots.policy import PRUNED_COLOUR, TIER_COLOURS
from diffkv_repro.study.records import record_path
from diffkv_repro.study.verdicts import judge_all

ROOT = Path(__file__).resolve().parents[2]


def luminance(colour):
    """Relative luminance of WCAG 2.2."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("name", COLOURS)
def test_text_has_the_contrast_of_wcag_aa(name):
    assert contrast(*COLOURS[name]) >= 4.5


def test_no_text_of_the_page_has_a_colour_of_its_own():
    """Colours of text come from the pairs above; what is left are lines and grounds."""
    assert not re.search(r"(?<![-\w])color:\s*#", STYLE)


def test_text_in_figures_can_be_read():
    layout = drawing.TEMPLATE.layout
    assert contrast(layout.font.color, "#FFFFFF") >= 4.5
    assert contrast("#666666", "#FFFFFF") >= 4.5  # the line at the foot


def test_the_palette_is_told_apart_by_any_eye_and_the_first_colours_in_grey():
    """Okabe and Ito's set; neighbours in the order of use differ in lightness or, where a figure has many, in hue."""
    assert len(set(drawing.PALETTE)) == len(drawing.PALETTE) == 7
    ours = {tuple(bytes.fromhex(colour[1:])) for colour in drawing.PALETTE}
    okabe_ito = {(0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167), (230, 159, 0), (86, 180, 233), (0, 0, 0)}
    assert ours == okabe_ito
    hues = [colorsys.rgb_to_hls(*(part / 255 for part in colour))[0] for colour in sorted(ours)]
    for (i, a), (j, b) in itertools.combinations(enumerate(sorted(ours)), 2):
        grey = abs(luminance(f"#{bytes(a).hex()}") - luminance(f"#{bytes(b).hex()}"))
        hue = min(abs(hues[i] - hues[j]), 1 - abs(hues[i] - hues[j]))
        assert grey > 0.015 or hue > 0.1


def test_tiers_grow_lighter_as_precision_falls():
    shades = [luminance(colour) for colour in (*TIER_COLOURS, PRUNED_COLOUR)]
    assert all(b - a > 0.2 for a, b in itertools.pairwise(shades))


def test_every_colour_of_a_line_can_be_seen_on_white():
    assert all(contrast(colour, "#FFFFFF") >= 1.9 for colour in (*drawing.PALETTE, drawing.PAPER_COLOUR))


class Page(html.parser.HTMLParser):
    """Open tags, links and ids of a page."""

    void = ("meta", "link", "img", "br", "input")

    def __init__(self, text):
        super().__init__()
        self.stack, self.ids, self.links, self.images, self.labels, self.controls = [], [], [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        if tag not in self.void:
            self.stack.append(tag)
        self.ids += [given["id"]] if "id" in given else []
        self.links += [given[name] for name in ("href", "src", "data-src") if name in given]
        self.images += [given] if tag == "img" else []
        self.labels += [given["for"]] if tag == "label" else []
        self.controls += [given["id"]] if tag in ("input", "select") else []

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag


@pytest.fixture(scope="module")
def gallery(tmp_path_factory):
    """The page of the committed figures, written beside links to them."""
    folder = tmp_path_factory.mktemp("gallery") / "figures"
    folder.mkdir()
    for path in (ROOT / "figures").iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "index.html").unlink(missing_ok=True)
    figures = load_claims(ROOT / "claims.yaml")
    judged = judge_all(figures.values(), folder, ROOT)
    return write_gallery(folder, figures.values(), judged), figures


def test_the_page_is_well_formed_and_every_link_leads_somewhere(gallery):
    path, figures = gallery
    page = Page(path.read_text())
    assert page.stack == []
    assert len(page.ids) == len(set(page.ids))
    for link in page.links:
        assert not link.startswith(("http", "//")), "the page must work without a network"
        if link.startswith("#"):
            assert link[1:] in page.ids
        elif not link.startswith("data:"):
            assert (path.parent / link).exists(), link
    drawn = [name for name in figures if record_path(path.parent, name).is_file()]
    assert set(drawn) <= set(page.ids)
    assert all(image["alt"] for image in page.images)
    assert set(page.controls) <= set(page.labels)


def test_the_papers_value_stands_beside_ours(gallery):
    path, figures = gallery
    text = path.read_text()
    row = re.search(r'<tr id="kvserve-thm62-released-choice.*?</tr>|<tr id="diffkv-fig06-page-size".*?</tr>', text)
    cells = dict(re.findall(r'<td data-name="(\w+)">(.*?)</td>', row[0]))
    assert cells["expected"]
    assert cells["here"]
    assert sum(len(figure.claims) for figure in figures.values() if record_path(path.parent, figure.id).is_file()) == (
        text.count('<td data-name="here">')
    )


def test_texts_from_claims_are_not_markup(tmp_path, monkeypatch):
    from small_project import CLAIMS

    (tmp_path / "claims.yaml").write_text(CLAIMS.replace("It is nine.", "<script>alert('x')</script> & {braces}"))
    figures = load_claims(tmp_path / "claims.yaml")
    (tmp_path / "diffkv-fig90.json").write_text("{damaged")
    page = write_gallery(tmp_path, figures.values(), judge_all(figures.values(), tmp_path, tmp_path)).read_text()
    assert "<script>alert" not in page
    assert "{braces}" in page
