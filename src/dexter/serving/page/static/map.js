// Hover or tap for the nearest label's text, choose bands, find labels. Without this script the browser shows titles.
const svg = document.querySelector(".plane svg");
const tip = document.getElementById("tip");
const find = document.getElementById("find");
const hits = document.getElementById("hits");
const points = [...svg.querySelectorAll("circle")].map((circle) => {
  const title = circle.querySelector("title");
  const text = title.textContent;
  title.remove(); // else two tips would show
  return { circle, text, lower: text.toLowerCase(), x: +circle.getAttribute("cx"), y: +circle.getAttribute("cy") };
});
const NEAR = 2.5;
let marked = null;

function nearest(x, y) {
  let best = null;
  let least = NEAR * NEAR;
  for (const point of points) {
    if (point.hidden) continue;
    const distance = (point.x - x) ** 2 + (point.y - y) ** 2;
    if (distance < least) [best, least] = [point, distance];
  }
  return best;
}

function mark(point) {
  marked?.circle.classList.remove("marked");
  marked = point;
  tip.hidden = !point;
  if (!point) return;
  point.circle.classList.add("marked");
  tip.textContent = point.text;
  const plane = svg.parentElement.getBoundingClientRect();
  const place = point.circle.getBoundingClientRect();
  const left = Math.min(place.left - plane.left + 12, plane.width - tip.offsetWidth - 4);
  tip.style.left = `${Math.max(0, left)}px`; // set by script, not in the markup: the policy allows that
  tip.style.top = `${place.bottom - plane.top + 6}px`;
}

svg.addEventListener("pointermove", (event) => {
  const place = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  const found = nearest(place.x, place.y);
  if (found !== marked) mark(found);
});
svg.addEventListener("pointerleave", () => mark(null));
for (const box of document.querySelectorAll("[data-band]")) {
  box.addEventListener("change", () => {
    for (const point of points) {
      if (!point.circle.classList.contains(box.dataset.band)) continue;
      point.hidden = !box.checked;
      point.circle.toggleAttribute("hidden", point.hidden);
    }
  });
}
find.addEventListener("input", () => {
  const wanted = find.value.trim().toLowerCase();
  const found = points.filter((point) => wanted && point.lower.includes(wanted));
  svg.classList.toggle("searched", Boolean(wanted));
  for (const point of points) point.circle.classList.toggle("hit", found.includes(point));
  hits.textContent = wanted ? `${found.length} found${found.length ? `: ${found[0].text}` : ""}` : "";
  mark(found[0] ?? null);
});
