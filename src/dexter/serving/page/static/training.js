// While a run is going its curves are fetched again every two seconds.
import { fetchPage, swapRegions } from "./swap.js";

const WAIT = 2000;

async function refresh() {
  if (!document.querySelector("[data-live-run]")) return;
  try {
    if (!document.hidden) swapRegions(await fetchPage(location.href));
  } catch {
    // The service may be back in two seconds.
  }
  setTimeout(refresh, WAIT);
}
setTimeout(refresh, WAIT);
