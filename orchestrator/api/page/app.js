// The page of a linkcpp server: a chat over its own API, and the fleet from /status. No build step, no dependencies.

const $ = (id) => document.getElementById(id);
const conversation = [];
let answering = null; // the AbortController of the answer that is being written
let key = sessionStorage.getItem("key") ?? "";

// --- asking ---------------------------------------------------------------------------------------------------

function headers() {
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

async function ask(path, options = {}) {
  const response = await fetch(path, { ...options, headers: headers() });
  if (response.status === 401) {
    await askForKey();
    return fetch(path, { ...options, headers: headers() });
  }
  return response;
}

let keyDialog = null;

function askForKey() {
  keyDialog ??= new Promise((resolve) => {
    const dialog = $("key-dialog");
    dialog.addEventListener("close", () => {
      key = $("key").value.trim();
      sessionStorage.setItem("key", key);
      keyDialog = null;
      resolve();
    }, { once: true });
    dialog.showModal();
  });
  return keyDialog;
}

async function* events(body) {
  const decoder = new TextDecoder();
  let rest = "";
  for await (const chunk of chunks(body.getReader())) {
    const lines = (rest + decoder.decode(chunk, { stream: true })).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: ") && line !== "data: [DONE]") yield JSON.parse(line.slice(6));
    }
  }
}

async function* chunks(reader) {
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield value;
  }
}

// --- chat -----------------------------------------------------------------------------------------------------

function element(tag, name = "", text = "") {
  const made = document.createElement(tag);
  if (name) made.className = name;
  if (text) made.textContent = text;
  return made;
}

// Shows code between fences and backticks as code; everything else is text, and nothing is ever HTML.
function write(target, text) {
  target.replaceChildren();
  for (const [number, part] of text.split(/^```[^\n]*\n?/m).entries()) {
    if (number % 2) {
      const block = element("pre");
      block.append(element("code", "", part.replace(/\n$/, "")));
      target.append(block);
      continue;
    }
    for (const [index, piece] of part.replace(number ? /^\n/ : /^$/, "").split(/`([^`\n]+)`/).entries()) {
      target.append(index % 2 ? element("code", "", piece) : piece);
    }
  }
}

function show(role, text = "") {
  $("empty").hidden = true;
  const message = element("article", `message ${role}`);
  if (role === "user") {
    message.textContent = text;
  } else {
    message.append(element("div", "text"));
  }
  $("messages").append(message);
  message.scrollIntoView({ block: "end" });
  return message;
}

function thoughts(message) {
  let details = message.querySelector("details");
  if (!details) {
    details = element("details");
    details.append(element("summary", "", "Thoughts"), element("div", "text"));
    message.prepend(details);
  }
  return details.querySelector(".text");
}

async function answer() {
  const message = show("assistant");
  message.classList.add("waiting");
  const said = { content: "", thought: "" };
  let usage = null, reason = "", first = 0;
  const begun = performance.now();
  answering = new AbortController();
  setAnswering(true);
  try {
    const system = $("system").value.trim();
    const response = await ask("v1/chat/completions", {
      method: "POST",
      signal: answering.signal,
      body: JSON.stringify({
        messages: [...(system ? [{ role: "system", content: system }] : []), ...conversation],
        stream: true,
        stream_options: { include_usage: true },
        temperature: Number($("temperature").value),
        max_tokens: Number($("limit").value) || undefined,
      }),
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const event of events(response.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const [choice] = event.choices ?? [];
      if (!choice) continue;
      reason = choice.finish_reason ?? reason;
      const atEnd = isAtEnd();
      if (choice.delta.reasoning_content) {
        said.thought += choice.delta.reasoning_content;
        thoughts(message).textContent = said.thought;
      }
      if (choice.delta.content) {
        first ||= performance.now();
        said.content += choice.delta.content;
        write(message.querySelector(":scope > .text"), said.content);
      }
      if (atEnd) $("messages").scrollTop = $("messages").scrollHeight;
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else message.append(element("p", "error", error.message));
  }
  message.classList.remove("waiting");
  if (said.content) conversation.push({ role: "assistant", content: said.content });
  else takeBack();
  message.append(element("p", "note", note(usage, reason, begun, first)));
  answering = null;
  setAnswering(false);
}

// A question without an answer would stand in the way of the next one; it can be sent again.
function takeBack() {
  const { content } = conversation.pop();
  $("question").value ||= content;
  fit();
}

function note(usage, reason, begun, first) {
  const parts = [];
  if (reason === "stopped") parts.push("stopped");
  if (reason === "length") parts.push("cut off at the longest answer");
  if (usage) {
    const seconds = (performance.now() - first) / 1000;
    parts.push(`${usage.completion_tokens} tokens`);
    if (usage.completion_tokens > 1 && first) parts.push(`${((usage.completion_tokens - 1) / seconds).toFixed(1)} per second`);
    if (first) parts.push(`first after ${((first - begun) / 1000).toFixed(1)} s`);
  }
  return parts.join(" · ");
}

function isAtEnd() {
  const box = $("messages");
  return box.scrollHeight - box.scrollTop - box.clientHeight < 60;
}

function setAnswering(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("clear").disabled = busy;
}

function fit() {
  const box = $("question");
  box.style.height = "auto";
  box.style.height = `${box.scrollHeight + 2}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("question").value.trim();
  if (!text || answering) return;
  $("question").value = "";
  fit();
  conversation.push({ role: "user", content: text });
  show("user", text);
  answer();
});

$("question").addEventListener("input", fit);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("composer").requestSubmit();
  }
});
$("stop").addEventListener("click", () => answering?.abort());
$("clear").addEventListener("click", () => {
  conversation.length = 0;
  $("messages").replaceChildren($("empty"));
  $("empty").hidden = false;
});

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => {
    document.body.dataset.view = button.dataset.view;
    for (const other of document.querySelectorAll("nav button")) other.setAttribute("aria-pressed", other === button);
  });
}

// --- fleet ----------------------------------------------------------------------------------------------------

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumFractionDigits: 1 });

function bytes(count) {
  const units = ["B", "KB", "MB", "GB", "TB"];
  let unit = 0;
  for (; count >= 1000 && unit < units.length - 1; unit += 1) count /= 1000;
  return `${number.format(count)} ${units[unit]}`;
}

function duration(seconds) {
  if (seconds < 60) return `${Math.floor(seconds)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor((seconds % 3600) / 60)} min`;
}

function card(name, state, kind, ...facts) {
  const made = element("li");
  const top = element("div", "top");
  top.append(element("span", "", name), element("span", `state ${kind}`, state));
  made.append(top);
  for (const fact of facts.filter(Boolean)) made.append(element("div", "facts", fact));
  return made;
}

function slotCard(slot) {
  const request = slot.request;
  if (!request) return card(`Slot ${slot.index}`, "free", "off", slot.held_tokens ? `holds ${short.format(slot.held_tokens)} tokens` : "");
  return card(
    `Slot ${slot.index}`,
    request.phase === "prefill" ? "reading the prompt" : "writing",
    "busy",
    `${short.format(request.prompt_tokens)} tokens read, ${short.format(request.generated_tokens)} written` +
      (request.tokens_per_second ? `, ${number.format(request.tokens_per_second)} per second` : ""),
  );
}

function workerCard(worker) {
  return card(
    worker.name || worker.address,
    worker.state,
    worker.state === "up" ? "" : "bad",
    `${worker.address}${worker.rtt_ms === null ? "" : ` · ${worker.rtt_ms.toFixed(2)} ms away`}`,
    worker.experts && `experts ${worker.experts} of layers ${worker.layers}`,
    `${number.format(worker.rows_per_second)} rows per second · ${bytes(worker.bytes_out)} out, ${bytes(worker.bytes_in)} in` +
      (worker.errors ? ` · ${worker.errors} ${worker.errors === 1 ? "error" : "errors"}` : ""),
    worker.problem,
  );
}

function drawHistory(values) {
  const most = Math.max(1, ...values);
  const step = 120 / Math.max(1, values.length - 1);
  const points = values.map((value, index) => `${(index * step).toFixed(2)},${(31 - (29 * value) / most).toFixed(2)}`);
  const shape = (tag, list) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    made.setAttribute("points", list.join(" "));
    return made;
  };
  $("history").replaceChildren(shape("polygon", ["0,32", ...points, "120,32"]), shape("polyline", points));
}

function showFleet(fleet) {
  const busy = fleet.slots.filter((slot) => slot.request);
  $("model").textContent = fleet.model;
  document.title = `${fleet.model} · linkcpp`;
  $("rate").textContent = number.format(fleet.tokens_per_second);
  $("running").textContent = fleet.slots.length ? `${busy.length} of ${fleet.slots.length}` : fleet.request ? "1" : "0";
  $("waiting").textContent = fleet.requests_waiting;
  $("tokens").textContent = short.format(fleet.tokens_generated);
  drawHistory(fleet.tokens_per_second_history);
  $("slots").replaceChildren(...fleet.slots.map(slotCard));
  $("workers").replaceChildren(
    ...(fleet.workers.length ? fleet.workers.map(workerCard) : [card("This process", "up", "", "computes the experts itself")]),
  );
  $("foot").textContent = `contract ${fleet.contract} · engine ${fleet.engine} · up for ${duration(fleet.uptime_seconds)}`;
  const missing = fleet.workers.filter((worker) => worker.state !== "up").map((worker) => worker.name || worker.address);
  setProblem(missing.length ? `Missing: ${missing.join(", ")}. Answers fail until all workers are back.` : "");
}

function setProblem(text) {
  $("problem").hidden = !text;
  $("problem").textContent = text;
  $("light").className = `light ${text ? "bad" : "good"}`;
  $("light").title = text || "ready";
}

async function look() {
  try {
    const response = await ask("status");
    const body = await response.json();
    if (response.ok) showFleet(body);
    else setProblem(body.error.message);
  } catch {
    setProblem("The server does not answer.");
  }
  setTimeout(look, document.hidden ? 5000 : 1000);
}

look();
