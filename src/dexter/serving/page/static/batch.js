// A file of texts becomes a file of predictions; the file itself never leaves the browser, its texts do.
import { parseCsv, writeCsv } from "./csv.js";

const MOST_BYTES = 50 * 2 ** 20;
const [box, file, column, k, start, progress, state, download, sample, chosen] = [
  ".batch", "#file", "#column", "#k", "#start", "#progress", "#state", "#download", "#sample", "#chosen",
].map((selector) => document.querySelector(selector));
const maxInputs = Number(box.dataset.maxInputs);
const maxBytes = Number(box.dataset.maxBytes) * 0.9;
let rows = [];
let running = false;

async function take(picked) {
  if (!picked || running) return;
  download.hidden = true;
  start.disabled = column.disabled = true;
  if (picked.size > MOST_BYTES) return say("The file is larger than 50 MB: use dexter predict for it.");
  rows = parseCsv(await picked.text());
  if (rows.length < 2) return say("The file has no rows below its header.");
  chosen.textContent = `${picked.name}: ${(rows.length - 1).toLocaleString("en")} rows`;
  column.replaceChildren(...rows[0].map((name, at) => new Option(name || `column ${at + 1}`, at)));
  const likely = rows[0].findIndex((name) => /^(text|title|query|description|content)$/i.test(name.trim()));
  column.value = String(likely >= 0 ? likely : longestColumn());
  start.disabled = column.disabled = false;
  say("");
  show(rows.slice(0, 4));
}

function longestColumn() {
  const lengths = rows[0].map((_, at) => rows.slice(1, 50).reduce((sum, row) => sum + (row[at] ?? "").length, 0));
  return lengths.indexOf(Math.max(...lengths));
}

function say(message) {
  state.textContent = message;
}

function show(some) {
  const table = document.createElement("table");
  for (const [at, cells] of some.entries()) {
    const line = table.insertRow();
    for (const cell of cells) {
      const place = document.createElement(at ? "td" : "th");
      place.textContent = cell.length > 80 ? `${cell.slice(0, 79)}…` : cell;
      line.append(place);
    }
  }
  sample.replaceChildren(table);
}

async function predict(texts) {
  const body = JSON.stringify({ inputs: texts, k: Number(k.value), model: box.dataset.model });
  for (;;) {
    const response = await fetch("v1/predict", { method: "POST", headers: { "Content-Type": "application/json" }, body });
    if (response.status === 429) {
      await new Promise((resolve) => setTimeout(resolve, 1000 * Number(response.headers.get("Retry-After") ?? 1)));
      continue;
    }
    const answer = await response.json();
    if (!response.ok) throw new Error(answer.detail ?? `The service answered ${response.status}.`);
    return answer.results.map((result) => result.labels);
  }
}

function* packs(texts) {
  let pack = [];
  let bytes = 0;
  for (const [at, text] of texts.entries()) {
    if (!text.trim()) continue;
    const size = 6 * text.length; // what JSON may make of it at most
    if (pack.length && (pack.length === maxInputs || bytes + size > maxBytes)) {
      yield pack;
      (pack = []), (bytes = 0);
    }
    pack.push([at, text.slice(0, maxBytes / 6)]);
    bytes += size;
  }
  if (pack.length) yield pack;
}

async function run() {
  running = true;
  start.disabled = true;
  download.hidden = true;
  progress.hidden = false;
  const texts = rows.slice(1).map((row) => row[Number(column.value)] ?? "");
  const found = texts.map(() => []);
  try {
    for (const pack of packs(texts)) {
      const answers = await predict(pack.map(([, text]) => text));
      pack.forEach(([at], place) => (found[at] = answers[place]));
      progress.value = (pack.at(-1)[0] + 1) / texts.length;
      say(`${(pack.at(-1)[0] + 1).toLocaleString("en")} of ${texts.length.toLocaleString("en")} rows`);
    }
    finish(found);
  } catch (error) {
    say(error instanceof TypeError ? "The service cannot be reached." : error.message);
  } finally {
    running = false;
    start.disabled = false;
    progress.hidden = true;
  }
}

function finish(found) {
  const places = Array.from({ length: Number(k.value) }, (_, at) => at);
  const head = places.flatMap((at) => [`label_${at + 1}`, `score_${at + 1}`]);
  const lines = rows.map((row, at) => {
    const full = rows[0].map((_, cell) => row[cell] ?? "");
    if (!at) return [...full, ...head];
    return [...full, ...places.flatMap((place) => cells(found[at - 1][place]))];
  });
  URL.revokeObjectURL(download.href);
  download.href = URL.createObjectURL(new Blob([writeCsv(lines)], { type: "text/csv;charset=utf-8" }));
  download.hidden = false;
  say(`${found.length.toLocaleString("en")} rows are labelled.`);
  show(lines.slice(0, 4));
}

function cells(label) {
  return label ? [label.id, label.score.toFixed(4)] : ["", ""];
}

file.addEventListener("change", () => take(file.files[0]));
start.addEventListener("click", run);
for (const kind of ["dragover", "drop", "dragleave"]) {
  box.addEventListener(kind, (event) => {
    event.preventDefault();
    box.classList.toggle("over", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files[0]);
  });
}
