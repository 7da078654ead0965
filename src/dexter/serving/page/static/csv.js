// CSV as in RFC 4180: quoted cells may hold separators, quotes and line ends.

export function parseCsv(text, separator = guessSeparator(text)) {
  const rows = [];
  let row = [];
  let cell = "";
  let quoted = false;
  for (let at = 0; at < text.length; at++) {
    const letter = text[at];
    if (quoted) {
      if (letter !== '"') cell += letter;
      else if (text[at + 1] === '"') (cell += '"'), at++;
      else quoted = false;
    } else if (letter === '"' && cell === "") quoted = true;
    else if (letter === separator) row.push(cell), (cell = "");
    else if (letter === "\n" || letter === "\r") {
      if (letter === "\r" && text[at + 1] === "\n") at++;
      rows.push([...row, cell]);
      (row = []), (cell = "");
    } else cell += letter;
  }
  if (cell !== "" || row.length) rows.push([...row, cell]);
  return rows.filter((cells) => cells.length > 1 || cells[0].trim() !== "");
}

export function guessSeparator(text) {
  const line = text.slice(0, text.search(/[\r\n]|$/));
  return ["\t", ";", ","].map((mark) => [line.split(mark).length, mark]).sort((a, b) => b[0] - a[0])[0][1];
}

// Decode a file; null if it is not text. Tables that are not UTF-8 are mostly Windows-1252.
export function decode(bytes) {
  const utf16 = { "255,254": "utf-16le", "254,255": "utf-16be" }[`${bytes[0]},${bytes[1]}`];
  if (utf16) return new TextDecoder(utf16).decode(bytes);
  if (bytes.includes(0)) return null;
  try {
    return new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch {
    const text = new TextDecoder("windows-1252").decode(bytes);
    return /[\x01-\x08\x0e-\x1a\x1c-\x1f]/.test(text) ? null : text;
  }
}

export function writeCsv(rows) {
  return rows.map((row) => row.map(quote).join(",") + "\r\n").join("");
}

// A cell that a spreadsheet would run as a formula becomes text. For cells that others wrote: numbers are left alone.
export function harmless(value) {
  const text = String(value);
  return /^[=+\-@\t\r]/.test(text) && !/^[+-]?[\d.]+(e[+-]?\d+)?$/i.test(text) ? `'${text}` : text;
}

function quote(value) {
  const text = String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
