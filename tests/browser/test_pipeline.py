"""The pipeline beside the chat; the key; phone, dark and light; a server that goes away."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.browser.chromium import Page
from tests.browser.conftest import KEY, SCREENSHOTS, Served, entered
from tests.browser.test_chat import DONE, ERROR, LENGTH, LONG, ask, limit

NewPage = Callable[..., Page]
COLOUR = "getComputedStyle(document.body).backgroundColor.match(/[\\d.]+/g).slice(0, 3).reduce((a, b) => a + +b, 0)"


def field(page: Page, stage: int, name: str) -> str:
    return page.evaluate(
        f"document.querySelectorAll('.stage')[{stage}].querySelector('[data-f=\"{name}\"]').textContent"
    )


def test_it_shows_what_each_stage_holds_and_does(page: Page) -> None:
    assert page.text("#fresh") == "live"
    assert [field(page, i, "name") for i in (0, 1)] == ["Head", "Stage 1"]
    assert [field(page, i, "span") for i in (0, 1)] == ["blocks 0 to 14", "blocks 15 to 29"]
    assert "CPU" in field(page, 0, "where")
    assert "MB weights" in field(page, 0, "bytes")
    assert "KV cache" in field(page, 1, "bytes")
    assert "hidden state back to the head" in page.text("#way-back")
    ask(page, LONG)
    page.wait_for(f"{LENGTH} > 10")
    page.wait_for("document.querySelectorAll('.stage[data-doing=\"decode\"]').length === 2")
    page.wait_for("parseFloat(document.querySelector('#tokens-per-s').textContent) > 0")
    page.wait_for("document.querySelector('#live').textContent === '1'")
    assert float(field(page, 1, "rows")) > 0
    assert field(page, 1, "busy").endswith("%")
    page.wait_for(f"{LENGTH} > 250")
    page.screenshot(SCREENSHOTS / "light.png")
    page.press("Escape")
    page.wait_for("document.querySelectorAll('.stage[data-doing=\"idle\"]').length === 2")
    page.wait_for("document.querySelector('#hop').textContent.endsWith('ms')")


def test_a_key_is_asked_for_and_a_wrong_one_again(new_page: NewPage, served: Served) -> None:
    page = new_page()
    page.open(served.url)
    page.wait_for("document.querySelector('#key-dialog').open")
    assert page.focused() == "key"
    assert not page.is_shown("#key-refused")
    page.type("wrong")
    page.screenshot(SCREENSHOTS / "light-key.png")
    page.press("Enter")
    page.wait_for("document.querySelector('#key-dialog').open && !document.querySelector('#key-refused').hidden")
    page.press("Escape")
    page.wait_for("!document.querySelector('#key-dialog').open")
    assert "key" in page.wait_for("document.querySelector('#why').textContent")
    ask(page, "Say hello")  # who says no is asked again by what needs it
    page.wait_for("document.querySelector('#key-dialog').open")
    page.type(KEY)
    page.press("Enter")
    page.wait_for(DONE)
    page.wait_for("document.querySelectorAll('.stage').length === 2")
    page.reload()
    page.wait_for("document.querySelectorAll('.stage').length === 2")
    assert not page.evaluate("document.querySelector('#key-dialog').open")
    assert KEY not in page.evaluate("document.documentElement.outerHTML")
    assert KEY not in page.evaluate("document.cookie + JSON.stringify(localStorage) + location.href")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_dark_and_light_as_the_system_is(new_page: NewPage, served: Served, dark: bool) -> None:
    page = entered(new_page(dark=dark), served.url)
    assert (page.evaluate(COLOUR) < 120) is dark
    limit(page, "48")
    ask(page, "Say hello")
    page.wait_for(DONE)
    assert contrast(page, ".message.assistant .text", "body") > 7
    assert contrast(page, ".stage .where", ".pipeline") > 4.5
    for word in ("idle", "prefill", "decode", "loading", "failed", "away"):
        assert contrast(page, ".doing", ".pipeline", f"document.querySelector('.stage').dataset.doing = '{word}'") > 4.5
    assert contrast(page, ".hint", "body") > 4.5
    page.screenshot(SCREENSHOTS / f"{'dark' if dark else 'light'}-answered.png")


def contrast(page: Page, text: str, ground: str, first: str = "") -> float:
    """WCAG's ratio of two colours. first: what is done to the page before it is taken."""
    return page.evaluate(f"""(() => {{
        {first};
        const light = (css) => {{
            const [r, g, b] = css.match(/[\\d.]+/g).slice(0, 3).map((v) => v / 255)
                .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
        }};
        const a = light(getComputedStyle(document.querySelector("{text}")).color);
        const b = light(getComputedStyle(document.querySelector("{ground}")).backgroundColor);
        return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    }})()""")


def test_on_a_phone_the_pipeline_folds_under_the_chat(new_page: NewPage, served: Served) -> None:
    page = entered(new_page(width=390, height=844), served.url)
    page.screenshot(SCREENSHOTS / "phone-welcome.png")
    page.click("#prompt")
    limit(page, "60")
    ask(page, "Say hello")
    page.wait_for(DONE)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    assert not page.is_shown("#stages")
    below = "document.querySelector('#fold').getBoundingClientRect().top"
    assert page.evaluate(f"{below} >= document.querySelector('#composer').getBoundingClientRect().bottom")
    page.screenshot(SCREENSHOTS / "phone.png")
    page.click("#fold")
    assert page.is_shown("#stages")
    assert page.evaluate("document.querySelector('#fold').ariaExpanded") == "true"
    assert page.is_shown("#prompt")
    page.screenshot(SCREENSHOTS / "phone-pipeline.png")
    page.click("#fold")
    assert not page.is_shown("#stages")


def test_a_server_that_goes_away_is_told_and_found_again(new_page: NewPage, tmp_path: Path, goldens: Path) -> None:
    model = ("--model", str(goldens / "llama-tied"))
    page = new_page(dark=True)
    with Served(tmp_path, "--port", "0", *model) as served:
        served.until_ready()
        page.open(served.url)
        limit(page, "6")
        ask(page, "Hello")
        page.wait_for(DONE)
        served.end()
    page.wait_for("document.querySelector('#pipeline').classList.contains('stale')")
    assert "cannot be reached" in page.text("#why")
    ask(page, "Hello again")
    assert "cannot be reached" in page.wait_for(ERROR)
    page.screenshot(SCREENSHOTS / "dark-gone.png")
    with Served(tmp_path, "--port", served.url.rpartition(":")[2], *model) as again:
        again.until_ready()
        page.wait_for("!document.querySelector('#pipeline').classList.contains('stale')")
        assert not page.is_shown("#trouble")
        page.click(".error:not([hidden]) button")
        page.wait_for(DONE)
        assert page.evaluate("document.querySelectorAll('.message').length") == 4
        again.end()
