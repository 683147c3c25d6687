// What outlives a reload of this tab, and no more than that: sessionStorage. It may be full or forbidden.

const PREFIX = "pptasks.";

/** What was saved under `name`; `fallback` if nothing was, or nothing that can be read. */
export function load(name, fallback) {
  try {
    return JSON.parse(sessionStorage.getItem(PREFIX + name)) ?? fallback;
  } catch {
    return fallback;
  }
}

/** Whether it could be saved. */
export function save(name, value) {
  try {
    sessionStorage.setItem(PREFIX + name, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
