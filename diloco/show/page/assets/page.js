// What a page does with its figures, served or kept: values under the pointer or the arrow keys,
// files of a figure, light and dark. Whatever comes from a run becomes text, never markup.
"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const figure = (value) => (value === null || value === undefined ? "–" : String(Number(value.toPrecision(4))));
  const dataOf = (section) => JSON.parse(section.querySelector("script[type='application/json']").textContent);

  function place(element) {
    const section = element.closest("section"), panels = [...section.querySelectorAll(".panel")];
    const panel = element.closest(".panel");
    return { section, panel, data: dataOf(section)[panels.indexOf(panel)] };
  }

  // ---- Values: scales are [low, high, begin, end, logarithmic], as they were drawn

  function inverse([low, high, begin, end, log], at) {
    const share = (at - begin) / (end - begin);
    return log ? 10 ** (Math.log10(low) + share * Math.log10(high / low)) : low + share * (high - low);
  }

  function forward([low, high, begin, end, log], value) {
    const share = log ? Math.log10(value / low) / Math.log10(high / low) : (value - low) / (high - low);
    return begin + Math.min(Math.max(share, 0), 1) * (end - begin);
  }

  const rowOf = (data, mark, at) => data.names[Math.round((mark.low[at] + mark.high[at]) / 2)] ?? "";

  function said(data, mark, x, y) {
    if (mark.kind === "boxes") {
      const at = mark.x.findIndex((from, index) => from <= x && x <= mark.to[index]
        && Math.min(mark.low[index], mark.high[index]) <= y && y <= Math.max(mark.low[index], mark.high[index]));
      if (at < 0) return null;
      const where = [rowOf(data, mark, at), mark.name].filter(Boolean).join(": ");
      if (mark.shade) return `${where} ${figure(mark.shade[at])}`;
      return `${where} ${figure(mark.x[at])} to ${figure(mark.to[at])}${data.names.length ? "" : `, ${figure(mark.high[at] - mark.low[at])}`}`;
    }
    if (!mark.name || (mark.kind !== "line" && mark.kind !== "steps")) return null;
    let at = mark.x.findIndex((from) => from > x) - (mark.kind === "steps" ? 1 : 0);
    if (at < 0) at = mark.x.length - 1;
    if (mark.kind === "line" && at > 0 && x - mark.x[at - 1] < mark.x[at] - x) at -= 1;
    return `${mark.name} ${figure(mark.y[at])}`;
  }

  function read({ section, panel, data }, x, y) {
    const words = data.marks.map((mark) => said(data, mark, x, y)).filter(Boolean);
    section.querySelector(".readout").textContent = [`${data.x || "at"} ${figure(x)}`, ...words].join(" · ");
    const svg = panel.querySelector("svg");
    const [, , begin, end] = data.down;
    const cursor = svg.querySelector(".cursor") ?? svg.appendChild(document.createElementNS(SVG, "path"));
    cursor.setAttribute("class", "cursor");
    cursor.setAttribute("d", `M${forward(data.across, x)} ${Math.min(begin, end)}V${Math.max(begin, end)}`);
    panel.dataset.x = x;
    panel.dataset.y = y;
  }

  document.addEventListener("pointermove", (event) => {
    const panel = event.target.closest?.(".panel");
    if (!panel) return;
    const found = place(panel), svg = panel.querySelector("svg"), box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const [x, y] = [(event.clientX - box.left) * scale, (event.clientY - box.top) * scale];
    const [, , begin, end] = found.data.across;
    if (x >= begin && x <= end) read(found, inverse(found.data.across, x), inverse(found.data.down, y));
  });

  const STEPS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1], Home: [-Infinity, 0], End: [Infinity, 0] };

  document.addEventListener("keydown", (event) => {
    const panel = event.target.closest?.(".panel"), step = STEPS[event.key];
    if (!panel || !step) return;
    event.preventDefault();
    const found = place(panel), { across, down, marks } = found.data;
    const curve = marks.filter((mark) => mark.name && ["line", "steps"].includes(mark.kind)).sort((a, b) => b.x.length - a.x.length)[0];
    const stops = curve?.x ?? Array.from({ length: 101 }, (_, index) => inverse(across, across[2] + (index / 100) * (across[3] - across[2])));
    const now = panel.dataset.x === undefined ? Infinity : Number(panel.dataset.x);
    let at = stops.findIndex((x) => x >= now - 1e-9);
    if (at < 0) at = stops.length - 1;
    const row = Math.round(Number(panel.dataset.y ?? 0)) + step[1];
    const to = stops[Math.min(Math.max(at + step[0], 0), stops.length - 1)];
    read(found, to, Math.min(Math.max(row, Math.ceil(down[0])), Math.floor(down[1])));
  });

  document.addEventListener("click", (event) => {
    const at = event.target.dataset?.at;
    if (at === undefined) return;
    for (const panel of document.querySelectorAll(`${event.target.hash} .panel`)) read(place(panel), Number(at), 0);
  });

  // ---- Files of a figure

  function whole(section) {
    const outer = document.createElementNS(SVG, "svg");
    let wide = 0, tall = 0;
    for (const one of section.querySelectorAll(".panel svg")) {
      const inner = one.cloneNode(true), { width, height } = one.viewBox.baseVal;
      inner.querySelector(".cursor")?.remove();
      for (const [name, value] of Object.entries({ x: wide, y: 0, width, height })) inner.setAttribute(name, value);
      outer.append(inner);
      wide += width;
      tall = Math.max(tall, height);
    }
    const paper = document.createElementNS(SVG, "rect");
    for (const [name, value] of Object.entries({ width: wide, height: tall, fill: "#fff" })) paper.setAttribute(name, value);
    outer.prepend(paper);
    for (const [name, value] of Object.entries({ width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}` })) outer.setAttribute(name, value);
    return { svg: new Blob([new XMLSerializer().serializeToString(outer)], { type: "image/svg+xml" }), wide, tall };
  }

  async function painted(section) {
    const { svg, wide, tall } = whole(section), url = URL.createObjectURL(svg);
    try {
      const image = new Image();
      image.src = url;
      await image.decode();
      const canvas = Object.assign(document.createElement("canvas"), { width: 2 * wide, height: 2 * tall });
      canvas.getContext("2d").drawImage(image, 0, 0, canvas.width, canvas.height);
      return await new Promise((done) => canvas.toBlob(done, "image/png"));
    } finally { URL.revokeObjectURL(url); }
  }

  const COLUMNS = ["x", "to", "y", "low", "high", "shade"];
  // Quotes keep a name in its cell, and a mark before it from being a formula in a spreadsheet.
  const cell = (text) => `"${(/^[=+\-@\t\r]/.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;

  function table(section) {
    const rows = [["panel", "series", "row", ...COLUMNS].join(",")];
    for (const data of dataOf(section)) for (const mark of data.marks) {
      for (let at = 0; at < mark.x.length; at += 1) {
        const row = data.names.length && mark.low ? rowOf(data, mark, at) : "";
        rows.push([cell(data.title), cell(mark.name), cell(row), ...COLUMNS.map((name) => mark[name]?.[at] ?? "")].join(","));
      }
    }
    return new Blob([`${rows.join("\n")}\n`], { type: "text/csv" });
  }

  const FILES = { SVG: (section) => whole(section).svg, PNG: painted, CSV: table };

  document.addEventListener("click", async (event) => {
    const kind = event.target.dataset?.save;
    if (!kind) return;
    const section = event.target.closest("section"), link = document.createElement("a");
    link.href = URL.createObjectURL(await FILES[kind](section));
    link.download = `${section.id}.${kind.toLowerCase()}`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  });

  // ---- Light and dark

  const chosen = document.documentElement.dataset.theme ?? "auto";
  for (const input of document.querySelectorAll("#theme input")) {
    input.checked = input.value === chosen;
    input.addEventListener("change", () => {
      if (input.value === "auto") delete document.documentElement.dataset.theme;
      else document.documentElement.dataset.theme = input.value;
      try { localStorage.setItem("theme", input.value); } catch { /* Storage may be off. */ }
    });
  }
})();
