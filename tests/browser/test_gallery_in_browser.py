"""The gallery from file://: search, filter, keyboard, a phone; every figure draws; no network, no complaints."""

import shutil

import pytest

pytest.importorskip("selenium", reason="selenium is not installed (it is in the extra 'dev'): no browser tests")

from browser_helpers import ROOT, errors, open_browser, until
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from diffkv_repro.study.claims import load_claims
from diffkv_repro.study.gallery import write_gallery
from diffkv_repro.study.verdicts import judge_all


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gallery") / "figures"
    shutil.copytree(ROOT / "figures", folder)
    figures = load_claims(ROOT / "claims.yaml")
    return write_gallery(folder, figures.values(), judge_all(figures.values(), folder, ROOT))


@pytest.fixture(scope="module")
def shown(page):
    driver = open_browser()
    driver.execute_cdp_cmd("Network.enable", {})
    driver.execute_cdp_cmd("Network.setBlockedURLs", {"urls": ["http://*", "https://*"]})
    driver.get(page.as_uri())
    yield driver
    driver.quit()


def visible(driver):
    return [card.get_attribute("id") for card in driver.find_elements(By.TAG_NAME, "article") if card.is_displayed()]


def test_search_and_filter(shown):
    everything = visible(shown)
    query = shown.find_element(By.ID, "query")
    shown.find_element(By.TAG_NAME, "body").send_keys("/")
    assert shown.switch_to.active_element == query
    query.send_keys("figure 8")
    assert "diffkv-fig08" in visible(shown)
    assert len(visible(shown)) < len(everything)
    assert shown.find_element(By.ID, "count").text.startswith(f"{len(visible(shown))} figure")
    query.clear()
    query.send_keys("no such words" + Keys.ENTER)
    assert visible(shown) == []
    shown.find_element(By.CSS_SELECTOR, "button[type=reset]").click()
    until(lambda: visible(shown) == everything, "all figures again", 5)
    for name, value, attribute in (("paper", "KVServe", "data-paper"), ("verdict", "refuted", "data-verdicts")):
        shown.find_element(By.CSS_SELECTOR, f"#{name} option[value='{value}'], #{name} option:nth-child(3)")
        shown.execute_script(
            "const s = document.getElementById(arguments[0]); s.value = arguments[1];"
            "s.dispatchEvent(new Event('input'))", name, value,
        )  # fmt: skip
        found = visible(shown)
        assert found
        assert all(value in shown.find_element(By.ID, one).get_attribute(attribute) for one in found)
        shown.find_element(By.CSS_SELECTOR, "button[type=reset]").click()
        until(lambda: visible(shown) == everything, "all figures again", 5)


def test_every_figure_draws_without_network_or_complaint(shown):
    frames = shown.find_elements(By.CSS_SELECTOR, "details iframe")
    assert len(frames) >= 25
    names = shown.execute_script(
        "return [...document.querySelectorAll('details iframe')].map(f => f.closest('article').id)"
    )
    for name in names:
        shown.execute_script("document.getElementById(arguments[0]).open = true", f"{name}-live")
        frame = shown.find_element(By.CSS_SELECTOR, f"#{name}-live iframe")
        shown.execute_script("arguments[0].scrollIntoView({behavior: 'instant'})", frame)
        shown.switch_to.frame(frame)
        until(lambda: shown.find_elements(By.CSS_SELECTOR, ".js-plotly-plot .main-svg"), f"{name} draws", 60)
        shown.switch_to.default_content()
        shown.execute_script("document.getElementById(arguments[0]).open = false", f"{name}-live")
    pictures = "return [...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert shown.execute_script(pictures) == []
    assert errors(shown) == []


def test_a_thumbnail_opens_its_figure_by_keyboard(shown):
    link = shown.find_element(By.CSS_SELECTOR, "#diffkv-fig08 a[data-opens]")
    shown.execute_script("arguments[0].focus()", link)
    link.send_keys(Keys.ENTER)
    details = shown.find_element(By.ID, "diffkv-fig08-live")
    until(lambda: details.get_attribute("open"), "the figure is open", 5)
    assert shown.switch_to.active_element.tag_name == "summary"
    shown.switch_to.active_element.send_keys(Keys.ENTER)
    until(lambda: not details.get_attribute("open"), "the figure is closed", 5)


def test_a_phone_shows_all_of_it_without_sideways_scrolling(page):
    driver = open_browser(390, 844)
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": 390, "height": 844, "deviceScaleFactor": 2, "mobile": True},
        )
        driver.get(page.as_uri())
        assert driver.execute_script("return innerWidth") == 390
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        driver.execute_script("for (const d of document.querySelectorAll('#diffkv-fig08 details')) d.open = true")
        assert driver.execute_script("return document.documentElement.scrollWidth") <= 390
        small = (
            "return [...document.querySelectorAll('input, select, button')]"
            ".filter(e => e.getBoundingClientRect().height < 24).map(e => e.id)"
        )
        assert driver.execute_script(small) == []
    finally:
        driver.quit()
