// The worker that owns the model. It may wait for a file, which a page may not, and answers messages one at a time:
// load, generate, stop; and logits, for comparisons with other devices.
import init, { Engine } from "./lockstep_browser.js";

let engine = null, isStopped = false, tail = init();

const GONE = "the coordinator does not answer";

/// Reads a model that the coordinator serves, by ranges; it may send less than was asked for.
function served(url, headers) {
  return (offset, buffer) => {
    for (let filled = 0; filled < buffer.length;) {
      const request = new XMLHttpRequest();
      request.open("GET", url, false);
      request.responseType = "arraybuffer";
      request.setRequestHeader("range", `bytes=${offset + filled}-${offset + buffer.length - 1}`);
      for (const [name, value] of Object.entries(headers)) request.setRequestHeader(name, value);
      try {
        request.send();
      } catch {
        throw new Error(GONE);
      }
      const piece = new Uint8Array(request.response ?? 0);
      if (request.status !== 206 || piece.length === 0) throw new Error(`${url}: status ${request.status}`);
      buffer.set(piece, filled);
      filled += piece.length;
    }
  };
}

/// Reads a file of the visitor.
function local(file) {
  const reader = new FileReaderSync();
  return (offset, buffer) =>
    buffer.set(new Uint8Array(reader.readAsArrayBuffer(file.slice(offset, offset + buffer.length))));
}

async function sizeOf(url, headers) {
  const answer = await fetch(url, { headers: { ...headers, range: "bytes=0-0" } }).catch(() => { throw new Error(GONE); });
  if (answer.status !== 206) throw new Error((await answer.json()).error.message);
  return Number(answer.headers.get("content-range").split("/")[1]);
}

const handlers = {
  async load({ file, model, key }) {
    const begin = performance.now();
    engine?.free();
    engine = null;
    const url = `models/${encodeURIComponent(model)}`, headers = key ? { authorization: `Bearer ${key}` } : {};
    // What the WebAssembly module calls to read.
    self.readAt = file ? local(file) : served(url, headers);
    const size = file ? file.size : await sizeOf(url, headers);
    engine = await Engine.load(file?.name ?? model, size, (read, total) => postMessage({ name: "progress", read, total }));
    postMessage({ name: "ready", device: engine.device, seconds: (performance.now() - begin) / 1000 });
  },

  async generate({ text, isChat, maxTokens }) {
    isStopped = false;
    const begin = performance.now();
    let tokens = engine.begin(text, isChat), first = null, numTokens = 0;
    const numPrompt = tokens.length;
    while (numTokens < maxTokens && !isStopped) {
      const token = await engine.next(tokens);
      first ??= performance.now();
      numTokens += 1;
      const piece = engine.text(token);
      if (piece === undefined) break;
      postMessage({ name: "token", token, text: piece });
      tokens = [token];
    }
    first ??= performance.now();
    postMessage({ name: "done", numPrompt, numTokens, prefillSeconds: (first - begin) / 1000,
      decodeSeconds: (performance.now() - first) / 1000 });
  },

  /// The logits after the text, and after each of the tokens given.
  async logits({ text, isChat, tokens }) {
    const prompt = engine.begin(text, isChat);
    const rows = [];
    for (const step of [prompt, ...tokens.map((token) => [token])]) rows.push(await engine.logits(step));
    postMessage({ name: "logits", prompt, rows });
  },
};

addEventListener("message", ({ data }) => {
  if (data.name === "stop") {
    isStopped = true;
    return;
  }
  const handle = async () => {
    if (data.name !== "load" && !engine) throw new Error("no model is loaded");
    await handlers[data.name](data);
  };
  tail = tail.then(handle).catch((error) => postMessage({ name: "error", message: error.message ?? String(error) }));
});
