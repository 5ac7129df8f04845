// Runs in the page, after everything is there, and leaves what it saw in data-probe.
const errors = [];
addEventListener("error", (event) => { errors.push(event.message); });
addEventListener("load", () => {
  const root = document.documentElement;
  const inside = (one, other) =>
    one.left >= other.left - 1 && one.right <= other.right + 1 && one.top >= other.top - 1 && one.bottom <= other.bottom + 1;
  const meet = (one, other) =>
    Math.min(one.right, other.right) - Math.max(one.left, other.left) > 1 &&
    Math.min(one.bottom, other.bottom) - Math.max(one.top, other.top) > 1;
  const overlaps = [], outside = [];
  for (const chart of document.querySelectorAll("svg.chart")) {
    const frame = chart.getBoundingClientRect();
    const words = [...chart.querySelectorAll("text")].filter((text) => text.textContent.trim());
    const boxes = words.map((text) => text.getBoundingClientRect());
    const name = (index) => `${chart.getAttribute("aria-label")}: ${words[index].textContent.trim()}`;
    boxes.forEach((box, index) => {
      if (!inside(box, frame)) outside.push(name(index));
      for (let other = 0; other < index; other++) {
        if (meet(box, boxes[other])) overlaps.push(`${name(index)} / ${words[other].textContent.trim()}`);
      }
    });
  }
  for (const cell of document.querySelectorAll("dt, dd, th, td")) {
    if (cell.scrollWidth > cell.clientWidth + 1) outside.push(cell.textContent);
  }
  const found = {
    errors,
    titles: document.querySelectorAll(".tips title").length,
    sections: [...document.querySelectorAll("section")].map((section) => section.id),
    charts: [...document.querySelectorAll("figure")].map((figure) => figure.id),
    requests: performance.getEntriesByType("resource").map((entry) => entry.name).filter((name) => !name.startsWith("data:")),
    wider: root.scrollWidth - innerWidth,
    overlaps,
    outside,
  };
  root.dataset.probe = JSON.stringify(found);
});
