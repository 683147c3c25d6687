import { setModel } from "./chat.js";
import { count } from "./format.js";
import { watch } from "./pipeline.js";

const [shown, size] = ["#model", "#context"].map((id) => document.querySelector(id));

watch(({ name, context }) => {
  if (shown.textContent === name) return;
  setModel(name);
  shown.textContent = name;
  size.textContent = `, ${count(context)} tokens of context`;
  document.title = `${name} · pptasks`;
});
