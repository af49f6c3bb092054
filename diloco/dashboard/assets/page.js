// Shows what the server sends: "now" once a second, "figures" when they have changed, and learners
// page by page. Whatever comes from a run becomes text, never markup.
import { $, make, count, bytes, number, figure, age } from "/dom.js";
import { showFacts, showAlerts, showRounds, showEvents, laneOf } from "/lists.js";
import { PLOTS, Plot, readColours } from "/plots.js";

const SILENT_MS = 10_000;
const PER_PAGE = 40;
const known = { now: null, asOf: 0, heard: 0, page: 0, lost: false };

// ---- Learners and settings, which are asked for

function showLearners(found) {
  known.page = found.page;
  const fine = new Set(["training", "left", "done"]);
  $("lanes").tBodies[0].replaceChildren(...found.rows.map((one) => make("tr", {},
    make("td", { class: "text name", title: one.name }, one.name),
    make("td", { class: `text ${one.state === "training" ? "training" : fine.has(one.state) ? "" : "amiss"}` }, one.state),
    make("td", { class: "lane" }, laneOf(one)),
    make("td", {}, figure(one.loss)),
    make("td", {}, number(one.tokens_per_s)),
    make("td", {}, figure(one.staleness)),
    make("td", {}, count(one.rejected)),
    make("td", {}, bytes(one.up)),
    make("td", {}, bytes(one.down)),
    make("td", {}, age(one.heard_s)))));
  if (!found.rows.length) {
    const why = found.of ? "No learner of that name." : "No learner has joined yet.";
    $("lanes").tBodies[0].append(make("tr", {}, make("td", { class: "text", colspan: "10" }, why)));
  }
  const first = found.page * PER_PAGE;
  const some = found.pages > 1 ? `${first + 1}–${first + found.rows.length} of ${count(found.found)}` : `${count(found.found)} of ${count(found.of)}`;
  $("page").textContent = some;
  $("previous").disabled = found.page === 0;
  $("next").disabled = found.page >= found.pages - 1;
}

let asking = false;

async function askLearners(page = known.page) {
  if (asking) return;
  asking = true;
  try {
    const query = new URLSearchParams({ page, find: $("find").value.slice(0, 60) });
    const answer = await fetch(`/learners?${query}`);
    if (answer.ok) showLearners(await answer.json());
  } catch { /* The stream says so. */ } finally { asking = false; }
}

async function askSettings() {
  if (!$("settings").open) return;
  const answer = await fetch("/settings").catch(() => null);
  const { rows = [] } = answer?.ok ? await answer.json() : {};
  $("settings").querySelector("tbody").replaceChildren(...rows.map((row) =>
    make("tr", {}, ...row.map((cell) => make("td", { class: "text" }, cell)))));
}

// ---- Events of the server

const KINDS = { ended: "", "under way": "good", "waiting for learners": "warn", paused: "warn", stopping: "warn" };

const timeOf = (atS) => `${new Date(1000 * atS).toISOString().slice(11, 19)} UTC`;

function showState() {
  const now = known.now;
  const silent = known.lost || (known.heard && Date.now() - known.heard > SILENT_MS);
  const pill = $("state"), notice = $("notice");
  let word = now?.state ?? (now ? "reading the tape" : "connecting"), text = "", kind = KINDS[word] ?? "warn";
  if (now?.reading) {
    const [done, total] = now.reading;
    text = `Reading the tape: ${count(done)} of about ${count(total)} messages.`;
  }
  if (now && now.current === false) {
    word = "out of touch";
    kind = "bad";
    text = `The bus does not answer: what is shown is of ${timeOf(known.asOf)}. This page tries on.`;
  }
  if (now?.failure) [word, kind, text] = ["not followed", "bad", `The run is not followed any more: ${now.failure}.`];
  if (silent) {
    [word, kind] = ["disconnected", "bad"];
    const shown = known.asOf ? `: what is shown is of ${timeOf(known.asOf)}` : "";
    text = `The server of this page does not answer${shown}.${now ? ` If it has ended, start it again: ${now.again}` : ""}`;
  }
  if (pill.textContent !== word) pill.textContent = word;
  pill.className = `pill ${kind}`;
  if (notice.textContent !== text) notice.textContent = text;
  notice.className = text ? `shown ${kind}` : "";
  document.body.classList.toggle("old", Boolean(silent || now?.failure || now?.current === false));
}

function showNow(now) {
  known.now = now;
  document.title = `${now.run} · diloco`;
  $("run").textContent = now.run;
  if (now.state === undefined) return;
  known.asOf = now.as_of_s;
  $("progress").max = now.steps;
  $("progress").value = Math.min(now.step, now.steps);
  const going = now.state === "ended" ? "" : ` · ${number(now.tokens_per_s)} tokens/s · ${figure(now.versions_per_min)} versions a minute`;
  const limit = now.tape_limit_bytes ? ` of ${bytes(now.tape_limit_bytes)}` : "";
  const states = Object.entries(now.states).map(([state, many]) => `${count(many)} ${state}`).join(", ");
  $("steps").textContent = `step ${count(now.step)} of ${count(now.steps)}${going} · tape ${bytes(now.tape_bytes)}${limit}${states ? ` · learners: ${states}` : ""}`;
  showAlerts(now);
  showRounds(now);
}

function showFigures(figures) {
  $("subtitle").textContent = [figures.subtitle, ...figures.warnings].join(" ");
  showFacts(figures.facts);
  for (const plot of plots) plot.show(figures);
  showEvents(figures);
  askLearners();
}

let stream = null;

function connect() {
  if (stream || document.hidden) return;
  stream = new EventSource("/events");
  const heard = (show) => (event) => {
    known.heard = Date.now();
    known.lost = false;
    show(JSON.parse(event.data));
    showState();
  };
  stream.addEventListener("now", heard(showNow));
  stream.addEventListener("figures", heard(showFigures));
  stream.addEventListener("alive", heard(() => {}));
  stream.addEventListener("error", () => {
    known.lost = true;
    showState();
    if (stream.readyState !== EventSource.CLOSED) return;
    disconnect();
    setTimeout(connect, 3000);
  });
}

function disconnect() {
  stream?.close();
  stream = null;
}

// ---- Controls

let chosen = document.documentElement.dataset.theme ?? "auto";
const plots = [];

function recolour() {
  readColours();
  for (const plot of plots) plot.redraw();
}

for (const input of document.querySelectorAll("#theme input")) {
  input.checked = input.value === chosen;
  input.addEventListener("change", () => {
    chosen = input.value;
    if (chosen === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = chosen;
    try { localStorage.setItem("theme", chosen); } catch { /* Storage may be off. */ }
    recolour();
  });
}
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
$("along").addEventListener("change", () => plots[0].redraw());
$("find").addEventListener("input", () => askLearners(0));
$("previous").addEventListener("click", () => askLearners(known.page - 1));
$("next").addEventListener("click", () => askLearners(known.page + 1));
$("settings").addEventListener("toggle", askSettings);
// A page that nobody sees costs nothing, and takes no connection from those that are seen.
document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));

readColours();
for (const [id, spec] of Object.entries(PLOTS)) plots.push(new Plot(id, spec));
setInterval(showState, 1000);
connect();
