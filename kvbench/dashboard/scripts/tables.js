// Tables with sortable headers.

/** Return a number with small letters behind it; bold if it is the best. */
function makeNumber(text, { more = "", best = false, title = null } = {}) {
  return make("span", { class: "num", title }, best ? make("b", {}, text) : text, more ? make("small", {}, more) : null);
}

/**
 * Draw the body and the sorted header of a table.
 *
 * Columns are {key, title, words, cell(row), about}; rows are sorted. `sort` is {key, descending}; headers call
 * `turn(column)`.
 */
function drawTable(table, columns, rows, sort, turn, describeRow) {
  const heads = columns.map((column) => {
    const sorted = sort.key === column.key;
    const way = sorted ? (sort.descending ? "▾" : "▴") : "";
    return make(
      "th",
      {
        scope: "col",
        class: column.words ? "words" : null,
        "aria-sort": sorted ? (sort.descending ? "descending" : "ascending") : null,
        title: column.about,
      },
      make(
        "button",
        { type: "button", "data-sort": column.key, onclick: () => turn(column) },
        column.title,
        make("span", { class: "way", "aria-hidden": "true" }, way),
      ),
    );
  });
  const body = rows.map((row) =>
    make(
      "tr",
      describeRow(row),
      ...columns.map((column) => make("td", { class: column.words ? "words" : null }, column.cell(row))),
    ),
  );
  const focused = table.contains(document.activeElement) ? document.activeElement.dataset.sort : null;
  table.replaceChildren(make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...body));
  if (focused) table.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
}

/** Return the placeholder of a missing number. */
function makeNothing() {
  return make("span", { class: "dim" }, "–");
}
