// The page: what is chosen and typed goes to the worker, what comes back is shown, as text and never as markup.
const $ = (id) => document.getElementById(id);
const worker = new Worker("worker.js", { type: "module" });
const mebibytes = (count) => (count / 2 ** 20).toFixed(1);
let isLoaded = false;

function setRunning(isRunning) {
  $("run").disabled = isRunning || !isLoaded;
  $("stop").disabled = !isRunning;
}

const shown = {
  progress: ({ read, total }) => { $("state").textContent = `${mebibytes(read)} of ${mebibytes(total)} MiB`; },
  ready: ({ device, seconds }) => {
    isLoaded = true;
    $("state").textContent = `ready on ${device}, loaded in ${seconds.toFixed(1)} s`;
    setRunning(false);
  },
  token: ({ text }) => $("output").append(text),
  done: ({ numPrompt, numTokens, prefillSeconds, decodeSeconds }) => {
    const rate = (count, seconds) => (count / seconds).toFixed(2);
    const decode = numTokens > 1 ? `, ${rate(numTokens - 1, decodeSeconds)} tokens per second` : "";
    $("speed").textContent = `${numTokens} tokens${decode}; prompt of ${numPrompt} tokens: `
      + `${rate(numPrompt, prefillSeconds)} tokens per second`;
    setRunning(false);
  },
  error: ({ message }) => {
    $("state").textContent = message;
    setRunning(false);
  },
};
worker.addEventListener("message", ({ data }) => shown[data.name]?.(data));
worker.addEventListener("error", (event) => shown.error({ message: `the worker does not run: ${event.message}` }));

async function showModels() {
  const key = $("key").value.trim();
  const answer = await fetch("/v1/models", { headers: key ? { authorization: `Bearer ${key}` } : {} });
  $("key").hidden = $("key").hidden && answer.ok;
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error.message);
  $("model").replaceChildren(...body.data.map(({ id }) => new Option(id, id)));
}
const tryToShowModels = () => showModels().catch((error) => shown.error(error));

$("load").addEventListener("submit", (event) => {
  event.preventDefault();
  isLoaded = false;
  setRunning(false);
  worker.postMessage({ name: "load", file: $("file").files[0], model: $("model").value, key: $("key").value.trim() });
});
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!isLoaded) return;
  $("output").textContent = $("speed").textContent = "";
  setRunning(true);
  worker.postMessage({ name: "generate", text: $("prompt").value, isChat: $("chat").checked, maxTokens: 512 });
});
$("stop").addEventListener("click", () => worker.postMessage({ name: "stop" }));
$("key").addEventListener("change", tryToShowModels);
tryToShowModels();
