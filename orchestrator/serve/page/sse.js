// Server-sent events out of a fetch body (EventSource cannot POST). https://html.spec.whatwg.org/multipage/server-sent-events.html

const MAX_EVENT = 1 << 20; // characters; no piece of an answer is so long

/**
 * The data of each event, as it comes. `body`: a ReadableStream of bytes. Ends with the body; throws what reading it throws,
 * and an Error for an event without end.
 */
export async function* events(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder(); // keeps the first bytes of a character until the others are there
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = rest.split(/\r\n|\n|\r(?!$)/); // a "\r" at the very end may be half of "\r\n"
      rest = lines.pop();
      for (const line of lines) {
        if (line === "" && data.length) {
          yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
      if (done) return;
      if (rest.length + data.reduce((sum, line) => sum + line.length, 0) > MAX_EVENT) {
        throw new Error("the server sent an event without end");
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the connection goes with it; it may have gone already
  }
}
