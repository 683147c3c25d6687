"""A browser, and a real `pp serve` for it. Without Chromium these tests are skipped on a laptop, and fail in CI."""

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import Chromium, Page, find_chromium
from tests.conftest import lacks
from tests.integration.run import ROOT, Command

KEY = "a-key-of-a-test"
SCREENSHOTS = Path(os.environ.get("PP_SCREENSHOTS", ROOT / "build" / "screenshots"))


class Served(Command):
    """A `pp serve`. `url` is what it says."""

    def __init__(self, folder: Path, *argv: str, **environ: str):
        super().__init__(folder, "serve", "--json", *argv, **environ)

    def until_ready(self) -> None:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.stderr
        self.url = json.loads(line)["url"]

    def end(self) -> None:
        self.signal(signal.SIGINT)
        self.wait()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, smollm2_gguf: Path) -> Iterator[Served]:
    """With a real model, which takes its time, and a key."""
    with Served(tmp_path_factory.mktemp("served"), "--port", "0", PP_API_KEY=KEY) as served:
        served.until_ready()
        yield served
        served.end()


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        lacks("Chromium (Debian: apt-get install chromium)")
    with Chromium(program, tmp_path_factory.mktemp("chromium")) as chromium:
        yield chromium


@pytest.fixture
def new_page(chromium: Chromium) -> Iterator[Callable[..., Page]]:
    """`new_page(width=..., height=..., dark=...)`. No script may fail, and nothing may break the page's policy; a
    status that the page asked for is no failure."""
    pages = list[Page]()

    def new(**how: int | bool) -> Page:
        pages.append(Page(chromium, **how))  # type: ignore[arg-type]
        return pages[-1]

    yield new
    for page in pages:
        page.close()
    assert [words for page in pages for words in page.problems if not words.startswith("Failed to load resource")] == []


@pytest.fixture
def page(new_page: Callable[..., Page], served: Served) -> Page:
    """The page of `served`, as somebody sees it who has given the key."""
    return entered(new_page(), served.url)


def entered(page: Page, url: str) -> Page:
    """The page at `url`, once the key was given and a reading of the pipeline is there."""
    page.open(url)
    page.wait_for("document.querySelector('#key-dialog').open")
    page.type(KEY)
    page.press("Enter")
    page.wait_for("document.querySelectorAll('.stage').length === 2")
    page.problems.clear()  # the browser's own word for the 401 that it began with
    return page
