"""The page at / where there are tenants: what it shows without a key, with a user's and with an administrator's.

usage: status_page_key.py http://HOST:PORT CHROMIUM USER_KEY ADMIN_KEY
"""

import sys

from playwright.sync_api import expect, sync_playwright

base, browser_path, user_key, admin_key = sys.argv[1:]


def use(page, key):
    page.fill("#key", key)
    page.click("#keys button")


def nobody(page):
    expect(page.locator("#keys")).to_be_visible()
    expect(page.locator("#connection")).to_contain_text("API key")
    assert page.locator("#key").get_attribute("type") == "password"
    assert page.locator("#workers tbody tr").count() == 0 and page.locator("#model option").count() == 0


def stranger(page):
    use(page, "lockstep-none")
    page.fill("#prompt", "Hello")
    page.click("#send")
    expect(page.locator("#log .problem").last).to_contain_text("API key")


def user(page):
    """Chats, but sees no numbers."""
    use(page, user_key)
    expect(page.locator("#model option")).to_have_count(1, timeout=10_000)
    page.fill("#prompt", "Name a river.")
    page.click("#send")
    expect(page.locator("#speed")).to_contain_text("tokens", timeout=60_000)
    assert page.locator("#workers tbody tr").count() == 0


def administrator(page):
    use(page, admin_key)
    expect(page.locator("#workers tbody tr")).to_have_count(1, timeout=10_000)
    expect(page.locator("#connection")).to_be_empty()


def forgotten(page):
    """The key is kept in the page alone."""
    assert not page.evaluate("localStorage.length + sessionStorage.length + document.cookie.length")
    page.reload()
    nobody(page)


with sync_playwright() as playwright:
    # The sandbox needs rights that containers do not have.
    browser = playwright.chromium.launch(executable_path=browser_path, args=["--no-sandbox"])
    page = browser.new_page()
    page.goto(base)
    for check in [nobody, stranger, user, administrator, forgotten]:
        check(page)
        print(check.__name__)
    browser.close()
