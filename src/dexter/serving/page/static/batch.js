// Read a file of texts, predict their labels, offer the result as a file. Only the texts are sent.
import { decode, harmless, parseCsv, writeCsv } from "./csv.js";

const MOST_BYTES = 50 * 2 ** 20;
const PREVIEW = 5;
const [box, file, column, k, named, start, progress, state, download, sample] = [
  ".batch", "#file", "#column", "#k", "#named", "#start", "#progress", "#state", "#download", "#sample",
].map((selector) => document.querySelector(selector));
const controls = [file, column, k, named];
const maxInputs = Number(box.dataset.maxInputs);
const maxBytes = Number(box.dataset.maxBytes) * 0.9;
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;
let parsed = []; // the rows of the file
let names = []; // of its columns
let rows = []; // without the names
let stop = null; // stops the running prediction

async function take(picked) {
  if (!picked || stop) return;
  parsed = [];
  close();
  if (picked.size > MOST_BYTES) return complain("The file is larger than 50 MB: use dexter predict for it.");
  const text = decode(new Uint8Array(await picked.arrayBuffer()));
  if (text === null) return complain("This is not a table in text form: save it as CSV (UTF-8) first.");
  parsed = parseCsv(text);
  if (!parsed.length) return complain("The file is empty.");
  named.checked = parsed.length > 1;
  arrange();
}

function close() {
  download.hidden = sample.hidden = true;
  start.disabled = column.disabled = true;
  say("");
}

function arrange() {
  if (!parsed.length || stop) return;
  const width = Math.max(...parsed.slice(0, 1000).map((row) => row.length));
  const given = named.checked ? parsed[0] : [];
  names = Array.from({ length: width }, (_, at) => given[at]?.trim() || `column ${at + 1}`);
  rows = named.checked ? parsed.slice(1) : parsed;
  if (!rows.length) return close(), complain("The file has no rows below the names of its columns.");
  column.replaceChildren(...names.map((name, at) => new Option(name.length > 40 ? `${name.slice(0, 39)}…` : name, at)));
  const likely = names.findIndex((name) => /^(text|title|query|description|content)$/i.test(name));
  column.value = String(likely >= 0 ? likely : longestColumn());
  start.disabled = column.disabled = false;
  download.hidden = true;
  say(count(rows.length, "row"));
  show(names, rows.slice(0, PREVIEW));
}

function longestColumn() {
  const lengths = names.map((_, at) => rows.slice(0, 50).reduce((sum, row) => sum + (row[at] ?? "").length, 0));
  return lengths.indexOf(Math.max(...lengths));
}

function say(message, kind = "") {
  state.textContent = message;
  state.className = kind;
}

function complain(message) {
  say(message, "problem");
}

function show(head, some) {
  const table = document.createElement("table");
  for (const [at, cells] of [head, ...some].entries()) {
    const line = table.insertRow();
    for (const cell of head.map((_, place) => cells[place] ?? "")) {
      const box = document.createElement(at ? "td" : "th");
      if (!at) box.scope = "col";
      box.textContent = cell.length > 80 ? `${cell.slice(0, 79)}…` : cell;
      line.append(box);
    }
  }
  sample.replaceChildren(table);
  sample.hidden = false;
}

async function predict(texts, signal) {
  const body = JSON.stringify({ inputs: texts, k: Number(k.value), model: box.dataset.model });
  const headers = { "Content-Type": "application/json" };
  for (;;) {
    const response = await fetch("v1/predict", { method: "POST", headers, body, signal });
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
    const size = 6 * text.length; // at most, in JSON
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
  if (stop) return stop.abort();
  stop = new AbortController();
  start.textContent = "Stop";
  for (const control of controls) control.disabled = true;
  download.hidden = true;
  progress.hidden = false;
  progress.value = 0;
  const texts = rows.map((row) => row[Number(column.value)] ?? "");
  const found = texts.map(() => []);
  try {
    for (const pack of packs(texts)) {
      const answers = await predict(pack.map(([, text]) => text), stop.signal);
      pack.forEach(([at], place) => (found[at] = answers[place]));
      progress.value = (pack.at(-1)[0] + 1) / texts.length;
      say(`${(pack.at(-1)[0] + 1).toLocaleString("en")} of ${count(texts.length, "row")}`);
    }
    finish(found);
  } catch (error) {
    if (error.name === "AbortError") say("Stopped.");
    else complain(error instanceof TypeError ? "The service cannot be reached." : error.message);
  } finally {
    stop = null;
    start.textContent = "Predict";
    for (const control of controls) control.disabled = false;
    progress.hidden = true;
  }
}

function finish(found) {
  const places = Array.from({ length: Number(k.value) }, (_, at) => at);
  const calibrated = found.some((labels) => labels.some((label) => label.probability != null));
  const kinds = ["label", "text", "score", ...(calibrated ? ["probability"] : [])];
  const head = [...names, ...places.flatMap((at) => kinds.map((kind) => `${kind}_${at + 1}`))];
  const lines = rows.map((row, at) => {
    const full = names.map((_, cell) => row[cell] ?? "");
    return [...full, ...places.flatMap((place) => cells(found[at][place], kinds))];
  });
  URL.revokeObjectURL(download.href);
  download.href = URL.createObjectURL(new Blob([writeCsv([head, ...lines])], { type: "text/csv;charset=utf-8" }));
  download.hidden = false;
  const empty = found.filter((labels) => !labels.length).length;
  say(`${count(found.length - empty, "row")} labelled${empty ? `, ${empty.toLocaleString("en")} without a text` : ""}.`, "done");
  show(head, lines.slice(0, PREVIEW));
}

function cells(label, kinds) {
  if (!label) return kinds.map(() => "");
  const values = { label: harmless(label.id), text: harmless(label.text), score: label.score.toFixed(4), probability: label.probability?.toFixed(4) };
  return kinds.map((kind) => values[kind] ?? "");
}

file.addEventListener("change", () => take(file.files[0]));
named.addEventListener("change", arrange);
start.addEventListener("click", run);
for (const kind of ["dragover", "drop", "dragleave"]) {
  box.addEventListener(kind, (event) => {
    event.preventDefault();
    box.classList.toggle("over", kind === "dragover");
    if (kind !== "drop" || stop) return;
    file.files = event.dataTransfer.files; // the input then shows its name
    take(file.files[0]);
  });
}
