// The server: what the page asks of it, and what went wrong, in words.

import { load, save } from "./store.js";
import { events } from "./sse.js";

/** `status`: of HTTP; 0 when no answer came. */
export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

export function setKey(key) {
  save("key", key);
}

/** GET; the JSON answer. Throws ApiError, or AbortError. */
export async function get(path, signal) {
  const response = await send(path, { signal });
  return response.json();
}

/**
 * An answer to `request` (a body of /v1/chat/completions), as it comes: {text} for each piece, {finish} with the reason
 * of its end, {usage} with its tokens. Throws ApiError, or AbortError when `signal` says stop.
 */
export async function* answer(request, signal) {
  const body = JSON.stringify({ ...request, stream: true, stream_options: { include_usage: true } });
  const headers = { "Content-Type": "application/json" };
  const response = await send("v1/chat/completions", { method: "POST", headers, body, signal });
  try {
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      yield* parts(JSON.parse(data));
    }
  } catch (error) {
    if (error instanceof ApiError || error.name === "AbortError") throw error;
    throw new ApiError(`The answer broke off: ${error.message || "the connection was lost"}.`);
  }
  throw new ApiError("The answer broke off: the server closed the connection.");
}

function* parts(chunk) {
  if (chunk.error) throw new ApiError(sentence(chunk.error.message), Number(chunk.error.code) || 500);
  const choice = chunk.choices?.[0];
  if (choice?.delta?.content) yield { text: choice.delta.content };
  if (choice?.finish_reason) yield { finish: choice.finish_reason };
  if (chunk.usage) yield { usage: chunk.usage };
}

async function send(path, options) {
  const key = load("key", "");
  let response;
  try {
    response = await fetch(path, {
      ...options,
      cache: "no-store",
      headers: { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) },
    });
  } catch (error) {
    if (error.name === "AbortError" || error.name === "TimeoutError") throw error;
    throw new ApiError("The server cannot be reached. Does pp serve still run?");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  if (response.status === 401) return new ApiError("This server asks for a key.", 401);
  let message = "";
  try {
    message = (await response.json()).error.message;
  } catch {
    message = `the server answered ${response.status} ${response.statusText}`;
  }
  const wait = Number(response.headers.get("Retry-After"));
  const when = wait > 0 ? ` Try again in ${Math.ceil(wait)} s.` : "";
  return new ApiError(sentence(message) + when, response.status);
}

function sentence(words) {
  const text = String(words || "something went wrong").slice(0, 2000);
  return text[0].toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}
