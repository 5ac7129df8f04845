"use strict";
// Exact values under the pointer, and with the arrow keys once a chart has the focus. Without scripts the browser
// shows the same texts by itself. Errors are left where a test finds them.
addEventListener("error", (event) => { document.documentElement.dataset.error = event.message; });

const box = document.getElementById("tip");
const texts = new Map();
let shown = null;

function show(rect, x, y) {
  if (shown !== rect) {
    shown?.classList.remove("on");
    shown = rect;
    rect.classList.add("on");
    box.textContent = texts.get(rect);
    box.hidden = false;
  }
  const right = x + 14 + box.offsetWidth > innerWidth ? x - 14 - box.offsetWidth : x + 14;
  const below = y + 14 + box.offsetHeight > innerHeight ? y - 14 - box.offsetHeight : y + 14;
  box.style.left = `${Math.max(4, right)}px`;
  box.style.top = `${Math.max(4, below)}px`;
}

function hide() {
  shown?.classList.remove("on");
  shown = null;
  box.hidden = true;
}

function walk(event, rects) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (event.key === "Escape") hide();
  if (!step || !rects.length) return;
  event.preventDefault();
  const next = rects[(rects.indexOf(shown) + step + rects.length) % rects.length];
  const place = next.getBoundingClientRect();
  show(next, place.right, place.top + place.height / 2);
}

for (const chart of document.querySelectorAll("svg.chart")) {
  const rects = [...chart.querySelectorAll(".tips rect")];
  for (const rect of rects) {
    texts.set(rect, rect.querySelector("title").textContent);
    rect.replaceChildren();
    rect.addEventListener("pointermove", (event) => show(rect, event.clientX, event.clientY));
  }
  chart.addEventListener("pointerleave", hide);
  chart.addEventListener("keydown", (event) => walk(event, rects));
  chart.addEventListener("blur", hide);
}
addEventListener("beforeprint", () => { for (const part of document.querySelectorAll("details")) part.open = true; });
document.documentElement.dataset.ready = String(texts.size);
