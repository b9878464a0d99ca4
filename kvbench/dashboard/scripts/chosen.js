// The runs behind the chosen row: folder, files, code, and the command that repeats each.

/** Show the runs behind a row; nothing without one. */
function showChosen(row) {
  byId("chosen").replaceChildren(...(row ? listMembers(row).map(describeRun) : []));
}

function describeRun(run) {
  const visit = (text, go) => make("button", { class: "quiet", onclick: () => go(run) }, text);
  const links = [linkTo(run, run.folder), linkTo(run, "results.json", "results.json")];
  if (run.sheet) links.push(linkTo(run, "contact sheet", "contact_sheet.png"));
  return make(
    "div",
    {},
    make("p", { class: "note" }, ...links.flatMap((link) => [link, ", "]), run.origins),
    run.command && make("pre", {}, run.command),
    run.command && make("button", { class: "quiet", onclick: copyCommand(run) }, "Copy"),
    run.samples.index.length ? visit("Samples", visitComparison) : null,
    run.retention?.kept ? visit("Retention", visitRetention) : null,
  );
}

function copyCommand(run) {
  return async (event) => {
    const button = event.currentTarget;
    try {
      await navigator.clipboard.writeText(run.command);
      button.textContent = "Copied";
    } catch {
      button.textContent = "Copying is blocked by the browser; select the text";
    }
  };
}
