// The server renders everything: fetch the page again and replace the parts marked data-region.

export async function fetchPage(url, options) {
  const response = await fetch(url, options);
  if (!(response.headers.get("content-type") ?? "").startsWith("text/html")) {
    const problem = await response.json().catch(() => ({}));
    throw new Error(problem.detail ?? `The service answered ${response.status}.`);
  }
  // Scripts in a parsed document do not run.
  const page = new DOMParser().parseFromString(await response.text(), "text/html");
  const problem = page.querySelector("[data-problem] [role=alert]");
  if (problem) throw new Error(problem.textContent);
  return page;
}

export function swapRegions(page) {
  const focused = document.activeElement?.dataset?.key;
  const open = new Set([...document.querySelectorAll("[data-region] details[open]")].map((each) => each.parentElement.id));
  for (const region of document.querySelectorAll("[data-region]")) {
    const fresh = page.getElementById(region.id);
    if (!fresh || fresh.innerHTML === region.innerHTML) continue;
    region.replaceChildren(...document.adoptNode(fresh).childNodes);
    if (open.has(region.id)) region.querySelector("details")?.setAttribute("open", "");
  }
  if (focused) [...document.querySelectorAll("[data-key]")].find((each) => each.dataset.key === focused)?.focus();
}
