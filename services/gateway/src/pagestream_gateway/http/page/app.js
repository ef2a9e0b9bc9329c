import { Api } from "./api.js";
import { Chat } from "./chat.js";
import { Control } from "./control.js";
import { Live } from "./live.js";
import { Demonstration } from "./streams.js";

const $ = (id) => document.getElementById(id);
const api = new Api();
const model = () => $("model").value;

function trouble(text) {
  $("trouble").textContent = text;
  $("trouble").hidden = !text;
}

async function showModels() {
  try {
    const names = await api.models();
    const chosen = model();
    $("model").replaceChildren(...names.map((name) => new Option(api.marked(name), name)));
    if (names.includes(chosen)) $("model").value = chosen;
    if (!names.length) trouble("no model is published yet");
  } catch (error) {
    trouble(error.message);
  }
}

function choose(view) {
  for (const each of ["chat", "streams"]) {
    $(each).hidden = each !== view;
    $(`show-${each}`).classList.toggle("chosen", each === view);
    $(`show-${each}`).setAttribute("aria-pressed", String(each === view));
  }
}

$("show-chat").addEventListener("click", () => choose("chat"));
$("show-streams").addEventListener("click", () => choose("streams"));
$("key").addEventListener("change", () => {
  api.key = $("key").value.trim();
  trouble("");
  showModels();
});

let control = null;
try {
  control = await Control.open();
  if (control) api.gateways = (await control.processes()).gateways;
} catch (error) {
  sessionStorage.removeItem("control");
  control = null;
  trouble(error.message);
}
new Chat(api, model);
const demonstration = new Demonstration(api, control, model);
if (control) {
  $("no-control").hidden = true;
  $("kills").hidden = false;
  choose("streams");
  await demonstration.showParts();
  setInterval(() => document.hidden || demonstration.showParts().catch(() => {}), 1_000);
}
new Live(api, $("live"));
await showModels();
document.body.dataset.ready = "true";
