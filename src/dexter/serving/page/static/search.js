// The list follows what is typed; the address follows too, so that a search can be shared.
import { fetchPage, swapRegions } from "./swap.js";

const form = document.querySelector("[data-search]");
let timer = 0;
let underWay = null;

form.addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    underWay?.abort();
    underWay = new AbortController();
    const address = `${form.action}?${new URLSearchParams(new FormData(form))}`;
    try {
      swapRegions(await fetchPage(address, { signal: underWay.signal }));
      history.replaceState(null, "", address);
    } catch {
      // The button still sends the form.
    }
  }, 200);
});
