// The few parameters that a person sets, kept with the chat.

import { load, save } from "./store.js";

const DEFAULTS = { system: "", temperature: 0.7, maxTokens: 512 };
const fields = {
  system: document.querySelector("#system"),
  temperature: document.querySelector("#temperature"),
  maxTokens: document.querySelector("#max-tokens"),
};
const form = document.querySelector("#settings-form");
const panel = document.querySelector("#settings");

const current = { ...DEFAULTS, ...load("settings", {}) };

/** As the request has them: system text apart, the rest by its API name. */
export function settings() {
  return {
    system: current.system.trim(),
    parameters: { temperature: current.temperature, max_tokens: current.maxTokens },
  };
}

function show() {
  for (const [name, field] of Object.entries(fields)) {
    field.value = current[name];
    field.removeAttribute("aria-invalid");
  }
}

form.addEventListener("input", () => {
  for (const [name, field] of Object.entries(fields)) {
    if (field.checkValidity()) current[name] = field.type === "number" ? field.valueAsNumber : field.value;
    if (field.validity.valid) field.removeAttribute("aria-invalid");
    else field.setAttribute("aria-invalid", "true");
  }
  save("settings", current);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  panel.hidePopover();
});
panel.addEventListener("beforetoggle", show); // what is no number is forgotten
show();
