// Parts of a page's contents, and the buttons of a code block, are no landmarks of their own for a screen reader.
// An empty cell is no header, and a table that is scrolled can be by the keyboard.
function join() {
  for (const cell of document.querySelectorAll(".md-typeset th:empty")) cell.replaceWith(document.createElement("td"));
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap:not([tabindex])")) wrap.tabIndex = 0;
  for (const nav of document.querySelectorAll(".md-nav--secondary .md-nav, .md-code__nav")) {
    nav.removeAttribute("aria-label");
    nav.setAttribute("role", "none");
  }
}

join();
new MutationObserver(join).observe(document.body, { childList: true, subtree: true });
