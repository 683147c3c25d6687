// Asks for the API key, once for all who need it at a time.

import { setKey } from "./api.js";
import { load } from "./store.js";

const dialog = document.querySelector("#key-dialog");
const form = document.querySelector("#key-form");
const field = document.querySelector("#key");
const refused = document.querySelector("#key-refused");
let asking = null;

/** Whether a person gave one. */
export function askKey() {
  asking ??= new Promise((resolve) => {
    let given = false;
    refused.hidden = !load("key", "");
    form.onsubmit = (event) => {
      event.preventDefault();
      given = true;
      setKey(field.value.trim());
      dialog.close();
    };
    dialog.onclose = () => {
      asking = null;
      field.value = "";
      resolve(given);
    };
    dialog.showModal();
  });
  return asking;
}

document.querySelector("#key-cancel").addEventListener("click", () => dialog.close());
