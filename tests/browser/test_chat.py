"""The chat of `pp serve`'s page, as people use it: a real Chromium, a real server, a real model."""

from collections.abc import Callable

from tests.browser.chromium import SHIFT, Page
from tests.browser.conftest import SCREENSHOTS, Served, entered

LONG = "Write a long story about a river, in many sentences."
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"
DONE = f"{LAST} && !document.querySelector('.streaming') && {LAST}.querySelector('.meta').textContent"
ERROR = f"!document.querySelector('.streaming') && {LAST}?.querySelector('.error:not([hidden]) p')?.textContent"
LENGTH = f"{LAST}?.querySelector('.text').textContent.length"


def ask(page: Page, text: str) -> None:
    page.type(text)
    page.press("Enter")


def limit(page: Page, tokens: str) -> None:
    """Set the longest answer, with the settings panel as people open it."""
    page.click("#open-settings")
    page.evaluate("document.querySelector('#max-tokens').select()")
    page.click("#max-tokens")
    page.evaluate("document.querySelector('#max-tokens').select()")
    page.type(tokens)
    page.press("Escape")
    page.click("#prompt")


def messages(page: Page) -> list[str]:
    return page.evaluate("[...document.querySelectorAll('.message .text')].map((e) => e.textContent)")


def test_what_is_typed_is_sent_and_the_answer_grows(page: Page, served: Served) -> None:
    assert page.focused() == "prompt"
    assert page.text("#model") == "smollm2:135m"
    ask(page, LONG)
    assert page.evaluate("document.querySelector('#prompt').value") == ""
    first = page.wait_for(LENGTH)
    second = page.wait_for(f"{LENGTH} > {first} && {LENGTH}")
    page.wait_for(f"{LENGTH} > {second + 40}")
    assert page.is_shown("#stop")
    assert not page.is_shown("#send")
    page.screenshot(SCREENSHOTS / "light-streaming.png")
    page.press("Escape")
    page.wait_for(DONE)
    assert messages(page)[0] == LONG
    assert page.problems == []
    assert {url for url in page.requests if not url.startswith(served.url)} == set()


def test_an_answer_ends_with_its_figures(page: Page) -> None:
    limit(page, "24")
    ask(page, "Say hello")
    figures = page.wait_for(DONE)
    assert "24 tokens" in figures or "stop" not in figures
    assert "tok/s" in figures
    assert "first token after" in figures
    assert page.text("#said") == "The answer is complete"
    assert page.evaluate(f"{LAST}.getAttribute('aria-busy')") is None
    assert page.focused() == "prompt"


def test_stop_ends_an_answer_and_keeps_what_came(page: Page) -> None:
    ask(page, LONG)
    page.wait_for(f"{LENGTH} > 20")
    page.click("#stop")
    assert "stopped" in page.wait_for(DONE)
    kept = messages(page)[-1]
    assert len(kept) > 20
    # The pipeline is free again: the request was cancelled there too.
    page.wait_for("document.querySelector('#live').textContent === '0'")
    assert messages(page)[-1] == kept
    assert page.focused() == "prompt"


def test_a_reload_keeps_the_chat_and_a_new_chat_ends_it(page: Page) -> None:
    limit(page, "16")
    ask(page, "My name is Ada")
    page.wait_for(DONE)
    before = messages(page)
    page.reload()
    assert messages(page) == before
    assert page.evaluate(DONE)
    ask(page, LONG)
    page.wait_for("document.querySelectorAll('.message').length === 4 && " + DONE)
    page.evaluate("document.querySelector('#max-tokens').value = 400")
    page.click("#new-chat")
    assert messages(page) == []
    assert page.is_shown("#welcome")
    page.reload()
    assert messages(page) == []


def test_an_answer_that_a_reload_cuts_is_kept_as_far_as_it_came(page: Page) -> None:
    ask(page, LONG)
    page.wait_for(f"{LENGTH} > 60")
    page.reload()
    assert "stopped" in page.wait_for(DONE)
    assert len(messages(page)[-1]) > 60


def test_an_error_is_shown_in_place_and_tried_again(page: Page) -> None:
    page.paste("word " * 2600)  # more than the context holds
    page.press("Enter")
    shown = page.wait_for(ERROR)
    assert "2048" in shown
    assert page.text("#said") == ""
    page.screenshot(SCREENSHOTS / "light-error.png")
    page.problems.clear()
    page.click(".error:not([hidden]) button")
    assert page.wait_for(f"performance.now() && {ERROR}") == shown  # it asked again, and was told the same
    assert len(messages(page)) == 2
    limit(page, "8")
    ask(page, "Say hello")  # and what failed is no part of what follows
    page.wait_for(DONE)
    assert len(messages(page)) == 4


def test_what_a_model_or_a_person_writes_is_text(page: Page) -> None:
    limit(page, "8")
    ask(page, "<img src=x onerror=alert(1)><script>document.title = 'taken'</script>")
    page.wait_for(DONE)
    assert page.evaluate("document.querySelectorAll('.message img, .message script').length") == 0
    assert "<img src=x" in messages(page)[0]
    assert page.evaluate("document.title").startswith("smollm2:135m")
    refused = page.evaluate("(() => { try { document.body.innerHTML = '<p>x</p>'; } catch (e) { return e.name; } })()")
    assert refused == "TypeError"  # Trusted Types
    assert "TrustedHTML" in page.problems.pop()


def test_several_lines_and_the_system_prompt_are_sent(page: Page) -> None:
    limit(page, "4")
    page.click("#open-settings")
    page.type("You are brief")
    page.press("Escape")
    page.evaluate(
        "window.sent = []; const real = window.fetch;"
        " window.fetch = (url, options) => { if (options?.body) sent.push(options.body); return real(url, options); }"
    )
    page.click("#prompt")
    page.type("one")
    page.press("Enter", SHIFT)
    ask(page, "two")
    page.wait_for(DONE)
    assert page.evaluate("JSON.parse(sent[0]).messages") == [
        {"role": "system", "content": "You are brief"},
        {"role": "user", "content": "one\ntwo"},
    ]
    assert page.evaluate("JSON.parse(sent[0]).max_tokens") == 4


def test_the_keyboard_is_enough(new_page: Callable[..., Page], served: Served) -> None:
    page = entered(new_page(), served.url)
    seen = []
    for _ in range(12):
        page.press("Tab")
        seen.append(page.focused())
        at = "document.activeElement"
        ring = f"getComputedStyle({at}.closest('.field') ?? {at})"
        shown = f"{at} === document.body || {ring}.outlineStyle !== 'none' || {ring}.boxShadow !== 'none'"
        assert page.evaluate(shown), seen
        if seen[-1] == "Say hello":
            break
    assert {"new-chat", "open-settings"} <= set(seen)
    page.press("Enter")
    assert page.wait_for(DONE)
    assert messages(page)[0] == "Say hello"
    page.evaluate("document.querySelector('#open-settings').focus()")
    page.press("Enter")
    assert page.wait_for("document.activeElement.id === 'system'")
    page.screenshot(SCREENSHOTS / "light-settings.png")
    page.press("Escape")
    assert page.focused() == "open-settings"


def test_a_stream_is_read_whatever_its_cuts(page: Page) -> None:
    """Every cut of the bytes, in the middle of a character and of a line end too."""
    stream = ': ping\r\n\r\ndata: {"a": "é😀"}\r\n\r\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]\r\rdata: cut off'
    script = """(async (text) => {
        const { events } = await import("/static/sse.js");
        const bytes = new TextEncoder().encode(text);
        const seen = new Set();
        for (let size = 1; size <= bytes.length; size += 1) {
            const body = new ReadableStream({ start(c) {
                for (let i = 0; i < bytes.length; i += size) c.enqueue(bytes.slice(i, i + size));
                c.close();
            } });
            const got = [];
            for await (const data of events(body)) got.push(data);
            seen.add(JSON.stringify(got));
        }
        return [...seen];
    })"""
    (seen,) = page.evaluate(f"{script}({stream!r})".replace("é😀", "\\u00e9\\ud83d\\ude00"))
    assert seen == '["{\\"a\\": \\"é😀\\"}","one\\ntwo","[DONE]"]'
