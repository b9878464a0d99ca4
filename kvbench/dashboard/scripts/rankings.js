// Rankings of published datasets, whose tables the page contains; one metric is shown.

function drawRankings() {
  for (const ranking of document.querySelectorAll("#rankings [data-metric]"))
    ranking.hidden = ranking.dataset.metric !== byId("ranked").value;
}

function startRankings() {
  const metrics = byId("ranked");
  if (!metrics) return;
  const options = [...metrics.options].map((option) => [option.value, option.textContent]);
  metrics.replaceChildren();
  fillSelect(metrics, options);
  metrics.addEventListener("change", () => showView("rankings"));
}
