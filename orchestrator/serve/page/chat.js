// The chat: one conversation, one answer at a time.

import { answer, ApiError, get } from "./api.js";
import { askKey } from "./key.js";
import { toEnd, View } from "./messages.js";
import { settings } from "./settings.js";
import { load, save } from "./store.js";

const SAVE_MS = 500; // while an answer comes, so that a reload keeps what was there
const MOST = 200; // messages that are kept

const byId = (id) => document.getElementById(id);
const [form, prompt, send, stop, welcome, said] = ["composer", "prompt", "send", "stop", "welcome", "said"].map(byId);

let messages = []; // {role, content, ...}, oldest first
let views = [];
let running = null; // the AbortController of the answer that comes
let model = "";

export function setModel(name) {
  model = name;
}

/** What the model is told: an exchange without an answer is no part of it, so that the roles alternate. */
export function conversation(all, system) {
  const told = system ? [{ role: "system", content: system }] : [];
  for (let i = 0; i < all.length; i += 1) {
    const [question, reply] = [all[i], all[i + 1]];
    if (question.role !== "user" || (reply?.role === "assistant" && !reply.content && reply !== all.at(-1))) continue;
    told.push({ role: "user", content: question.content });
    if (reply?.role === "assistant" && reply.content) told.push({ role: "assistant", content: reply.content });
  }
  return told;
}

function add(message) {
  messages.push(message);
  views.push(new View(message, retry));
  welcome.hidden = true;
  return views.at(-1);
}

function ask(text) {
  if (running || !text.trim()) return;
  add({ role: "user", content: text });
  prompt.value = "";
  reply();
}

/** The last answer failed: its question again. */
function retry() {
  if (running || messages.at(-1)?.role !== "assistant") return;
  messages.pop();
  views.pop().remove();
  prompt.focus();
  reply();
}

async function reply() {
  const view = add({ role: "assistant", content: "" });
  const { message } = view;
  running = new AbortController();
  view.begin();
  show("Answering");
  const saving = setInterval(keep, SAVE_MS);
  const clock = { sent: performance.now() };
  let needsKey = false;
  try {
    await receive(view, clock, running.signal);
    said.textContent = "The answer is complete";
  } catch (error) {
    if (running.signal.aborted) {
      message.stopped = true;
      said.textContent = "Stopped";
    } else {
      message.error = error instanceof ApiError ? error.message : `The page failed: ${error.message}.`;
      needsKey = error.status === 401;
      said.textContent = "";
    }
  }
  clearInterval(saving);
  running = null;
  message.figures = figuresOf(message, clock);
  view.settle();
  show();
  keep();
  if (needsKey && (await askKey())) retry();
}

async function receive(view, clock, signal) {
  const { system, parameters } = settings();
  model ||= (await get("v1/models", signal)).data[0].id; // the pipeline was not read yet
  const request = { model, messages: conversation(messages, system), ...parameters };
  for await (const { text, finish, usage } of answer(request, signal)) {
    if (text) {
      clock.last = performance.now();
      clock.first ??= clock.last;
      clock.pieces = (clock.pieces ?? 0) + 1;
      view.append(text);
    }
    if (finish) clock.finish = finish;
    if (usage) clock.usage = usage;
  }
}

/** Of an answer that was cut, only what is known: the server counts tokens, the page sees pieces of text. */
function figuresOf(message, { sent, first, last, finish, usage }) {
  if (first === undefined) return usage ? { tokens: usage.completion_tokens, finish } : null;
  const tokens = usage?.completion_tokens;
  return {
    tokens,
    tokensPerS: tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : undefined,
    firstMs: first - sent,
    cached: usage?.prompt_tokens_details?.cached_tokens,
    finish,
  };
}

function show(words) {
  if (words) said.textContent = words;
  const hadFocus = document.activeElement === (running ? send : stop);
  send.hidden = Boolean(running);
  stop.hidden = !running;
  if (hadFocus) prompt.focus();
}

function keep() {
  save("chat", messages.slice(-MOST));
}

function clear() {
  running?.abort();
  for (const view of views) view.remove();
  [messages, views] = [[], []];
  welcome.hidden = false;
  said.textContent = "New chat";
  keep();
  prompt.focus();
}

function restore() {
  const kept = load("chat", []);
  for (const message of Array.isArray(kept) ? kept : []) {
    if (typeof message?.content === "string" && ["user", "assistant"].includes(message.role)) add(message);
  }
  const last = messages.at(-1);
  if (last?.role === "assistant" && !last.figures && !last.error && !last.stopped) {
    last.stopped = true; // the browser ended while it came
    views.at(-1).settle();
  }
  toEnd();
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  ask(prompt.value);
});
prompt.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    ask(prompt.value);
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !document.querySelector(":popover-open, dialog[open]")) running.abort();
});
stop.addEventListener("click", () => running?.abort());
byId("new-chat").addEventListener("click", clear);
byId("examples").addEventListener("click", (event) => {
  if (event.target instanceof HTMLButtonElement) ask(event.target.textContent);
});
window.addEventListener("pagehide", () => {
  if (running) messages.at(-1).stopped = true;
  running?.abort();
  keep();
});
restore();
