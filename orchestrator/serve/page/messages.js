// How a chat's messages look. A message is {role, content, figures, stopped, error}; what it says is only ever text.

import { figure, milliseconds, plural } from "./format.js";

const template = document.querySelector("#message-template");
const list = document.querySelector("#messages");
const scroller = document.querySelector("#scroller");
const END = 4; // pixels

let follows = true; // whoever is at the end stays there; whoever scrolls up reads in peace
let lastTop = 0;
let frame = 0;

/** A message on the page. `onRetry` is called when a person asks for it again. */
export class View {
  constructor(message, onRetry) {
    this.node = template.content.firstElementChild.cloneNode(true);
    this.message = message;
    this.node.classList.add(message.role);
    this.part("h3").textContent = message.role === "user" ? "You" : "Answer";
    this.text = document.createTextNode(message.content);
    this.part(".text").append(this.text);
    this.part(".error button").addEventListener("click", onRetry);
    list.append(this.node);
    this.settle();
  }

  part(selector) {
    return this.node.querySelector(selector);
  }

  /** More of its text came. */
  append(text) {
    this.message.content += text;
    this.text.appendData(text);
    follow();
  }

  begin() {
    this.node.classList.add("streaming");
    this.node.setAttribute("aria-busy", "true");
    toEnd();
  }

  /** Nothing more comes: show how it went. */
  settle() {
    const { figures, stopped, error } = this.message;
    this.node.classList.remove("streaming");
    this.node.removeAttribute("aria-busy");
    const meta = this.part(".meta");
    const words = [stopped && "stopped", ...inWords(figures)].filter(Boolean);
    meta.replaceChildren(...words.map((text) => Object.assign(document.createElement("span"), { textContent: text })));
    meta.hidden = !words.length;
    this.part(".error p").textContent = error ?? "";
    this.part(".error").hidden = !error;
    follow();
  }

  remove() {
    this.node.remove();
  }
}

function inWords(figures) {
  if (!figures) return [];
  const { tokens, tokensPerS, firstMs, cached, finish } = figures;
  return [
    tokens !== undefined && plural(tokens, "token"),
    tokensPerS && `${figure(tokensPerS)} tok/s`,
    firstMs && `first token after ${milliseconds(firstMs)}`,
    cached > 0 && `${plural(cached, "prompt token")} reused`,
    finish === "length" && "as long as settings or context allow",
  ];
}

/** Keep the end in sight, once a frame. */
function follow() {
  if (!follows || frame) return;
  frame = requestAnimationFrame(() => {
    frame = 0;
    scroller.scrollTop = scroller.scrollHeight;
  });
}

export function toEnd() {
  follows = true;
  follow();
}

scroller.addEventListener("scroll", () => {
  const left = scroller.scrollHeight - scroller.clientHeight - scroller.scrollTop;
  if (left < END) follows = true;
  else if (scroller.scrollTop < lastTop) follows = false;
  lastTop = scroller.scrollTop;
}, { passive: true });
new ResizeObserver(follow).observe(scroller);
