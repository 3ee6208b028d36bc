// The page: what is chosen and typed goes to the worker, what comes back is shown, as text and never as markup.
const $ = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
const mebibytes = (count) => (count / 2 ** 20).toFixed(1);
let isLoaded = false;

/// One thing at a time: "idle", "loading" or "running"; "unable" where the browser cannot compute.
function enter(state) {
  $("start").disabled = state !== "idle";
  $("run").disabled = state !== "idle" || !isLoaded;
  $("stop").disabled = state !== "running";
}

const shown = {
  progress: ({ read, total }) => { $("state").textContent = `${mebibytes(read)} of ${mebibytes(total)} MiB`; },
  ready: ({ device, seconds }) => {
    isLoaded = true;
    $("state").textContent = `ready on ${device}, loaded in ${seconds.toFixed(1)} s`;
    enter("idle");
  },
  token: ({ text }) => {
    if ($("output").textContent === "") $("speed").textContent = "";
    $("output").append(text);
  },
  done: ({ numPrompt, numTokens, prefillSeconds, decodeSeconds }) => {
    const rate = (count, seconds) => (count / seconds).toFixed(2);
    const decode = numTokens > 1 ? `, ${rate(numTokens - 1, decodeSeconds)} tokens per second` : "";
    $("speed").textContent = `${numTokens} tokens${decode}; prompt of ${numPrompt} tokens: `
      + `${rate(numPrompt, prefillSeconds)} tokens per second`;
    enter("idle");
  },
  error: ({ message }) => {
    $("state").textContent = message;
    $("speed").textContent = "";
    enter("idle");
  },
};
worker.addEventListener("message", ({ data }) => shown[data.name]?.(data));
worker.addEventListener("error", (event) => shown.error({ message: `the worker does not run: ${event.message}` }));

/// Why this browser cannot compute, if it cannot.
async function obstacle() {
  if (!isSecureContext) return "browsers give WebGPU to pages from https:// and from localhost only, and this one came otherwise";
  if (!navigator.gpu) return "this browser has no WebGPU";
  return await navigator.gpu.requestAdapter() ? undefined : "this browser's WebGPU finds no GPU that it may use";
}

async function showModels() {
  const key = $("key").value.trim();
  const answer = await fetch("/v1/models", { headers: key ? { authorization: `Bearer ${key}` } : {} })
    .catch(() => { throw new Error("the coordinator does not answer"); });
  $("key").hidden = $("key").hidden && answer.ok;
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  $("model").replaceChildren(...body.data.map(({ id }) => new Option(id, id)));
  if (!isLoaded) $("state").textContent = "";
}
const tryToShowModels = () => showModels().catch(({ message }) => { $("state").textContent = message; });

$("load").addEventListener("submit", (event) => {
  event.preventDefault();
  const [file] = $("file").files, model = $("model").value;
  if (!file && !model) return tryToShowModels();
  isLoaded = false;
  enter("loading");
  worker.postMessage({ name: "load", file, model, key: $("key").value.trim() });
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if ($("run").disabled) return;
  $("output").textContent = "";
  $("speed").textContent = "computes the prompt";
  enter("running");
  worker.postMessage({ name: "generate", text: $("prompt").value, isChat: $("chat").checked, maxTokens: 512 });
});
$("stop").addEventListener("click", () => {
  $("stop").disabled = true;
  $("speed").textContent = "stops after this step";
  worker.postMessage({ name: "stop" });
});
$("key").addEventListener("change", tryToShowModels);
const reason = await obstacle();
if (reason) {
  $("state").textContent = reason;
  enter("unable");
} else {
  await tryToShowModels();
}
