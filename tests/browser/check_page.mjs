// Looks at a page in a real Chromium, as a person at a keyboard would, and prints what it found as
// one JSON object: node check_page.mjs URL CHROMIUM FOLDER. It waits for what it expects, and not
// by the clock: a busy machine may take its time.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import puppeteer from "puppeteer-core";
import { launched, until } from "./patience.mjs";

const [url, executablePath, folder] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const errors = [], foreign = [], barriers = [], wide = [];

const { browser, page } = await launched(puppeteer, executablePath);
page.on("console", (message) => ["error", "warn"].includes(message.type()) && errors.push(message.text()));
page.on("pageerror", (error) => errors.push(String(error)));
page.on("request", (request) => {
  const asked = request.url();
  if (![url, "data:", `blob:${url}`].some((own) => asked.startsWith(own))) foreign.push(asked);
});

const text = (selector) => page.$eval(selector, (found) => found.textContent.trim());
const drawn = () => until(page, () => document.querySelectorAll("#facts dt").length > 5);

async function look(theme, width, name) {
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: theme }]);
  await page.setViewport({ width, height: 900 });
  await page.goto(url);
  await drawn();
  // The page's policy lets no script in but its own: axe comes by the debugger's door.
  await page.evaluate(axe);
  const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  for (const one of found.violations) {
    barriers.push(`${theme} ${width}: ${one.id}: ${one.nodes.map((node) => node.html).slice(0, 3).join(" ")}`);
  }
  const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
  if (over > 0) wide.push(`${theme} ${width}: ${over} pixels too wide`);
  await page.screenshot({ path: `${folder}/${name}.png`, fullPage: true });
}

for (const theme of ["light", "dark"]) for (const width of [1600, 400]) await look(theme, width, `${theme}-${width}`);

// Figures move.
await page.setViewport({ width: 1280, height: 900 });
const moved = [];
for (const id of ["#steps", "#facts", "#rounds"]) {
  const before = await text(id);
  await until(page, (one, was) => document.querySelector(one).textContent.trim() !== was, id, before);
  moved.push(id);
}

// Every control by keyboard alone.
const reached = [], dead = [];
await page.evaluate(() => { document.activeElement.blur(); scrollTo(0, 0); });
for (let count = 0; count < 120; count += 1) {
  await page.keyboard.press("Tab");
  const found = await page.evaluate(() => {
    const one = document.activeElement;
    if (one === document.body) return null;
    const style = getComputedStyle(one.matches("input[type=radio]") ? one.nextElementSibling : one);
    return { name: one.id || one.name || one.getAttribute("aria-label") || one.getAttribute("href") || one.tagName,
      seen: style.outlineStyle !== "none" };
  });
  if (!found) break;
  reached.push(found.name);
  if (!found.seen) dead.push(found.name);
}

async function press(selector, key) {
  await page.focus(selector);
  await page.keyboard.press(key);
}

await press("#theme input:checked", "ArrowRight");
await until(page, () => document.documentElement.dataset.theme);
const theme = await page.evaluate(() => document.documentElement.dataset.theme ?? "auto");
await press("#loss .panel", "Home");
await until(page, () => document.querySelector("#loss .readout").textContent.trim());
const readout = await text("#loss .readout");
await page.focus("#find");
await page.keyboard.type("no-such-learner");
await until(page, () => document.querySelector("#page").textContent.includes("No learner"));
const none = await text("#page");
const settings = await page.$$eval("#settings tbody tr", (rows) => rows.length);
// What the buttons save.
const kept = await page.evaluate(async () => {
  const blobs = [], make = URL.createObjectURL;
  URL.createObjectURL = (blob) => { blobs.push(blob); return make.call(URL, blob); };
  const found = {};
  for (const [kind, type] of [["SVG", "image/svg+xml"], ["PNG", "image/png"], ["CSV", "text/csv"]]) {
    document.querySelector(`#loss [data-save=${kind}]`).click();
    while (blobs.at(-1)?.type !== type) await new Promise((done) => { setTimeout(done, 50); });
    found[kind] = [blobs.at(-1).type, (await blobs.at(-1).text()).split("\n")[0].slice(0, 40)];
  }
  return found;
});
await page.reload();
await drawn();
const remembered = await page.evaluate(() => document.documentElement.dataset.theme ?? "auto");

// A runbook is a page of its own.
await page.goto(`${url}runbooks/disk-full.md`);
await page.evaluate(axe);
const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
barriers.push(...found.violations.map((one) => `runbook: ${one.id}`));
const runbook = await text("h1");
await browser.close();

console.log(JSON.stringify({
  errors, foreign, barriers, wide, moved, reached, dead, theme, readout, none, settings, remembered, runbook, kept,
}));
