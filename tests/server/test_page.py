"""The playground in headless Chromium; skipped on machines without one."""

import contextlib
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import tiny
from conftest import KEY, K, Running, start
from scripted import scripted_llm, writing
from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import Select, WebDriverWait

from peagle import LLM, SamplingParams
from peagle.bench.prompts import load_prompts
from peagle.server.settings import ServerSettings

PROMPT = "def is_even(n):\n"
PAGE = files("peagle.server").joinpath("page.html").read_text()
DRIVER, BROWSER = shutil.which("chromedriver"), shutil.which("chromium")


def test_nothing_is_loaded_from_elsewhere():
    assert "http://" not in PAGE
    assert "https://" not in PAGE
    assert "innerHTML" not in PAGE


def test_the_first_prompt_is_one_that_gets_a_whole_function():
    found = PAGE.partition('<textarea id="prompt" spellcheck="false">')[2].partition("</textarea>")[
        0
    ]
    assert found in [prompt.text for prompt in load_prompts("bundled")]


@pytest.fixture(scope="module")
def browser() -> Iterator[Chrome]:
    if DRIVER is None or BROWSER is None:
        pytest.skip("no chromium and chromedriver on this machine")
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1200,900"):
        options.add_argument(flag)
    chrome = Chrome(options=options, service=Service(DRIVER))
    yield chrome
    chrome.quit()


@pytest.fixture
def page(browser: Chrome, server: Running) -> Chrome:
    browser.get(server.url)
    assert_text(browser, "model", "API key")
    browser.find_element(By.ID, "api-key").send_keys(KEY + Keys.TAB)
    assert_text(browser, "model", "demo")
    fill(browser, "prompt", PROMPT)
    fill(browser, "max-tokens", "40")
    return browser


def fill(page: Chrome, name: str, text: str) -> None:
    field = page.find_element(By.ID, name)
    field.clear()
    field.send_keys(text)


def assert_text(page: Chrome, name: str, words: str) -> None:
    WebDriverWait(page, 10).until(lambda p: words in p.find_element(By.ID, name).text)


def finish(page: Chrome) -> str:
    """Wait for the end; returns how it ended."""
    state = "document.body.dataset.state"
    WebDriverWait(page, 30).until(
        lambda p: p.execute_script(f"return {state}") not in ("running", "idle")
    )
    return str(page.execute_script(f"return {state}"))


def content(page: Chrome, name: str) -> str:
    return str(page.execute_script(f"return document.getElementById('{name}').textContent"))


def test_every_token_shows_where_it_came_from(page: Chrome, offline: LLM):
    [wanted] = offline.generate([PROMPT], SamplingParams(max_tokens=40))
    page.find_element(By.ID, "run").click()
    assert finish(page) == "done"
    spans = page.find_elements(By.CSS_SELECTOR, "#answer span")
    assert content(page, "answer") == wanted.text
    assert len(spans) == len(wanted.token_ids)
    drafted = len(page.find_elements(By.CSS_SELECTOR, "#answer span.draft"))
    surplus = K  # of the last cycle, of which the page gets only what was still wanted
    assert wanted.speculation.accepted - surplus <= drafted <= wanted.speculation.accepted
    assert len(page.find_elements(By.CSS_SELECTOR, "#cycles i")) == wanted.speculation.cycles + 1
    assert f"tokens\n{len(spans)}" in page.find_element(By.ID, "stats").text
    struck = page.find_elements(By.CSS_SELECTOR, "#answer s")
    refused = wanted.speculation.drafted - wanted.speculation.accepted
    assert sum(int(one.get_attribute("data-count") or 0) for one in struck) == refused > 0


def test_comparison_says_how_much_faster_and_whether_equal(page: Chrome):
    page.find_element(By.ID, "compare").click()
    assert finish(page) == "done"
    assert "in 3 rounds), the same text" in content(page, "verdict")
    assert content(page, "answer") == content(page, "answer-without")
    assert not page.find_elements(By.CSS_SELECTOR, "#answer-without span.draft")


def test_it_says_what_drafts_and_where(page: Chrome):
    drafting = f"drafter: P-EAGLE · device: cpu · drafting: up to {K} tokens a cycle"
    assert_text(page, "facts", drafting)


def test_chat(page: Chrome):
    Select(page.find_element(By.ID, "mode")).select_by_value("chat")
    page.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
    assert finish(page) == "done"
    assert content(page, "answer")


def test_stopping_ends_the_request(page: Chrome, server: Running):
    fill(page, "max-tokens", "1900")
    page.find_element(By.ID, "run").click()
    WebDriverWait(page, 10).until(lambda p: p.find_elements(By.CSS_SELECTOR, "#answer span"))
    page.find_element(By.ID, "stop").click()
    assert finish(page) == "done"
    assert content(page, "status") == "Stopped."
    server.wait_until_idle(seconds=2)


def test_an_answer_that_fails_says_why(page: Chrome, server: Running):
    """A token that the embedding turns into NaN."""
    llm = server.service.llm
    token = llm.tokenize(page.find_element(By.ID, "prompt").get_attribute("value"))[0]
    with tiny.nan_row(llm.engine.core.target.embed.weight, token):
        page.find_element(By.ID, "run").click()
        assert finish(page) == "error"
    assert content(page, "error").startswith("the target's logits are NaN")


def test_errors_are_told_in_words(page: Chrome):
    fill(page, "max-tokens", "-2")
    page.find_element(By.ID, "run").click()
    assert finish(page) == "error"
    assert "400: max_tokens: Input should be greater than or equal to -1" in content(page, "error")


def test_an_error_is_in_sight_on_a_small_screen(page: Chrome):
    before = page.get_window_size()
    page.set_window_size(500, 800)
    try:
        fill(page, "max-tokens", "-2")
        page.find_element(By.ID, "prompt").send_keys(Keys.CONTROL, Keys.ENTER)
        assert finish(page) == "error"
        place = "document.getElementById('error').getBoundingClientRect()"
        shown = page.execute_script(f"return {place}.top >= 0 && {place}.bottom <= innerHeight")
    finally:
        page.set_window_size(before["width"], before["height"])
    assert shown


def test_k_stops_at_the_servers_own(page: Chrome):
    for given, kept in (("99", K), ("-3", 0), ("2.7", 2)):
        fill(page, "k", given + Keys.TAB)
        assert page.find_element(By.ID, "k").get_attribute("value") == str(kept)
    fill(page, "k", "99" + Keys.CONTROL + Keys.ENTER)
    assert finish(page) == "done"


def test_the_fields_stand_in_one_line(page: Chrome):
    fields = page.find_elements(By.CSS_SELECTOR, ".controls input, .controls select")
    assert len({field.location["y"] for field in fields}) == 1


def test_the_browser_asks_for_no_icon(page: Chrome):
    assert page.find_element(By.CSS_SELECTOR, "link[rel=icon]").get_attribute("href") == "data:,"


def test_thoughts_and_markers_are_told_from_the_content(browser: Chrome, tmp_path: Path):
    llm, script = scripted_llm("qwen3", tmp_path)
    serving = contextlib.contextmanager(start)(ServerSettings(model_names=("demo",)), lambda: llm)
    with serving as running, writing(script, "qwen3", "<think>\nHm, 2.\n</think>\n\nIt is 4."):
        browser.get(running.url)
        assert_text(browser, "model", "demo")
        Select(browser.find_element(By.ID, "mode")).select_by_value("chat")
        browser.find_element(By.ID, "run").click()
        assert finish(browser) == "done"
    for kind, text in (("reasoning", "Hm, 2."), ("content", "It is 4.")):
        spans = browser.find_elements(By.CSS_SELECTOR, f"#answer span.{kind}")
        assert text in "".join(span.get_attribute("textContent") or "" for span in spans)
    assert browser.find_element(By.ID, "sections").is_displayed()
