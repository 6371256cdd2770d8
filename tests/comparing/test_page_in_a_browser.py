"""`make compare`: the page in a real browser, by clicks. Skipped where Debian's chromium is not installed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_runs import fifty

from experiments.comparing import page
from experiments.comparing.grouping import groups
from experiments.comparing.reading import find

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver: apt-get install chromium-driver"
)


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    fifty(root)
    out = root / "compare.html"
    page.write(groups(find(str(root))), out)
    return out


@pytest.fixture(scope="module")
def driver() -> Iterator[Any]:
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = str(CHROMIUM)
    # Root, as in containers, cannot have a sandbox.
    for word in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "window-size=1400,1000"):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    made = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield made
    made.quit()


@pytest.fixture
def browser(driver: Any, html: Path) -> Any:
    driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
    system(driver, "light")
    driver.get(html.as_uri())
    choose(driver, "group", "1")
    return driver


def system(driver: Any, colours: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": colours}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def choose(driver: Any, name: str, value: str) -> None:
    from selenium.webdriver.support.select import Select

    Select(driver.find_element("id", name)).select_by_value(value)


def shown(driver: Any, selector: str) -> list[str]:
    found = driver.find_elements("css selector", selector)
    return [element.text for element in found if element.is_displayed()]


def until(driver: Any, script: str) -> Any:
    from selenium.webdriver.support.wait import WebDriverWait

    return WebDriverWait(driver, 30).until(lambda found: found.execute_script(f"return {script}"))


def test_a_click_on_a_head_sorts_and_a_second_one_turns_round(browser: Any) -> None:
    heads = [head for head in browser.find_elements("css selector", ".group:not([hidden]) table.runs th")]
    names = ".group:not([hidden]) table.runs tbody td:first-child"
    best = shown(browser, names)
    assert best[0].startswith("Softmax")
    heads[2].find_element("tag name", "button").click()
    assert shown(browser, names) == best
    assert heads[2].get_attribute("aria-sort") == "descending"
    heads[2].find_element("tag name", "button").click()
    assert shown(browser, names) == best[::-1]
    heads[0].find_element("tag name", "button").click()
    assert shown(browser, names) == sorted(best, key=str.lower)
    # Where a cell is empty it stands last, both ways: the baseline has no difference.
    for _ in range(2):
        heads[3].find_element("tag name", "button").click()
        assert shown(browser, names)[-1].startswith("Softmax")


def test_the_filter_leaves_rows_heads_pictures_and_curves_that_match(browser: Any) -> None:
    until(browser, "document.querySelector('#learning-1').data !== undefined")
    browser.find_element("id", "filter").send_keys("lin")
    assert [text.split()[0] for text in shown(browser, ".group:not([hidden]) table.runs tbody td:first-child")] == [
        "Linear", "Linformer",
    ]  # fmt: skip
    assert shown(browser, "table.health tbody td:first-child") == [
        f"{name}, seed {seed}" for name in ("Linear", "Linformer") for seed in range(4)
    ]
    assert len(shown(browser, ".pictures figure")) == 2
    visible = "document.querySelector('#learning-1').data.filter((t) => t.visible === true).map((t) => t.meta)"
    assert set(browser.execute_script(f"return {visible}")) == {"Linear", "Linformer"}
    browser.find_element("id", "filter").clear()
    browser.find_element("id", "filter").send_keys(" ")
    assert len(shown(browser, ".group:not([hidden]) table.runs tbody tr")) == 10
    assert len(shown(browser, "table.health tbody tr")) == 40


def test_groups_are_shown_one_at_a_time(browser: Any) -> None:
    assert len(shown(browser, "table.runs")) == 1
    choose(browser, "group", "0")
    assert [text.split()[0] for text in shown(browser, "table.runs tbody td:first-child")] == ["Additive", "Softmax"]


def test_light_and_dark_follow_the_system_and_a_click(browser: Any) -> None:
    until(browser, "document.querySelector('#learning-1').layout !== undefined")
    ground = "getComputedStyle(document.body).backgroundColor"
    font = "document.querySelector('#learning-1').layout.font.color"
    assert browser.execute_script(f"return [{ground}, {font}]") == ["rgb(255, 255, 255)", "#1c1e21"]
    browser.find_element("id", "theme").click()
    assert browser.execute_script(f"return [{ground}, {font}]") == ["rgb(20, 22, 26)", "#e7e9ec"]
    browser.find_element("id", "theme").click()
    assert browser.execute_script(f"return {ground}") == "rgb(255, 255, 255)"
    system(browser, "dark")
    assert until(browser, f"{ground} === 'rgb(20, 22, 26)'")


def test_the_options_of_any_two_runs(browser: Any) -> None:
    runs = [option.text for option in browser.find_elements("css selector", "#first option")]
    place = {name: str(number) for number, name in enumerate(runs)}
    choose(browser, "first", place["vit/0001-softmax-seed0"])
    choose(browser, "second", place["vit/0010-local-seed1"])
    rows = [row.text for row in browser.find_elements("css selector", "#difference tr")]
    assert rows == [
        "seed_everything 0 1",
        'model.attention "attnzoo.Softmax" "attnzoo.Local"',
        "model.attention.window (not there) 5",
    ]
    choose(browser, "second", place["vit/0001-softmax-seed0"])
    assert browser.find_elements("css selector", "#difference tr") == []
    assert browser.find_element("id", "same").text.startswith("0 options differ")


def test_a_phone_scrolls_in_one_direction_alone(browser: Any) -> None:
    phone = {"width": 390, "height": 844, "deviceScaleFactor": 1, "mobile": True}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    browser.refresh()
    until(browser, "document.querySelector('#learning-0').data !== undefined")
    assert browser.execute_script("return document.documentElement.scrollWidth") == 390
    assert browser.execute_script("return document.querySelector('#learning-0').layout.legend.orientation") == "h"


def test_every_figure_is_drawn_and_nothing_is_asked_of_a_network(browser: Any, html: Path) -> None:
    for name in browser.execute_script("return [...document.querySelectorAll('.plot')].map((plot) => plot.id)"):
        if name.endswith("-1") or name.startswith("cost"):
            browser.execute_script("document.getElementById(arguments[0]).scrollIntoView()", name)
            until(browser, f"document.querySelector('#{name} .main-svg') !== null")
    entries = browser.execute_script("return performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in entries if not name.startswith(("data:", "blob:"))] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
