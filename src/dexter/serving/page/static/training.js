// Fetch the curves of a training run every two seconds, and show their values under the pointer.
import { fetchPage, swapRegions } from "./swap.js";

const WAIT = 2000;
const HEIGHT = 40; // of the plot's box; its width is 100

async function refresh() {
  if (!document.querySelector("[data-live-run]")) return;
  try {
    if (!document.hidden && !document.querySelector(".plot .tip:not([hidden])")) swapRegions(await fetchPage(location.href));
  } catch {
    // Try again in two seconds.
  }
  setTimeout(refresh, WAIT);
}
setTimeout(refresh, WAIT);

function closest(line, x) {
  const points = line.getAttribute("points").split(" ").map((pair) => pair.split(",").map(Number));
  return points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best));
}

function tell(plot, event) {
  const svg = plot.querySelector("svg");
  const box = svg.getBoundingClientRect();
  const x = (100 * (event.clientX - box.left)) / box.width;
  const [low, high, steps] = ["low", "high", "steps"].map((name) => Number(plot.dataset[name]));
  const lines = [...svg.querySelectorAll("polyline")].map((line) => [line.dataset.name, closest(line, x)]);
  const values = lines.map(([name, [, y]]) => `${name} ${Number((high - (y / HEIGHT) * (high - low)).toPrecision(3))}`);
  const tip = plot.querySelector(".tip");
  tip.hidden = false;
  const at = lines[0][1][0];
  tip.textContent = `step ${Math.round((at / 100) * steps).toLocaleString("en")}: ${values.join(", ")}`;
  const left = box.left - plot.getBoundingClientRect().left + (at / 100) * box.width;
  tip.style.left = `${Math.max(0, Math.min(left - tip.offsetWidth / 2, plot.clientWidth - tip.offsetWidth))}px`;
}

document.addEventListener("pointermove", (event) => {
  const plot = event.target.closest(".plot");
  for (const tip of document.querySelectorAll(".plot .tip")) tip.hidden ||= tip.parentElement !== plot;
  if (plot) tell(plot, event);
});
