// What a served page does besides: it takes the parts that the server sends, each in place of the one
// before. They are parsed apart, where nothing runs, and the page's policy runs no script of theirs.
"use strict";
(() => {
  const SILENT_MS = 10_000;
  const $ = (id) => document.getElementById(id);
  const known = { said: null, heard: 0, lost: false, page: 0 };

  // Makes an element like another. What has the focus, is scrolled or typed in stays what it is.
  function become(old, fresh) {
    for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !name.startsWith("data-")) old.removeAttribute(name);
    for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
    const before = [...old.childNodes], after = [...fresh.childNodes];
    after.forEach((node, index) => {
      const was = before[index];
      if (!was) old.append(node);
      else if (was.nodeName !== node.nodeName || was.nodeName === "svg") was.replaceWith(node);
      else if (node.nodeType === Node.ELEMENT_NODE) become(was, node);
      else if (was.textContent !== node.textContent) was.textContent = node.textContent;
    });
    for (const node of before.slice(after.length)) node.remove();
  }

  function show(html) {
    const fresh = new DOMParser().parseFromString(html, "text/html").body.firstElementChild;
    const readout = $(fresh.id).querySelector(".readout")?.textContent;
    if (readout) fresh.querySelector(".readout")?.append(readout);
    become($(fresh.id), fresh);
  }

  async function askLearners(page = known.page) {
    const find = $("find")?.value.slice(0, 60) ?? "";
    const answer = await fetch(`/learners?${new URLSearchParams({ page, find })}`).catch(() => null);
    const html = answer?.ok ? await answer.text() : "";
    known.page = page;
    if (html) show(html);
  }

  function showState() {
    const silent = known.lost || (known.heard && Date.now() - known.heard > SILENT_MS);
    let { kind = "", word = "connecting", sentence = "" } = known.said ?? {};
    if (silent) {
      const at = known.said ? `: what is shown is of ${new Date(1000 * known.said.as_of_s).toISOString().slice(11, 19)} UTC` : "";
      [kind, word] = ["bad", "disconnected"];
      sentence = `The server of this page does not answer${at}.${known.said ? ` If it has ended, start it again: ${known.said.again}` : ""}`;
    }
    if ($("state").textContent !== word) $("state").textContent = word;
    $("state").className = `pill ${kind}`;
    if ($("notice").textContent !== sentence) $("notice").textContent = sentence;
    $("notice").className = sentence ? `shown ${kind}` : "";
    document.body.classList.toggle("old", kind === "bad");
  }

  let stream = null;

  function connect() {
    if (stream || document.hidden) return;
    stream = new EventSource("/events");
    const heard = (take) => (event) => {
      known.heard = Date.now();
      known.lost = false;
      take(JSON.parse(event.data));
      showState();
    };
    stream.addEventListener("state", heard((said) => { known.said = said; }));
    stream.addEventListener("part", heard(show));
    stream.addEventListener("drawn", heard(() => askLearners()));
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

  document.addEventListener("input", (event) => { if (event.target.id === "find") askLearners(0); });
  document.addEventListener("click", (event) => {
    const page = event.target.dataset?.page;
    if (page !== undefined) askLearners(Number(page));
  });
  // A page that nobody sees costs nothing, and takes no connection from those that are seen.
  document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : connect()));
  setInterval(showState, 1000);
  connect();
})();
