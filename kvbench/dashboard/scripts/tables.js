// Tables with sortable headers whose numbers are buttons, reached with arrow keys.

/**
 * Return a button that opens the details of a number.
 *
 * Buttons of tables are reached with arrow keys, others (`tab`) with the tab key.
 */
function makeNumber(text, open, { more = "", best = false, title = null, tab = false, sign = null } = {}) {
  return make(
    "button",
    {
      class: "num",
      type: "button",
      tabindex: tab ? "0" : "-1",
      title,
      onclick: (event) => {
        event.stopPropagation();
        open();
      },
    },
    sign,
    best ? make("b", {}, text) : text,
    more ? make("small", {}, more) : null,
  );
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
  table.querySelector("tbody .num")?.setAttribute("tabindex", "0");
  if (focused) table.querySelector(`[data-sort="${CSS.escape(focused)}"]`)?.focus();
}

/** Move between the numbers of a table with arrow keys; the tab key reaches one of them. */
function walkThrough(table) {
  table.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    const cell = event.target.closest("tbody td");
    if (!step || !cell) return;
    event.preventDefault();
    const rows = [...table.tBodies[0].rows];
    let [row, column] = [rows.indexOf(cell.parentElement), cell.cellIndex];
    for (;;) {
      [row, column] = [row + step[0], column + step[1]];
      const next = rows[row]?.cells[column];
      if (!next) return;
      const number = next.querySelector(".num");
      if (!number) continue;
      event.target.setAttribute("tabindex", "-1");
      number.setAttribute("tabindex", "0");
      number.focus();
      return;
    }
  });
}

/** Return the placeholder of a missing number. */
function makeNothing() {
  return make("span", { class: "dim" }, "–");
}
