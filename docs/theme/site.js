// Parts of a page's contents, and the buttons of a code block, are no landmarks of their own for a screen reader.
function join() {
  for (const nav of document.querySelectorAll(".md-nav--secondary .md-nav, .md-code__nav")) {
    nav.removeAttribute("aria-label");
    nav.setAttribute("role", "none");
  }
}

join();
new MutationObserver(join).observe(document.body, { childList: true, subtree: true });
