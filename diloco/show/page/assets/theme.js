// Before anything is drawn: the colours that were chosen here last, or the system's.
"use strict";
(() => {
  let chosen = "auto";
  try { chosen = localStorage.getItem("theme") || "auto"; } catch { /* Storage may be off. */ }
  if (["light", "dark"].includes(chosen)) document.documentElement.dataset.theme = chosen;
})();
