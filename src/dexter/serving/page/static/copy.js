// Copy a part of the page to the clipboard.
document.addEventListener("click", async (event) => {
  const button = event.target.closest("[data-copy]");
  if (!button) return;
  const source = document.getElementById(button.dataset.copy);
  try {
    await navigator.clipboard.writeText(source.textContent);
    tell(button, "Copied");
  } catch {
    // No clipboard over plain HTTP: select the text, so that it can be copied by hand.
    getSelection().selectAllChildren(source);
    tell(button, "Selected");
  }
});

function tell(button, what) {
  button.textContent = what;
  const announcer = document.getElementById("announcer");
  if (announcer) announcer.textContent = what;
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
