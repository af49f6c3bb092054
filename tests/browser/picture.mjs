// A picture of a page for the documentation: node picture.mjs URL CHROMIUM FILE
import { setTimeout as pause } from "node:timers/promises";
import puppeteer from "puppeteer-core";

const [url, executablePath, path] = process.argv.slice(2);
const browser = await puppeteer.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu"] });
const page = await browser.newPage();
await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: "light" }]);
await page.setViewport({ width: 1240, height: 900 });
await page.goto(url);
await page.waitForFunction(() => document.querySelectorAll("#facts dt").length > 5, { timeout: 60_000 });
await pause(2000);
await page.screenshot({ path, fullPage: true });
await browser.close();
