"""The page, in a real browser, over the twin of the engine. ``LINKCPP_SCREENSHOTS`` keeps pictures in a folder."""

from __future__ import annotations

import asyncio
import os
import re
import urllib.request
from pathlib import Path

import aiohttp
import pytest
from api_server import served, serving
from chromium import chromium, new_page
from fake_backend import FakeBackend
from fake_engine import TEMPLATE, FakeModel, answer
from test_api_access import endpoint_server
from test_api_app import worker

from orchestrator.api.access import Access
from orchestrator.api.endpoint import Endpoint
from orchestrator.api.page_files import KINDS
from orchestrator.api.schema import ModelNames
from orchestrator.dispatch.exchange import DispatchStatistics
from orchestrator.gateway.gateway import Gateway

PAGE = Path(__file__).resolve().parent.parent / "orchestrator" / "api" / "page"
TEXT = "Grüße! <b>Not bold</b>, but `code`:\n```python\nprint('hi')\n```\nDone."
DESKTOP, PHONE = (1280, 800), (390, 844)


@pytest.fixture(scope="module")
def browser():
    with chromium() as port:
        yield port


def in_browser(browser, url, test, size=DESKTOP, **options):
    """Run a test (a coroutine function of the page) on the page of a server."""

    async def run():
        async with aiohttp.ClientSession() as session:
            page = await new_page(session, browser)
            await page.open(url + "/", *size, **options)
            await test(page)
            return page.problems

    return asyncio.run(run())


async def picture(page, name):
    folder = os.environ.get("LINKCPP_SCREENSHOTS")
    if folder:
        await page.screenshot(Path(folder) / f"{name}.png")


def test_the_files_are_what_the_page_names():
    names = set(re.findall(r'"page/([\w.]+)"', (PAGE / "index.html").read_text(encoding="utf-8")))
    assert names | {"index.html"} == {path.name for path in PAGE.iterdir()} == set(KINDS)
    with serving(Endpoint(ModelNames("fake"))) as url:
        for name in names:
            with urllib.request.urlopen(f"{url}/page/{name}", timeout=10) as response:
                assert response.headers["Content-Type"].startswith(KINDS[name])
                assert response.read() == (PAGE / name).read_bytes()
        with urllib.request.urlopen(url + "/", timeout=10) as response:
            assert "default-src 'self'" in response.headers["Content-Security-Policy"]


def fleet():
    two = DispatchStatistics((worker(True), worker(False)), 5, 150, ())
    return lambda: two


@pytest.mark.parametrize("size", [DESKTOP, PHONE])
def test_chat_and_fleet(browser, size):
    model = FakeModel(TEMPLATE + "{# </think> #}")
    script = answer([*("<think>First I think.</think>" + TEXT).encode()])
    backend = FakeBackend(n_ctx=4096, n_sequences=2, script=script, step_seconds=0.002)
    endpoint = Endpoint(ModelNames("fake"))
    name = "phone" if size == PHONE else "desktop"

    async def test(page):
        await page.wait("document.querySelector('#model').innerText === 'fake'")
        await picture(page, f"{name}-empty")
        await page.click("#question")
        await page.type("What is a mixture of experts?")
        await page.press_enter()
        await page.wait("document.querySelector('.message.assistant .note')")
        message = await page.text(".message.assistant > .text")
        assert message.split() == TEXT.replace("```python", "").replace("```", "").replace("`", "").split()
        assert await page.evaluate("document.querySelector('.assistant pre code').innerText") == "print('hi')"
        assert await page.evaluate("document.querySelectorAll('.assistant b').length") == 0
        assert (
            await page.evaluate("document.querySelector('.assistant details .text').textContent") == "First I think."
        )
        assert "per second" in await page.text(".message .note")
        assert await page.evaluate("document.querySelector('#question').value") == ""
        await picture(page, f"{name}-chat")
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert await page.evaluate(wide) == 0
        if size == PHONE:
            assert await page.evaluate("getComputedStyle(document.querySelector('#fleet')).display") == "none"
            await page.click("nav button[data-view=fleet]")
        await page.wait("document.querySelectorAll('#workers li').length === 2")
        assert "w1" in await page.text("#workers")
        assert "lost" in await page.text("#workers")
        assert "Missing: w1." in await page.text("#problem")
        await page.wait("document.querySelector('#running').innerText === '0 of 2'")
        assert await page.evaluate(wide) == 0
        await picture(page, f"{name}-fleet")

    with Gateway(model, backend) as gateway:
        endpoint.served = served(model, None, gateway, fleet())
        with serving(endpoint) as url:
            assert in_browser(browser, url, test, size) == []


def test_stopping_an_answer_frees_the_slot(browser):
    words = b"one two three four "
    endless = lambda held: words[len(held) % len(words)]  # noqa: E731
    with endpoint_server(n_ctx=4096, step_seconds=0.02, script=endless) as (url, gateway):

        async def test(page):
            await page.evaluate("document.querySelector('#limit').value = 3000")
            await page.evaluate("document.querySelector('#question').value = 'Go on'")
            await page.click("#send")
            await page.wait("(document.querySelector('.assistant .text')?.innerText ?? '').length > 20")
            assert gateway.state().running is not None
            await picture(page, "desktop-answering")
            await page.click("#stop")
            await page.wait("document.querySelector('.note')?.innerText.includes('stopped')")
            await page.wait("!document.querySelector('#send').hidden")
            for _ in range(100):
                if gateway.state().running is None:
                    break
                await asyncio.sleep(0.02)
            assert gateway.state().running is None
            await page.evaluate("document.querySelector('#settings').open = true")
            await page.click("#clear")
            assert await page.evaluate("document.querySelectorAll('.message').length") == 0

        assert in_browser(browser, url, test) == []


def test_the_page_asks_for_the_key(browser):
    with endpoint_server(Access(("secret",))) as (url, _):

        async def test(page):
            await page.wait("document.querySelector('#key-dialog').open")
            await picture(page, "desktop-key")
            await page.type("secret")
            await page.press_enter()
            await page.wait("document.querySelector('#model').innerText === 'fake'")

        problems = in_browser(browser, url, test)
        assert all("401" in problem for problem in problems)


def test_errors_are_shown(browser):
    with endpoint_server(n_ctx=64) as (url, _):

        async def test(page):
            await page.click("#question")
            await page.type("x" * 100)
            await page.click("#send")
            await page.wait("document.querySelector('.error')?.innerText.includes('more than the context of 64')")
            await page.evaluate("document.querySelector('#settings').open = true")
            await picture(page, "phone-error-dark")
            assert await page.evaluate("document.querySelector('#question').value") == "x" * 100
            await page.evaluate("document.querySelector('#question').value = 'Hi'")
            await page.click("#send")
            await page.wait("document.querySelectorAll('.note')[1]?.innerText.includes('tokens')")

        problems = in_browser(browser, url, test, PHONE, dark=True)
        assert all("400" in problem for problem in problems)


def test_the_page_while_the_model_loads(browser):
    endpoint = Endpoint(ModelNames("fake"))
    with serving(endpoint) as url:

        async def test(page):
            await page.wait("document.querySelector('#problem').innerText.includes('still loading')")

        in_browser(browser, url, test)
