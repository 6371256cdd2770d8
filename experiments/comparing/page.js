"use strict";
// Sorting, filtering, the difference of two configs, and figures that are drawn when they come into view.
const data = JSON.parse(document.getElementById("data").textContent);
const root = document.documentElement;
const all = (selector, within = document) => [...within.querySelectorAll(selector)];

const look = () => {
  const style = getComputedStyle(root);
  const text = style.getPropertyValue("--text").trim(), line = style.getPropertyValue("--line").trim();
  const axis = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true };
  return { text, axis };
};
const layout = (given) => {
  const { text, axis } = look();
  const small = window.innerWidth < 640;
  return {
    ...given, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: text, size: 12 },
    xaxis: { ...given.xaxis, ...axis }, yaxis: { ...given.yaxis, ...axis },
    margin: { l: 55, r: 10, t: 10, b: 45 }, hoverlabel: { align: "left" },
    legend: small ? { orientation: "h", y: -0.25, maxheight: 0.3, font: { size: 9 } } : { font: { size: 10 } },
  };
};
const drawn = new Set();
const draw = (element) => {
  const figure = data.figures[element.id];
  Plotly.newPlot(element, figure.data, layout(figure.layout), { responsive: true, displayModeBar: false });
  drawn.add(element);
  show(element);
};
const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) {
    if (entry.isIntersecting && !drawn.has(entry.target)) draw(entry.target);
  }
}, { rootMargin: "200px" });
all(".plot").forEach((element) => watcher.observe(element));

const filter = document.getElementById("filter");
const wanted = (label) => filter.value.toLowerCase().split(/\s+/).every((word) => label.toLowerCase().includes(word));
const show = (element) => {
  const traces = element.data;
  if (traces.length) Plotly.restyle(element, { visible: traces.map((trace) => wanted(trace.meta)) });
};
filter.addEventListener("input", () => {
  all("[data-label]").forEach((element) => { element.hidden = !wanted(element.dataset.label); });
  drawn.forEach(show);
});

const group = document.getElementById("group");
group.addEventListener("change", () => {
  all(".group").forEach((section) => { section.hidden = section.dataset.group !== group.value; });
});

for (const head of all("table.runs th")) {
  head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") !== "descending";
    const column = [...head.parentElement.children].indexOf(head);
    const body = head.closest("table").tBodies[0];
    const value = (row) => row.cells[column].dataset.value;
    const compare = (a, b) => {
      // What has no value stands last, whichever way.
      if (a === "" || b === "") return (a === "") - (b === "");
      const difference = column ? Number(a) - Number(b) : b.localeCompare(a);
      return down ? -difference : difference;
    };
    body.append(...[...body.rows].sort((a, b) => compare(value(a), value(b))));
    all("th", head.parentElement).forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
  });
}

const first = document.getElementById("first"), second = document.getElementById("second");
const differ = () => {
  const { names, values, same } = data.options;
  const [a, b] = [values[first.value], values[second.value]];
  const rows = names.map((name, i) => [name, a[i], b[i]]).filter((row) => row[1] !== row[2]);
  document.getElementById("difference").replaceChildren(...rows.map((row) => {
    const line = document.createElement("tr");
    line.append(...row.map((text) => { const cell = document.createElement("td"); cell.textContent = text; return cell; }));
    return line;
  }));
  document.getElementById("same").textContent = `${rows.length} options differ, ${same + names.length - rows.length} are the same.`;
};
second.selectedIndex = Math.min(1, second.options.length - 1);
for (const select of [first, second]) select.addEventListener("change", differ);
differ();

const paint = (dark) => {
  root.classList.toggle("dark", dark);
  for (const element of drawn) Plotly.relayout(element, layout(data.figures[element.id].layout));
};
const system = matchMedia("(prefers-color-scheme: dark)");
system.addEventListener("change", (event) => paint(event.matches));
document.getElementById("theme").addEventListener("click", () => paint(!root.classList.contains("dark")));
paint(system.matches);
