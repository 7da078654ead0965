// Show a label's text by hover, tap or arrow keys, choose bands, find labels. Without this script the browser shows titles.
const svg = document.querySelector(".plane svg");
const tip = document.getElementById("tip");
const find = document.getElementById("find");
const hits = document.getElementById("hits");
const share = (circle, name) => parseFloat(circle.getAttribute(name)) / 100;
const points = [...svg.querySelectorAll("circle")].map((circle) => {
  const title = circle.querySelector("title");
  const text = title.textContent;
  title.remove(); // or two tooltips would show
  return { circle, text, lower: `${circle.dataset.id} ${text}`.toLowerCase(), x: share(circle, "cx"), y: share(circle, "cy") };
});
const NEAR = 24; // pixels
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
const sampled = Number(svg.dataset.drawn) < Number(svg.dataset.total);
let marked = null;
let size = svg.getBoundingClientRect();
new ResizeObserver(() => (size = svg.getBoundingClientRect())).observe(svg);

function best(cost) {
  let [chosen, least] = [null, Infinity];
  for (const point of points) {
    if (point.hidden) continue;
    const its = cost(point);
    if (its < least) [chosen, least] = [point, its];
  }
  return chosen;
}

// Position in pixels.
function place(point) {
  return [point.x * size.width, point.y * size.height];
}

function nearest(x, y) {
  return best((point) => {
    const [left, top] = place(point);
    const distance = Math.hypot(left - x, top - y);
    return distance < NEAR ? distance : Infinity;
  });
}

// The next point in a direction: near, and not far to the side.
function beside(from, [right, down]) {
  const [x, y] = place(from);
  return best((point) => {
    const [left, top] = place(point);
    const ahead = (left - x) * right + (top - y) * down;
    const aside = Math.abs((left - x) * down) + Math.abs((top - y) * right);
    return point !== from && ahead > 0 ? ahead + 2 * aside : Infinity;
  });
}

function mark(point) {
  marked?.circle.classList.remove("marked");
  marked = point;
  tip.hidden = !point;
  if (!point) return;
  point.circle.classList.add("marked");
  tip.textContent = point.text;
  const [x, y] = place(point);
  const below = y + 14 + tip.offsetHeight <= size.height;
  // Set by script, not in the markup: the policy allows that.
  tip.style.left = `${Math.max(0, Math.min(x + 10, size.width - tip.offsetWidth))}px`;
  tip.style.top = `${below ? y + 14 : y - 10 - tip.offsetHeight}px`;
}

function open(point) {
  const model = new URLSearchParams(location.search).get("model");
  location.href = `labels?${new URLSearchParams({ label: point.circle.dataset.id, ...(model ? { model } : {}) })}`;
}

function look() {
  const wanted = find.value.trim().toLowerCase();
  const found = points.filter((point) => wanted && point.lower.includes(wanted));
  svg.classList.toggle("searched", Boolean(wanted));
  const among = new Set(found);
  for (const point of points) point.circle.classList.toggle("hit", among.has(point));
  const where = sampled ? " of the labels drawn; Enter looks among all" : "";
  hits.textContent = wanted ? `${found.length.toLocaleString("en")} found${where}` : "";
  mark(found[0] ?? null);
}

function under(event) {
  const box = svg.getBoundingClientRect();
  return nearest(event.clientX - box.left, event.clientY - box.top);
}

svg.addEventListener("pointermove", (event) => {
  const found = under(event);
  if (found !== marked) mark(found);
});
svg.addEventListener("pointerleave", (event) => event.pointerType === "mouse" && mark(null));
svg.addEventListener("click", (event) => {
  const found = under(event);
  if (event.pointerType !== "mouse" && found !== marked) return mark(found); // a finger cannot hover: the second tap opens
  if (found) open(found);
});
svg.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && marked) return open(marked);
  const arrow = ARROWS[event.key];
  if (!arrow) return;
  event.preventDefault();
  const next = marked ? beside(marked, arrow) : best((point) => Math.hypot(point.x - 0.5, point.y - 0.5));
  if (next) mark(next);
  if (marked) hits.textContent = marked.text;
});
svg.addEventListener("blur", () => mark(null));
for (const box of document.querySelectorAll("[data-band]")) {
  box.addEventListener("change", () => {
    for (const point of points) {
      if (!point.circle.classList.contains(box.dataset.band)) continue;
      point.hidden = !box.checked;
      point.circle.toggleAttribute("hidden", point.hidden);
    }
  });
}
find.addEventListener("input", look);

svg.setAttribute("tabindex", "0");
svg.setAttribute("role", "application");
svg.setAttribute("aria-label", `Map of ${points.length} labels`);
svg.setAttribute("aria-describedby", "keys");
document.getElementById("keys").hidden = false;
