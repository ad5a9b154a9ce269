from dataclasses import replace
from pathlib import Path

import pytest

from diffkv_repro.core.precision import Precision
from diffkv_repro.diffkv import memory_facts as facts
from diffkv_repro.diffkv.layout import PageLayout, search_page_bytes
from diffkv_repro.diffkv.memory_example import figure_6
from diffkv_repro.study.claims import load_claims

PUBLISHED = load_claims(Path(__file__).resolve().parents[2] / "claims.yaml")["diffkv-fig06"].published


def test_figure_6_puts_all_eight_pages_as_drawn():
    _, _, (before, allocated, compacted) = figure_6()
    assert facts.pages_as_drawn(allocated, compacted, PUBLISHED["example"]) == 8
    assert facts.end_wrapped(before, compacted)
    assert not facts.end_wrapped(before, before)
    assert not facts.end_wrapped(before, allocated)  # nothing is free: it has no end


def test_pages_that_are_elsewhere_do_not_count():
    _, _, (_, allocated, compacted) = figure_6()
    example = PUBLISHED["example"]
    # 5 and 8 change tiers, 9 and 10 change places within theirs, 12 is in the list, 11 still held.
    other = replace(compacted, tables=((8, -1, -1, -1, -1, -1, 5), (10, 9, -1, -1, -1, -1, 11)), free=(6, 7, 12))
    assert facts.pages_as_drawn(allocated, other, example) == 4
    moved = replace(allocated, tables=tuple(reversed(allocated.tables)))
    assert facts.pages_as_drawn(moved, compacted, example) == 0


def test_settings_are_read_as_claims_write_them():
    assert [str(facts.parse_setting(name)) for name in ("K8V4", "K4V2_groups_2_4")] == ["K8V4", "K4V2:2/4"]


def test_page_geometry_is_that_of_the_released_code():
    released = PUBLISHED["released_code"]
    table = facts.page_table(released["tokens_per_page"], 128, 6784)
    assert table["tokens a page"].tolist() == table["released code"].tolist() == [24, 32, 37, 46, 60, 52, 69]
    assert (table["values at"] % 128 == 0).all()
    low, high = released["search_range_bytes"]
    sizes = range(low, high + 1, released["search_step_bytes"])
    curve = facts.slack_curve(facts.SEARCHED, 128, sizes)
    assert curve["worst"].idxmin() == search_page_bytes(facts.SEARCHED, 128, sizes) == 6784
    assert curve["worst"][6784] == pytest.approx(100 * 128 / 6784)
    assert (curve.index % 128 == 0).all()


def test_page_tables_as_published_and_as_released():
    case = PUBLISHED["page_table_case"]
    assert facts.table_mib(case, 32) == 32
    assert facts.table_mib(case, 24, 2) == 43


def test_what_the_live_manager_says_of_steps_and_counts():
    assert facts.pages_for_one_token() == 2
    assert facts.free_by_positions() == ([0, 0], [7, 0])


@pytest.mark.parametrize("name", ["K8V8", "K8V4:1/2", "K4V2", "FP16", "K1V1"])
@pytest.mark.parametrize("tokens", [1, 31, 64])
def test_the_smallest_page_that_holds_so_many_tokens(name, tokens):
    page = PageLayout.holding(Precision.parse(name), 128, tokens)
    assert page.tokens >= tokens
    try:
        assert PageLayout(page.precision, 128, page.page_bytes - 128).tokens < tokens
    except ValueError as error:
        assert "holds no token" in str(error) or "positive multiple" in str(error)  # noqa: PT017


def test_a_page_for_no_token_is_refused():
    with pytest.raises(ValueError, match="tokens is 0"):
        PageLayout.holding(Precision.parse("K8V4"), 128, 0)
    with pytest.raises(ValueError, match="do not divide head_dim 96"):
        PageLayout.holding(Precision.parse("K8V4:1/64"), 96, 4)
