// Update the list while typing, open a label beside it, and keep the address up to date, so that it can be shared.
import { fetchPage, swapRegions } from "./swap.js";

const form = document.querySelector("[data-search]");
const listing = document.getElementById("listing");
let timer = 0;
let underWay = null;

async function show(address, remember) {
  clearTimeout(timer);
  underWay?.abort();
  const mine = (underWay = new AbortController());
  listing.setAttribute("aria-busy", "true");
  try {
    const page = await fetchPage(address, { signal: mine.signal });
    swapRegions(page);
    document.title = page.title;
    remember?.(address);
    return true;
  } catch (error) {
    // The browser then follows the link or the button itself.
    return error.name === "AbortError";
  } finally {
    if (underWay === mine) listing.removeAttribute("aria-busy");
  }
}

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(() => {
    const address = `${form.action}?${new URLSearchParams(new FormData(form))}`;
    show(address, (shown) => history.replaceState(null, "", shown));
  }, 200);
});
document.addEventListener("click", async (event) => {
  const link = event.target.closest("a[data-swap]");
  if (!link || event.button || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey) return;
  event.preventDefault();
  if (!(await show(link.href, (shown) => history.pushState(null, "", shown)))) location.href = link.href;
  if (link.dataset.swap === "page") form.scrollIntoView();
  const title = link.dataset.swap === "label" && document.getElementById("detail-title");
  title?.focus?.({ preventScroll: true });
  title?.scrollIntoView?.({ block: "nearest" });
});
addEventListener("popstate", () => {
  form.elements.q.value = new URLSearchParams(location.search).get("q") ?? "";
  show(location.href);
});
