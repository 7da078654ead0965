// Labels appear while a person types. Without this script the same form is sent with its buttons.
import { fetchPage, swapRegions } from "./swap.js";

const WAIT = 250; // after a key
const DRAGGED = 80; // after a move of the slider
const form = document.querySelector("form[data-live]");
const address = form.getAttribute("action"); // form.action would be the button of that name
const announcer = document.getElementById("announcer");
const found = document.getElementById("found");
let timer = 0;
let underWay = null;
let why = form.querySelector('.label[aria-expanded="true"]')?.dataset.key ?? "";

function say(message) {
  announcer.textContent = message;
}

async function ask(extra = {}) {
  clearTimeout(timer);
  underWay?.abort();
  const mine = (underWay = new AbortController());
  const fields = new URLSearchParams(new FormData(form));
  if (why) fields.set("why", why.slice("why ".length));
  for (const [name, value] of Object.entries(extra)) fields.set(name, value);
  found.setAttribute("aria-busy", "true");
  try {
    const page = await fetchPage(address, { method: "POST", body: fields, signal: mine.signal });
    swapRegions(page);
    if (document.querySelector("[data-added]")) document.getElementById("label").value = "";
    say([...form.querySelectorAll("[data-announce]")].map((each) => each.textContent.trim()).join(" ").trim());
  } catch (error) {
    if (error.name === "AbortError") return;
    const message = document.createElement("p");
    message.className = "problem";
    message.textContent = error instanceof TypeError ? "The service cannot be reached." : error.message;
    found.replaceChildren(message);
    say(message.textContent);
  } finally {
    if (underWay === mine) found.removeAttribute("aria-busy");
  }
}

function wait(control) {
  if (control.type === "range") return DRAGGED;
  return control.matches("textarea, input:not([type])") ? WAIT : 0;
}

function backToTuned() {
  for (const control of form.querySelectorAll("[data-tuned]")) control.value = control.dataset.tuned;
  document.getElementById("dial").focus(); // the button is about to go
}

form.addEventListener("input", (event) => {
  clearTimeout(timer);
  if (event.target.id === "text") why = "";
  timer = setTimeout(ask, wait(event.target));
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const button = event.submitter;
  if (button?.dataset.example !== undefined) {
    document.getElementById("text").value = button.value;
    why = "";
  } else if (button?.name === "why") {
    why = button.value ? `why ${button.value}` : "";
  } else if (button?.name === "reset") {
    backToTuned();
  }
  ask(button?.name === "action" ? { action: button.value } : {});
});

// Mark the same label in all rankings.
for (const kind of ["pointerover", "pointerout"]) {
  document.getElementById("compared").addEventListener(kind, (event) => {
    const same = event.target.closest("[data-same]")?.dataset.same;
    for (const place of document.querySelectorAll("[data-same]")) {
      place.classList.toggle("marked", kind === "pointerover" && place.dataset.same === same);
    }
  });
}
