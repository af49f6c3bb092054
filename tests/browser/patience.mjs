// A Chromium and its first page, which wait for as long as a busy machine may take.
const timeout = 300_000;

export async function launched(puppeteer, executablePath) {
  const browser = await puppeteer.launch({
    executablePath, timeout, protocolTimeout: timeout, args: ["--no-sandbox", "--disable-gpu"],
  });
  const page = await browser.newPage();
  page.setDefaultTimeout(timeout);
  return { browser, page };
}

export const until = (page, condition, ...given) => page.waitForFunction(condition, { timeout }, ...given);
