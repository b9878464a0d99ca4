"""Numbers of several tables stand beside a sweep's, metric by metric, and what cannot be compared is named."""

from dataclasses import replace
from pathlib import Path

from kvbench.eval.protocol.scores import Metric
from kvbench.report.papers.by_metric import show_by_metric
from kvbench.runs.record.results import Results
from tests.support.results import PSNR, configured_run, printed
from tests.support.speed import make_timing

TABLES = ("heatkv_table1", "heatkv_table2", "ams_kv_text", "reproduction")
SCORES = {
    "psnr": replace(PSNR, value=21.0, ci95=(20.0, 22.0)),
    "hpsv2.1": Metric(None, "higher", status="skipped", reason="weights missing"),
    "geneval[mask2former-hf]": Metric(0.7, "higher", ci95=(0.6, 0.8), digits=2),
}


def show(tmp_path: Path, model: str, methods: tuple[str, ...] = ("full", "heatkv", "pricekv")) -> list[str]:
    def run(method: str) -> Results:
        target = "kvbench.prompts.benchmarks.GenEval"
        return configured_run(method, 1 if method == "full" else 0.1, model, SCORES, prompts___target_=target)

    timings = [
        make_timing("full", 1, batch=8, seconds=4.0, decode=2.4, reserved=32 * 10**9, model=model),
        make_timing("heatkv", 0.1, batch=8, seconds=3.2, decode=2.4, reserved=8 * 10**9, model=model),
    ]
    text = printed(200, show_by_metric, TABLES, [run(method) for method in methods], timings, tmp_path)
    assert (tmp_path / f"report-published-{model}.md").read_text().splitlines()[0] == text.splitlines()[0]
    return [" ".join(line.split()) for line in text.splitlines()]


def test_a_number_stands_beside_every_table_that_prints_it(tmp_path: Path) -> None:
    lines = show(tmp_path, "infinity_2b")
    assert "heatkv 0.1 cache MiB 3900 (heatkv_table1) 12.35" in lines
    assert "heatkv 0.1 psnr 25.40 (heatkv_table1) 21.00 [20.00, 22.00]" in lines
    published = "0.69 (Infinity README), 0.680 (HeatKV), .68 (HACK), 0.711 (AMS-KV), 0.68276 (Infinity#16)"
    score = "0.70 [0.60, 0.80], geneval[mask2former-hf]"
    assert f"full 1 geneval[official] {published} {score}" in lines
    assert f"heatkv 0.1 geneval 0.684 (heatkv_table2) {score}" in lines
    assert "full 1 memory GB 28.12 (ams_kv_text) 32" in lines
    assert "full 1 s/image, decode - 0.3" in lines
    assert "pricekv 0.1 psnr - 21.00 [20.00, 22.00]" in lines


def test_what_cannot_be_compared_is_named_with_the_reason(tmp_path: Path) -> None:
    lines = show(tmp_path, "infinity_2b")
    assert not any(line.startswith(("full 1 fid", "heatkv 0.1 fid")) for line in lines)
    reason = "the number of samples moves these metrics of a whole set, and n = 96"
    assert f"left out: fid_paired_clean: {reason}" in lines
    assert "hpsv2.1 skipped: weights missing" in lines
    assert "no paper has a row: pricekv" in lines
    assert any(line.startswith("AMS-KV: arXiv:2511.16047, Table 4; cfg 4") for line in lines)
    assert any(line.startswith("heatkv_table1: arXiv:2605.14877v2, Table 1; MS-COCO 2017") for line in lines)
    assert "published numbers are of" not in " ".join(lines)


def test_an_embedded_model_has_the_numbers_of_the_first_model_and_says_so(tmp_path: Path) -> None:
    lines = show(tmp_path, "infinity_tiny")
    assert "published numbers are of infinity_2b: infinity_tiny only rehearses the command" in lines
    assert "heatkv 0.1 geneval 0.684 (heatkv_table2) 0.70 [0.60, 0.80], geneval[mask2former-hf]" in lines
    assert not any(
        "0.816" in line or "Infinity README" in line for line in lines
    )  # of infinity_8b, and of full caches
