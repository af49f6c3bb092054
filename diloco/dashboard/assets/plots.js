// The curves: uPlot draws them, in the page's colours; arrow keys read them value by value.
import { $, make, figure } from "/dom.js";

const colours = {};

export function readColours() {
  const probe = make("span");
  document.body.append(probe);
  for (const name of ["blue", "red", "green", "warn", "band", "line", "soft"]) {
    probe.style.color = `var(--${name})`;
    colours[name] = getComputedStyle(probe).color;
  }
  probe.remove();
}

const colour = (name) => () => colours[name];
const stepped = (u, ...rest) => uPlot.paths.stepped({ align: 1 })(u, ...rest);

function line(label, name, more = {}) {
  return { label, stroke: colour(name), name, width: 1.75, points: { show: false }, ...more };
}

function band(label) {
  const edge = { width: 0, points: { show: false }, stroke: colour("band"), silent: true };
  return [{ ...edge, label: "high" }, { ...edge, label: "low" }, line(label, "blue")];
}

const BAND = [{ series: [1, 2], fill: colour("band") }];
const padded = (list) => [...list, list.length ? list[list.length - 1] : null];

// What each plot has: its series, how its columns are made of the figures, and its y axis' unit.
export const PLOTS = {
  loss: {
    series: [...band("training"), line("held out", "red", {
      dash: [5, 4], points: { show: true, size: 6, fill: colour("red") }, spanGaps: true,
    })],
    bands: BAND,
    columns(figures) {
      const one = figures.loss?.[$("along").querySelector(":checked").value];
      if (!one) return null;
      return uPlot.join([[one.x, one.high, one.low, one.middle], [one.scored_x, one.scored]]);
    },
    along: (figures) => $("along").querySelector(":checked").value === "tokens"
      ? `tokens merged (${figures.loss.tokens_unit || "1"})` : figures.since,
  },
  throughput: {
    series: [line("trained", "blue", { paths: stepped }), line("merged", "red", { paths: stepped, dash: [6, 3] })],
    columns: (figures) => rates(figures.throughput),
    unit: (figures) => figures.throughput?.unit,
    zero: true,
  },
  traffic: {
    series: [line("up", "blue", { paths: stepped }), line("down", "red", { paths: stepped, dash: [6, 3] })],
    columns: (figures) => rates(figures.traffic),
    unit: (figures) => figures.traffic?.unit,
    zero: true,
  },
  staleness: {
    series: band("mean"),
    bands: BAND,
    columns({ staleness: one }) { return one && [one.x, one.high, one.low, one.mean]; },
    unit: () => "versions behind",
    zero: true,
  },
  phases: {
    series: ["open", "grace", "merge", "publish"].map((name, at) => line(name, ["blue", "warn", "green", "red"][at], {
      paths: stepped, dash: [[], [2, 2], [8, 3], [4, 2]][at],
    })),
    columns: ({ phases: one }) => one && [one.edges, ...["open", "grace", "merge", "publish"].map((name) => padded(one[name]))],
    unit: () => "s",
    zero: true,
  },
};

const rates = (one) => one && [one.edges, padded(one.first), padded(one.second)];

export class Plot {
  constructor(id, spec) {
    this.spec = spec;
    this.host = $(id);
    this.readout = make("p", { class: "readout" });
    this.canvas = make("div", { class: "canvas", tabindex: "0", role: "img" });
    this.canvas.setAttribute("aria-labelledby", `${id}-title`);
    this.empty = make("p", { class: "empty" }, "Nothing yet.");
    this.host.append(this.empty);
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    this.canvas.addEventListener("blur", () => this.plot?.setCursor({ left: -10, top: -10 }));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.host);
  }

  size() {
    const wide = this.host.closest(".wide") !== null;
    return { width: Math.max(200, this.host.clientWidth), height: wide ? 250 : 180 };
  }

  show(figures) {
    this.figures = figures;
    const columns = this.spec.columns(figures);
    if (!columns || !columns[0].length) return;
    if (this.plot) {
      this.plot.setData(columns);
    } else {
      this.host.replaceChildren(this.readout, this.canvas);
      this.plot = new uPlot(this.options(), columns, this.canvas);
    }
    this.tell();
  }

  options() {
    const axis = {
      stroke: colour("soft"), font: "11px system-ui, sans-serif", labelFont: "11px system-ui, sans-serif",
      grid: { stroke: colour("line"), width: 1 }, ticks: { stroke: colour("line"), width: 1, size: 4 },
    };
    const range = (u, low, high) => {
      if (low === null) return [0, 1];
      const room = 0.06 * (high - low || Math.abs(high) || 1);
      return [this.spec.zero ? 0 : low - room, high + room];
    };
    const along = () => (this.spec.along ?? ((figures) => figures.since))(this.figures);
    return {
      ...this.size(),
      series: [{}, ...this.spec.series],
      bands: this.spec.bands ?? [],
      axes: [{ ...axis, label: along(), labelSize: 18, size: 28 }, { ...axis, size: 46 }],
      scales: { x: { time: false }, y: { range } },
      legend: { show: false },
      cursor: { drag: { x: false, y: false, setScale: false }, points: { size: 6 } },
      hooks: { setCursor: [() => this.tell()] },
    };
  }

  // The values at the cursor, or else the newest: also what a screen reader is told.
  tell() {
    const { plot, spec } = this;
    if (!plot) return;
    const at = plot.cursor.left >= 0 ? plot.cursor.idx : null;
    const unit = spec.unit?.(this.figures) ?? "";
    const parts = [], words = [];
    plot.series.forEach((series, index) => {
      if (index === 0 || series.silent || series.label === "high" || series.label === "low") return;
      const values = plot.data[index];
      const last = at ?? values.findLastIndex((value) => value !== null && value !== undefined);
      const value = figure(values[last] ?? null);
      const mark = make("i");
      mark.style.color = colours[spec.series[index - 1].name];
      parts.push(make("span", {}, mark, `${series.label} `, make("b", {}, value)));
      words.push(`${series.label} ${value}`);
    });
    const where = at === null ? "newest" : `at ${figure(plot.data[0][at])}`;
    this.readout.replaceChildren(...parts, make("span", {}, [unit, where].filter(Boolean).join(", ")));
    const words_in_full = `${words.join(", ")} ${unit}, ${where}. Arrow keys move along.`;
    this.canvas.setAttribute("aria-label", words_in_full);
    this.canvas.removeAttribute("aria-labelledby");
  }

  move(event) {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || !this.plot) return;
    event.preventDefault();
    const x = this.plot.data[0], last = x.length - 1;
    const here = this.plot.cursor.left >= 0 ? this.plot.cursor.idx : last;
    const index = Math.min(last, Math.max(0, here + step));
    this.plot.setCursor({ left: this.plot.valToPos(x[index], "x"), top: 10 });
  }

  redraw() {
    if (!this.plot) return;
    this.plot.destroy();
    this.plot = null;
    this.show(this.figures);
  }
}
