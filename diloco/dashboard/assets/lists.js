// Facts, alerts, rounds and lanes, as lists and tables.
import { $, make, shape, strip, count, figure, age } from "/dom.js";

export function showFacts(facts) {
  $("facts").replaceChildren(...facts.map((fact) => make("div", {},
    make("dt", {}, fact.name), make("dd", {}, fact.value, make("small", {}, fact.note)))));
}

export function showAlerts(now) {
  const list = (now.alerts ?? []).map((alert) => {
    const parts = [make("b", {}, alert.severity), ` ${alert.about}: ${alert.sentence}`];
    if (alert.advice) parts.push(make("span", { class: "note" }, ` ${alert.advice}`));
    if (alert.runbook) parts.push(" ", make("a", { href: `/runbooks/${alert.runbook}` }, `Runbook: ${alert.runbook.replace(".md", "")}`));
    return make("li", { class: alert.severity }, ...parts);
  });
  const more = (now.alerts_of ?? 0) - list.length;
  if (more > 0) list.push(make("li", {}, `… and ${count(more)} more`));
  $("alerts").replaceChildren(...list);
}

function roundsOf(now, fragment, span) {
  const rounds = now.rounds.filter((round) => round[0] === fragment.fragment);
  const place = (ago) => 1000 * (1 - Math.min(Math.max(ago / span, 0), 1));
  const drawn = strip(`${rounds.length} newest rounds, last version ${age(fragment.version_s)} ago`);
  for (const [, version, inputs, opened, quorum, closed, stored] of rounds) {
    const title = `version ${version}: ${inputs} updates, ${figure(Math.max(0, opened - stored))} s`;
    for (const [name, from, to] of [["open", opened, quorum], ["grace", quorum, closed], ["publish", closed, stored]]) {
      const x = place(from);
      drawn.append(shape("rect", { class: name, x, y: 3, width: Math.max(0, place(to) - x), height: 14 }, title));
    }
    drawn.append(shape("path", { class: "edge", d: `M${place(stored)} 1V19` }));
  }
  if (fragment.waiting) {
    const x = place(Math.min(fragment.waiting_s, span));
    const title = `${fragment.waiting} updates wait for ${age(fragment.waiting_s)}`;
    drawn.append(shape("rect", { class: "waits", x, y: 3, width: Math.max(3, 1000 - x), height: 14 }, title));
  }
  return drawn;
}

export function showRounds(now) {
  const shown = new Set(now.fragments.map((one) => one.fragment));
  const ages = now.rounds.filter((round) => shown.has(round[0])).map((round) => round[3]);
  const span = Math.max(1, ...ages);
  $("rounds-span").textContent = `rounds of the last ${age(span)}`;
  $("rounds").tBodies[0].replaceChildren(...now.fragments.map((one) => make("tr", {},
    make("td", { class: "text" }, String(one.fragment)),
    make("td", {}, count(one.version)),
    make("td", { class: "text" }, one.owner ?? "nobody"),
    make("td", { class: "lane" }, roundsOf(now, one, span)),
    make("td", {}, `${one.round_updates} of ${one.live_learners}`),
    make("td", {}, String(one.waiting)))));
  const more = now.fragments_of - now.fragments.length;
  $("rounds-more").textContent = more > 0 ? `${now.fragments.length} of ${now.fragments_of} fragments: the longest without a version` : "";
}

const STATES = ["training", "catching up", "stalled", "down"];

export function laneOf(one) {
  const shares = STATES.filter((state) => one.lane?.shares[state]).map((state) => `${state} ${Math.round(100 * one.lane.shares[state])} %`);
  const drawn = strip(one.lane ? `${shares.join(", ")}; ${one.lane.lives} lives` : "not joined");
  for (const [from, to, state] of one.lane?.spans ?? []) {
    drawn.append(shape("rect", { class: `rect${state}`, x: from, y: 3, width: to - from, height: 14 }, STATES[state]));
  }
  for (const x of one.lane?.joins ?? []) drawn.append(shape("path", { class: "join", d: `M${x} 4L${x + 7} 10L${x} 16Z` }, "joined"));
  for (const x of one.lane?.kills ?? []) drawn.append(shape("path", { class: "kill", d: `M${x - 4} 5L${x + 4} 15M${x - 4} 15L${x + 4} 5` }, "ended without leaving"));
  return drawn;
}

export function showEvents(figures) {
  const list = figures.events.map(([at, what]) => make("li", {}, make("time", {}, at), make("span", {}, what)));
  $("events").replaceChildren(...(list.length ? list : [make("li", {}, "Nothing yet.")]));
  $("sample-section").hidden = !figures.sample;
  if (figures.sample) {
    $("sample").textContent = figures.sample.text;
    $("sample-note").textContent = `At step ${count(figures.sample.step)}, held-out loss ${figure(figures.sample.loss)}.`;
  }
}
