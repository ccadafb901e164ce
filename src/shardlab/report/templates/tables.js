"use strict";
// Tables: a click on a column's head sorts by it; missing values stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const value = (row, column) => row.cells[column]?.dataset.value;
  table.querySelectorAll("thead th").forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const direction = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
      table.querySelector("[aria-sort]")?.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      const missing = (text) => text === undefined || text === "" || text === "None";
      const numeric = [...body.rows].every((r) => missing(value(r, column)) || !isNaN(value(r, column)));
      body.append(...[...body.rows].sort((a, b) => {
        const [x, y] = [value(a, column), value(b, column)];
        if (missing(x) || missing(y)) return missing(x) - missing(y);
        return direction * (numeric ? x - y : x.localeCompare(y));
      }));
    });
  });
}
