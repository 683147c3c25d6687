// The pipeline as it works: asks for /api/pipeline, draws what comes, and says how old it is.

import { ApiError, get } from "./api.js";
import { bytes, count, figure, milliseconds, percent, plural } from "./format.js";
import { askKey } from "./key.js";

const EVERY_MS = 1000;
const HIDDEN_MS = 10_000; // nobody looks
const LATE_MS = 4000; // no answer for so long: given up
const STALE_MS = 3500;
const SAMPLES = 60;

const byId = (id) => document.getElementById(id);
const template = byId("stage-template");
const speeds = [];
let onModel = () => {};
let readAt = null; // of the reading that is shown, on the page's steady clock
let timer = 0;
let turns = 0; // polls that began
let problem = ""; // of the last one
let mayAsk = true; // for a key

/** Begin. `told(model)` is called with each reading's model: {name, context}. */
export function watch(told) {
  onModel = told;
  document.addEventListener("visibilitychange", () => document.hidden || poll());
  byId("fold").addEventListener("click", fold);
  byId("enter-key").addEventListener("click", () => {
    mayAsk = true;
    poll();
  });
  setInterval(age, 500);
  poll();
}

async function poll() {
  clearTimeout(timer);
  const turn = (turns += 1);
  let why = "";
  let needsKey = false;
  try {
    draw(await get("api/pipeline", AbortSignal.timeout(LATE_MS)));
    readAt = performance.now();
    mayAsk = true;
  } catch (error) {
    needsKey = error.status === 401;
    why = error instanceof ApiError ? error.message : `No answer within ${LATE_MS / 1000} s.`;
  }
  trouble(why, needsKey);
  if (needsKey && mayAsk) mayAsk = await askKey(); // who says no is not asked again and again
  if (turn !== turns) return; // another poll began meanwhile
  timer = setTimeout(poll, needsKey && mayAsk ? 0 : document.hidden ? HIDDEN_MS : EVERY_MS);
}

/** What is shown may be old: say so, and how old. */
function age() {
  const old = readAt === null ? null : performance.now() - readAt;
  const isStale = old === null ? Boolean(problem) : old > STALE_MS + (document.hidden ? HIDDEN_MS : 0);
  byId("pipeline").classList.toggle("stale", isStale);
  put(byId("fresh"), isStale ? "no news" : old === null ? "connecting" : "live");
  const since = isStale && old !== null ? `What you see was so ${Math.round(old / 1000)} s ago.` : "";
  put(byId("why"), `${problem} ${since}`.trim());
  byId("trouble").hidden = !byId("why").textContent;
}

function trouble(why, needsKey) {
  problem = why;
  byId("enter-key").hidden = !needsKey;
  age();
}

function draw(reading) {
  const { model, plan, run, stages, head } = reading;
  onModel(model);
  drawHead(head);
  const list = byId("stages");
  while (list.children.length > stages.length) list.lastElementChild.remove();
  while (list.children.length < stages.length) list.append(template.content.firstElementChild.cloneNode(true));
  list.classList.toggle("many", stages.length > 6);
  const blocks = Math.max(...plan.spans.map(([, hi]) => hi));
  stages.forEach((stage, i) => drawStage(list.children[i], stage, i, blocks));
  const isRing = plan.readout === "first" && stages.length > 1;
  byId("track").classList.toggle("alone", stages.length === 1);
  byId("track").classList.toggle("moving", head.in_flight > 0);
  put(byId("way-back"), isRing ? "hidden state back to the head, which reads out the token" : "token back to the head");
  put(byId("plan"), `${plural(blocks, "block")} in ${plural(stages.length, "stage")}, ${plan.wire} between them. ${run}`);
}

function drawHead(head) {
  speeds.push(head.tokens_per_s);
  if (speeds.length > SAMPLES) speeds.shift();
  const speed = figure(head.tokens_per_s);
  put(byId("tokens-per-s"), speed);
  put(byId("fold-figures"), `${speed} tok/s`);
  put(byId("live"), count(head.live));
  put(byId("waiting"), count(head.waiting));
  put(byId("in-flight"), count(head.in_flight));
  put(byId("hop"), head.hop_us ? milliseconds(head.hop_us / 1000) : "–");
  put(byId("requests"), count(head.requests));
  put(byId("cached"), count(head.cached_tokens));
  const top = Math.max(1, ...speeds);
  const points = speeds.map((v, i) => `${60 - speeds.length + i + 0.5},${(23 - (22 * v) / top).toFixed(2)}`);
  const [area, line] = byId("spark").children;
  line.setAttribute("points", points.join(" "));
  area.setAttribute("points", `${60.5 - speeds.length},24 ${points.join(" ")} 59.5,24`);
}

function drawStage(node, stage, i, blocks) {
  const set = (name, text) => put(node.querySelector(`[data-f="${name}"]`), text);
  const [lo, hi] = stage.span ?? [0, 0];
  node.dataset.doing = stage.doing;
  set("number", i);
  set("name", i === 0 ? "Head" : `Stage ${i}`);
  set("doing", stage.doing === "loading" ? stage.phase || "loading" : stage.doing);
  set("where", [stage.device, stage.kernels && `${stage.kernels} kernels`, stage.host].filter(Boolean).join(" · "));
  set("span", hi > lo ? `blocks ${lo} to ${hi - 1}` : "no blocks");
  const own = node.querySelector(".own");
  own.setAttribute("x", (100 * lo) / blocks);
  own.setAttribute("width", (100 * (hi - lo)) / blocks);
  set("rows", figure(stage.rows_per_s));
  set("steps", figure(stage.steps_per_s));
  set("lanes", count(stage.lanes));
  set("queue", count(stage.queue_depth));
  set("busy", percent(stage.busy));
  set("rtt", stage.rtt_ms ? milliseconds(stage.rtt_ms) : "–");
  node.querySelector(".busy").setAttribute("stroke-dasharray", `${100 * Math.min(1, stage.busy || 0)} 100`);
  const slots = stage.slots ? `, ${plural(stage.slots, "slot")}` : "";
  set("bytes", `${bytes(stage.weights_bytes)} weights · ${bytes(stage.kv_bytes)} KV cache${slots}`);
}

/** Under the chat, on a narrow screen. */
function fold() {
  const isOpen = byId("pipeline").classList.toggle("open");
  byId("fold").setAttribute("aria-expanded", String(isOpen));
}

function put(node, text) {
  const words = String(text);
  if (node.textContent !== words) node.textContent = words;
}
