"""The page /browser in a headless Chromium, whose WebGPU computes on the processor; a failed assertion fails.

usage: browser_page.py http://HOST:PORT CHROMIUM TEXT TOKENS,... FILE ANSWER

FILE gets the logits after TEXT and after each of the TOKENS as f32, row by row. What the page writes after TEXT must begin
with ANSWER; its rates go to standard output. A browser without WebGPU, and one that came by clear text from elsewhere, must say so.
"""

import base64
import pathlib
import re
import sys

from playwright.sync_api import expect, sync_playwright

base, browser_path, text, tokens, file, answer = sys.argv[1:]
# Headless Chromium has no GPU; SwiftShader is its Vulkan in software. The sandbox needs rights that containers lack.
ARGUMENTS = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
LOGITS = """async ([text, tokens]) => {
    const post = self.postMessage;
    const answer = await new Promise((resolve) => {
        self.postMessage = (message) => ["logits", "error"].includes(message.name) ? resolve(message) : post(message);
        const data = { name: "logits", text, isChat: false, tokens };
        self.dispatchEvent(new MessageEvent("message", { data }));
    });
    self.postMessage = post;
    if (answer.name === "error") throw new Error(answer.message);
    const encode = (row) => {
        let bytes = "";
        for (const byte of new Uint8Array(row.buffer, row.byteOffset, row.byteLength)) bytes += String.fromCharCode(byte);
        return btoa(bytes);
    };
    return answer.rows.map(encode);
}"""

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
    page = browser.new_page()
    troubles, foreign = [], []
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((base, "data:")) else foreign.append(request.url))
    page.goto(base)
    page.click("a[href='/browser/']")
    expect(page.locator("#model option")).to_have_count(1)
    page.click("#start")
    expect(page.locator("#start")).to_be_disabled()
    expect(page.locator("#state")).to_contain_text("ready on webgpu", timeout=60_000)
    print(page.locator("#state").inner_text())

    rows = page.workers[0].evaluate(LOGITS, [text, [int(token) for token in tokens.split(",")]])
    pathlib.Path(file).write_bytes(b"".join(base64.b64decode(row) for row in rows))

    page.fill("#prompt", text)
    page.uncheck("#chat")
    page.click("#run")
    expect(page.locator("#output")).to_have_text(re.compile(r"^\s*" + re.escape(answer.strip())), timeout=60_000)
    page.click("#stop")
    expect(page.locator("#speed")).to_contain_text("tokens per second; prompt of", timeout=30_000)
    print(page.locator("#speed").inner_text())
    assert not troubles and not foreign, (troubles, foreign)
    browser.close()

    for elsewhere, words in {base: "WebGPU", base.replace("127.0.0.1", "host.example"): "from https://"}.items():
        arguments = [ARGUMENTS[0], "--no-proxy-server", "--host-resolver-rules=MAP host.example 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=browser_path, args=arguments)
        page = browser.new_page()
        page.goto(f"{elsewhere}/browser")
        expect(page.locator("#state")).to_contain_text(words)
        expect(page.locator("#start")).to_be_disabled()
        browser.close()
