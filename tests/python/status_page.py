"""The page at / in a headless Chromium, against a real cluster of two workers; a failed assertion fails.

usage: status_page.py http://HOST:PORT CHROMIUM
"""

import re
import sys

from playwright.sync_api import expect, sync_playwright

base, browser_path = sys.argv[1:]
troubles = []


def send(page, text):
    page.fill("#prompt", text)
    page.click("#send")


def numbers(page):
    expect(page.locator("#models h3")).to_have_text("smol: ready")
    expect(page.locator("#workers tbody tr")).to_have_count(2)
    # One replica and its two ranks.
    expect(page.locator("#models tbody tr")).to_have_count(3)
    expect(page.locator("#models")).to_contain_text(re.compile(r"Plan \d+: "))
    expect(page.locator("#numbers")).to_contain_text("tokens per second")


def chat(page):
    send(page, "What is the capital of France? Answer in one short sentence.")
    expect(page.locator("#speed")).to_contain_text("tokens", timeout=60_000)
    assert len(page.locator("#log .assistant").last.inner_text()) > 5
    assert page.locator("#log .problem").count() == 0
    expect(page.locator("#send")).to_be_enabled()


def texts(page):
    """What looks like markup is shown as it is."""
    markup = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"
    send(page, markup)
    expect(page.locator("#log .user").last).to_have_text(markup)
    assert page.locator("#log img").count() == 0 and page.title() == "Lockstep"
    # Not page.click, which would wait for a button that is disabled for good if the answer has ended by now.
    page.evaluate("document.getElementById('stop').click()")
    expect(page.locator("#send")).to_be_enabled()


def stop(page):
    send(page, "Tell me a very long story with many chapters.")
    expect(page.locator("#log .assistant").last).not_to_be_empty(timeout=60_000)
    page.click("#stop")
    expect(page.locator("#send")).to_be_enabled()
    # The sequence is gone: only the page's own poll is left, which is no request of a model.
    expect(page.locator("#numbers div").nth(1)).to_have_text("0running requests", timeout=10_000)


def policy(page):
    assert not troubles, troubles
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "document.title = 'run'";
        document.body.append(script);
    }""")
    assert page.title() == "Lockstep", "the policy lets foreign scripts run"
    assert any("Content Security Policy" in trouble for trouble in troubles), troubles


def loss(page):
    page.route("**/status.json", lambda route: route.abort())
    expect(page.locator("#connection")).to_contain_text("does not answer", timeout=10_000)
    page.unroute("**/status.json")
    expect(page.locator("#connection")).to_be_empty(timeout=10_000)


with sync_playwright() as playwright:
    # The sandbox needs rights that containers do not have.
    browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
    page = browser.new_page()
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    foreign = []
    page.on("request", lambda request: None if request.url.startswith((base, "data:")) else foreign.append(request.url))
    page.goto(base)
    for check in [numbers, chat, texts, stop, policy, loss]:
        check(page)
        print(check.__name__)
    assert not foreign, foreign
    browser.close()
