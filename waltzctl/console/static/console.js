// Keeps a page as the cluster is: parts that have changed come as server-sent events and take the place of the old ones.
// Everything works without it, except that a page has to be asked for again.
"use strict";

(() => {
  const apart = document.getElementById("apart");
  let lostAt = null;

  // What a person is doing is kept: the element that has the focus, details that are open, how far a table is scrolled.
  function replace(id, html) {
    const old = document.getElementById(id);
    if (!old) return;
    const selection = document.getSelection();
    if (selection && !selection.isCollapsed && old.contains(selection.anchorNode)) return false;
    const active = document.activeElement;
    const focused = old.contains(active) ? keyOf(active, old) : null;
    const opened = [...old.querySelectorAll("details[open]")].map((one) => one.id);
    const scrolled = [...old.querySelectorAll(".scroll")].map((one) => one.scrollLeft);
    old.innerHTML = html;
    for (const one of opened) {
      const found = one && document.getElementById(one);
      if (found) found.open = true;
    }
    old.querySelectorAll(".scroll").forEach((one, at) => { one.scrollLeft = scrolled[at] || 0; });
    if (focused) {
      const again = find(focused, old);
      if (again) again.focus({ preventScroll: true });
    }
    reveal(old);
    return true;
  }

  function keyOf(element, root) {
    const href = element.getAttribute("href");
    const same = [...root.querySelectorAll(element.tagName)];
    return { tag: element.tagName, href, at: same.indexOf(element) };
  }

  function find(key, root) {
    const same = [...root.querySelectorAll(key.tag)];
    return (key.href !== null && same.find((one) => one.getAttribute("href") === key.href)) || same[key.at];
  }

  // Buttons that need this file are hidden until it is there.
  function reveal(root) {
    if (navigator.clipboard) root.querySelectorAll("[data-copy]").forEach((one) => { one.hidden = false; });
  }

  document.addEventListener("click", async (event) => {
    const button = event.target.closest("[data-copy]");
    if (!button) return;
    await navigator.clipboard.writeText(button.dataset.copy);
    button.classList.add("copied");
    setTimeout(() => button.classList.remove("copied"), 1500);
  });

  function say(sentence) {
    apart.textContent = sentence;
    apart.hidden = !sentence;
  }

  let source = null;
  let waiting = {};

  function follow() {
    if (source || document.hidden) return;
    source = new EventSource(location.pathname + location.search);
    source.onmessage = (event) => {
      lostAt = null;
      say("");
      Object.assign(waiting, JSON.parse(event.data));
      const later = {};
      for (const [id, html] of Object.entries(waiting)) {
        if (replace(id, html) === false) later[id] = html;
      }
      waiting = later;
    };
    source.onerror = () => {
      lostAt = lostAt || new Date();
      const since = lostAt.toISOString().replace(/\.\d+Z/, "Z");
      say(`The console does not answer since ${since}: what stands here is from before.`);
      if (source.readyState === EventSource.CLOSED) {
        rest();
        setTimeout(follow, 5000);
      }
    };
  }

  function rest() {
    if (source) source.close();
    source = null;
  }

  // On a narrow screen the list of pages is longer than it.
  const here = document.querySelector("header nav [aria-current]");
  if (here) here.parentElement.parentElement.scrollLeft = here.offsetLeft - 60;

  reveal(document);
  if (document.body.dataset.live) {
    // A browser has few lines to one place: a page that nobody sees must not hold one.
    document.addEventListener("visibilitychange", () => { document.hidden ? rest() : follow(); });
    addEventListener("pagehide", rest);
    addEventListener("pageshow", follow);
    follow();
  }
})();
