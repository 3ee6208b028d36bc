"""Has a headless Chromium compile shaders for its WebGPU; prints their number. One that it refuses fails.

usage: browser_shaders.py CHROMIUM FOLDER        the folder holds a file for each shader
"""

import pathlib
import sys

from playwright.sync_api import sync_playwright

browser_path, folder = sys.argv[1:]
# Headless Chromium has no GPU; SwiftShader is its Vulkan in software. The sandbox needs rights that containers lack.
ARGUMENTS = ["--no-sandbox", "--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader"]
COMPILE = """async (shaders) => {
    const device = await (await navigator.gpu.requestAdapter()).requestDevice();
    device.addEventListener("uncapturederror", (event) => event.preventDefault());
    const problems = async ([name, code]) => {
        const { messages } = await device.createShaderModule({ code }).getCompilationInfo();
        const errors = messages.filter((message) => message.type === "error");
        return errors.map(({ lineNum, message }) => `${name}:${lineNum}: ${message}`);
    };
    return (await Promise.all(shaders.map(problems))).flat();
}"""

with sync_playwright() as playwright:
    browser = playwright.chromium.launch(executable_path=browser_path, args=ARGUMENTS)
    page = browser.new_page()
    # WebGPU is for pages of trusted origins, as this machine is; nothing is fetched.
    page.route("**/*", lambda route: route.fulfill(body="", content_type="text/html"))
    page.goto("http://localhost/")
    shaders = [[path.name, path.read_text()] for path in sorted(pathlib.Path(folder).iterdir())]
    problems = page.evaluate(COMPILE, shaders)
    assert not problems, "\n".join(problems[:20])
    print(len(shaders))
    browser.close()
