// Looks at a page from which its run, or its server, goes away: node away.mjs URL CHROMIUM FOLDER
// Prints "drawn" once the page shows the run; then for each state that it reads, a line each, waits
// until the page says it, and prints what it found as one JSON object.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { createInterface } from "node:readline";
import puppeteer from "puppeteer-core";
import { launched, until } from "./patience.mjs";

const [url, executablePath, folder] = process.argv.slice(2);
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const { browser, page } = await launched(puppeteer, executablePath);
const faults = [];
page.on("pageerror", (error) => faults.push(String(error)));

async function look(state) {
  await until(page, (word) => document.querySelector("#state").textContent === word, state);
  const barriers = [], wide = [];
  for (const theme of ["light", "dark"]) for (const width of [1600, 400]) {
    await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: theme }]);
    await page.setViewport({ width, height: 900 });
    const found = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
    barriers.push(...found.violations.map((one) => `${theme} ${width}: ${one.id}: ${one.nodes[0].html}`));
    if (await page.evaluate(() => document.documentElement.scrollWidth > innerWidth)) wide.push(`${theme} ${width}`);
    await page.screenshot({ path: `${folder}/${state.replaceAll(" ", "-")}-${theme}-${width}.png`, fullPage: true });
  }
  const notice = await page.$eval("#notice", (one) => one.textContent);
  const steps = await page.$eval("#steps", (one) => one.textContent);
  return { notice, steps, faults, barriers, wide };
}

await page.setViewport({ width: 1600, height: 900 });
await page.goto(url);
await until(page, () => document.querySelectorAll("#facts dt").length > 5);
await page.evaluate(axe);
console.log("drawn");
for await (const state of createInterface({ input: process.stdin })) console.log(JSON.stringify(await look(state)));
await browser.close();
