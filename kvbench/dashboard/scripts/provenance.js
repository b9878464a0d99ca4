// The drawer: provenance of a number.

const PROMPTS_ONLY = "prompts alone (over seeds too it is wider than the metric's range)";

/** Return facts under a heading, [name, text or element, whether it is code]; facts without a value are left out. */
function makeFacts(title, facts, ...more) {
  const known = facts.filter(([, value]) => value !== null && value !== undefined && value !== "");
  if (!known.length && !more.length) return null;
  const list = known.flatMap(([name, value, code]) => [
    make("dt", {}, name),
    make("dd", { class: code ? "code" : null }, value),
  ]);
  return make(
    "div",
    { class: "facts" },
    make("h3", {}, title),
    list.length ? make("dl", {}, ...list) : null,
    ...more,
  );
}

function openDrawer(title, ...parts) {
  byId("drawerTitle").textContent = title;
  byId("drawerBody").replaceChildren(...parts.filter((part) => part));
  if (!byId("drawer").open) byId("drawer").showModal();
  byId("drawer").scrollTop = 0;
}

/** Show the provenance of a metric. */
function openMetric(run, name) {
  const metric = readMetric(run, name);
  if (run.merged) {
    openMeanMetric(run, name, metric);
    return;
  }
  const ends = findInterval(metric);
  const file = `${metric.evaluator}-${metric.protocol}.json`;
  const missing = metric.value === null ? metric.status : null;
  openDrawer(
    `${nameMetric(name)}, ${run.label}`,
    makeFigure(
      missing ?? format(metric.value, metric.digits),
      missing ? "" : metric.unit,
      ends && `95 % interval ${format(ends[0], metric.digits)} to ${format(ends[1], metric.digits)}`,
    ),
    makeFacts("Number", [
      ["value", metric.value === null ? null : String(metric.value)],
      ["full cache", formatFull(metric)],
      ["direction", `${metric.better} is better`],
      ["samples", String(metric.n)],
      ["interval by", metric.ci],
      ["deviation", metric.sd === undefined ? null : Number(metric.sd.toPrecision(4)).toString()],
      ["standard error", metric.se === undefined ? null : Number(metric.se.toPrecision(4)).toString()],
      ["bias", metric.bias === undefined ? null : Number(metric.bias.toPrecision(4)).toString()],
      ["note", metric.reason],
      ["not finite", metric.nonfinite ? String(metric.nonfinite) : null],
    ]),
    makeFacts("Evaluator", [
      ["name", metric.evaluator],
      ["protocol", metric.protocol],
      ["settings", describeEvaluator(run, metric.evaluator), true],
      ["compared with", metric.needs_reference && run.reference !== null ? RUNS[run.reference].folder : null],
      ["record", metric.value === null || run.dataset ? null : linkTo(run, `metrics/${file}`, "metrics", file)],
    ]),
    ...describeRun(run),
  );
}

/** Show the provenance of a mean over seeds. */
function openMeanMetric(row, name, metric) {
  const ends = findInterval(metric);
  const degrees = metric.df ? `, ${Number(metric.df.toPrecision(3))} degrees of freedom` : "";
  openMerged(
    row,
    nameMetric(name),
    makeFigure(
      metric.value === null ? metric.status : format(metric.value, metric.digits),
      metric.value === null ? "" : metric.unit,
      ends && `95 % interval ${format(ends[0], metric.digits)} to ${format(ends[1], metric.digits)}`,
    ),
    [
      ["full cache", formatFull(metric)],
      ["samples", countSamples(row)],
      ["interval over", ends && `${metric.prompts_only ? PROMPTS_ONLY : "prompts and seeds"}${degrees}`],
      ["deviation between runs", metric.between === undefined ? null : String(Number(metric.between.toPrecision(4)))],
      ["note", metric.reason],
    ],
    (one) => String(findMetric(one, name)?.value ?? "no value"),
  );
}

/** Show the provenance of a cost. */
function openCost(run, key) {
  if (run.merged) {
    const { title, unit, about, field } = COSTS[key];
    const facts = [["what", about], ["field", field, true]];
    openMerged(run, title, makeFigure(formatCost(run, key), unit, null), facts, (one) => formatCost(one, key));
    return;
  }
  showCost(run, COSTS[key], formatCost(run, key));
}

/** Show a cost of a run, {title, unit, about, field}, with the totals of its memory. */
function showCost(run, { title, unit, about, field }, text) {
  openDrawer(
    `${title}, ${run.label}`,
    makeFigure(text, unit, null),
    makeFacts("Number", [
      ["what", about],
      ["field", field, true],
      ["budget B", `${run.memory.budget_tokens} of ${run.memory.full_tokens} tokens per sequence`],
      ...(run.unit === "bytes"
        ? [["budget in bytes", `${run.memory.budget_bytes} of ${run.memory.full_sequence_bytes} per sequence`]]
        : []),
      ["peak", `${run.memory.peak_tokens} tokens, ${run.memory.peak_bytes} bytes`],
      ["full cache", `${run.memory.full_bytes} bytes at the same batch`],
      ["batch", `${run.memory.batch} prompts`],
      ["device", run.latency.device],
      [
        "times",
        run.latency.others
          ? `of ${run.latency.samples ?? "the"} samples in batches of ${run.latency.batch}; ${run.latency.others} ` +
            "with another batch size, machine or load are left out (~)"
          : null,
      ],
    ]),
    ...describeRun(run),
  );
}

/** Show the source of a published number. */
function openPrinted(table, label, name, text) {
  openDrawer(
    `${name}, published`,
    makeFigure(text, "", null),
    makeFacts("Publication", [
      ["source", table.source],
      ["table", table.title],
      ["column", label],
      ["data", table.data],
      ["file", `kvbench/assets/published.yaml, ${table.name}`, true],
    ]),
  );
}

function makeFigure(value, unit, interval) {
  return make(
    "div",
    {},
    make("div", { class: "figure" }, value, " ", make("small", {}, unit)),
    interval && make("div", { class: "dim" }, interval),
  );
}

function describeEvaluator(run, evaluator) {
  const named = Object.entries(run.evaluated).find(([name]) => name === evaluator);
  return named ? JSON.stringify(shared(named[1]).settings) : null;
}

/** Return what a verifier states of exactly the files of a run's dataset. */
function describeVerdict(run) {
  if (!run.verified) return "no";
  const { status, by, finished, chosen, finding } = run.verified;
  return [status, chosen && `${chosen} of ${run.n} samples`, by && `by ${by}`, finished, finding].filter(Boolean).join(", ");
}

/** Return the facts of a run: folder, code, machine, configuration and the command that repeats it. */
function describeRun(run) {
  const known = Object.fromEntries(
    Object.entries(run.provenance).map(([key, number]) => [key, shared(number)]),
  );
  const config = Object.fromEntries(Object.entries(run.config).map(([key, number]) => [key, shared(number)]));
  const versions = Object.entries(known.versions ?? {}).map(([name, version]) => `${name} ${version}`);
  const changed = known.code?.diff_sha256 ? `, with changes ${known.code.diff_sha256.slice(0, 12)}` : "";
  return [
    makeFacts(
      "Run",
      [
        ["folder", linkTo(run, run.folder), true],
        ["results", linkTo(run, "results.json", "results.json")],
        ["verified", run.dataset ? describeVerdict(run) : null],
        ["written", run.finished],
        ["model", run.model],
        ["prompts", `${run.prompts}, ${run.n} samples`],
        ["method", `${run.label}, budget ${formatBudget(run)}`],
        [
          "reference",
          run.reference === null ? null : linkTo(RUNS[run.reference], RUNS[run.reference].folder),
          true,
        ],
      ],
      makeVisits(run),
    ),
    makeFacts(
      "Repeat",
      [],
      make("pre", {}, run.command),
      make(
        "div",
        { class: "controls" },
        make("button", { class: "quiet", onclick: copyCommand(run) }, "Copy"),
      ),
    ),
    makeFacts("Code and machine", [
      ["commit", known.code ? known.code.commit + changed : "not recorded", true],
      ["weights", known.weights_sha256, true],
      ["calibration", known.calibration_sha256, true],
      ["versions", versions.join(", ")],
      [
        "device",
        [known.gpu ?? known.device, known.cpu, known.threads && `${known.threads} threads`]
          .filter(Boolean)
          .join(", "),
      ],
      ["started", known.started],
      ...(known.resumed ?? []).map((one) => [
        "resumed",
        [
          one.started,
          one.code ? one.code.commit + (one.code.diff_sha256 ? ", with changes" : "") : "commit not recorded",
          one.machine ?? one.gpu ?? one.cpu,
          ...Object.entries(one.versions ?? {}).map(([name, version]) => `${name} ${version}`),
        ].join(", "),
      ]),
    ]),
    makeFacts(
      "Settings",
      [],
      make(
        "details",
        {},
        make("summary", {}, "Full configuration"),
        make("pre", {}, JSON.stringify(config, null, 1)),
      ),
    ),
    run.sheet
      ? makeFacts(
          "Contact sheet",
          [],
          make(
            "a",
            { href: addressOf(run, "contact_sheet.png"), target: "_blank", rel: "noopener" },
            make("img", {
              src: addressOf(run, "contact_sheet.png"),
              loading: "lazy",
              alt: "Reference and compressed samples, worst first",
            }),
          ),
        )
      : null,
  ];
}

function makeVisits(run) {
  const visit = (text, go) =>
    make(
      "button",
      {
        class: "quiet",
        onclick: () => {
          byId("drawer").close();
          go(run);
        },
      },
      text,
    );
  return make(
    "div",
    { class: "controls" },
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
