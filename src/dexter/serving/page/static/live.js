// Labels appear while a person types. Without this script the same form is sent with its buttons.
import { fetchPage, swapRegions } from "./swap.js";

const WAIT = 250;
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
    say(found.querySelector("[data-announce]")?.textContent ?? "");
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

form.addEventListener("input", (event) => {
  clearTimeout(timer);
  if (event.target.id === "text") why = "";
  timer = setTimeout(ask, event.target.matches("textarea, input:not([type])") ? WAIT : 0);
});
form.addEventListener("submit", (event) => {
  event.preventDefault();
  const button = event.submitter;
  if (button?.dataset.example !== undefined) {
    document.getElementById("text").value = button.value;
    why = "";
    ask();
  } else if (button?.name === "why") {
    why = button.value ? `why ${button.value}` : "";
    ask();
  } else if (button?.name === "action") {
    ask({ action: button.value });
  } else {
    ask();
  }
});
