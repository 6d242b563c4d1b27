// A chat with the server, as any client has it: what each turn found in the cache, and how soon it
// was answered. The conversation is kept here and in a session of the server's.

import * as format from "./format.js";
import { post } from "./api.js";
import { byId, element } from "./dom.js";

const MAX_TOKENS = 256;
const chat = { messages: [], session: "", model: "", running: null };

export function setModel(names) {
  chat.model = names[0] ?? "";
  byId("chat-send").disabled = !chat.model && !chat.running;
}

const newSession = () => `dashboard-${crypto.getRandomValues(new Uint32Array(2)).join("")}`;

export function startChat() {
  reset();
  byId("chat-form").addEventListener("submit", (event) => {
    event.preventDefault();
    if (chat.running) chat.running.abort();
    else send();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!chat.running) send();
    }
  });
  byId("chat-new").addEventListener("click", reset);
}

function reset() {
  chat.running?.abort();
  [chat.messages, chat.session] = [[], newSession()];
  byId("chat-turns").replaceChildren(element("li", { class: "empty" },
    "Ask twice: the second turn finds the first one in the cache."));
}

async function send() {
  const text = byId("chat-text").value.trim();
  if (!text || !chat.model) return;
  byId("chat-text").value = "";
  chat.messages.push({ role: "user", content: text });
  const answer = element("p", { class: "said" });
  const figures = element("p", { class: "figures num", role: "status" }, "waiting");
  const turns = byId("chat-turns");
  turns.querySelector(".empty")?.remove();
  turns.append(element("li", { class: "user" }, element("p", { class: "said" }, text)),
    element("li", { class: "assistant" }, answer, figures));
  turns.scrollTop = turns.scrollHeight;
  chat.running = new AbortController();
  byId("chat-send").textContent = "Stop";
  try {
    await take(answer, figures, chat.running.signal);
  } catch (error) {
    const isStopped = error.name === "AbortError";
    figures.textContent = isStopped ? "stopped" : error.message || "this key may not ask";
    chat.messages.pop();
  } finally {
    chat.running = null;
    byId("chat-send").textContent = "Send";
  }
}

async function take(answer, figures, signal) {
  const began = performance.now();
  const response = await post("/v1/chat/completions", {
    model: chat.model, messages: chat.messages, session_id: chat.session, max_tokens: MAX_TOKENS,
    stream: true, stream_options: { include_usage: true },
  }, signal);
  let [first, usage] = [null, null];
  for await (const event of events(response)) {
    if (event.error) throw new Error(event.error.message);
    const piece = event.choices?.[0]?.delta?.content;
    if (piece) {
      first ??= performance.now() - began;
      answer.textContent += piece;
      byId("chat-turns").scrollTop = byId("chat-turns").scrollHeight;
    }
    usage = event.usage ?? usage;
  }
  chat.messages.push({ role: "assistant", content: answer.textContent });
  show(figures, usage, first, performance.now() - began);
}

function show(figures, usage, first, whole) {
  if (!usage) return;
  const cached = usage.prompt_tokens_details.cached_tokens;
  figures.dataset.cached = cached;
  figures.dataset.prompt = usage.prompt_tokens;
  const rest = usage.completion_tokens - 1;
  const speed = first !== null && rest > 0 && whole > first ? (rest / (whole - first)) * 1000 : null;
  figures.textContent = [
    `${format.count(cached)} of ${format.count(usage.prompt_tokens)} prompt tokens cached`,
    `first token after ${format.seconds(first === null ? null : first / 1000)}`,
    `${format.count(usage.completion_tokens)} tokens`,
    ...(speed === null ? [] : [`then ${speed.toFixed(0)} tokens/s`]),
  ].join(" · ");
}

/** The data of a stream of server-sent events, until [DONE]. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  while (true) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (!part.startsWith("data: ")) continue;
      const data = part.slice("data: ".length);
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}
