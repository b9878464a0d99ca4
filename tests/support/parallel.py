"""What each of two processes does that share a model, for tests: `RANK=0 WORLD_SIZE=2 ... python parallel.py OUT`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from kvbench.core.budget import Budget
from kvbench.core.processes import Processes, join, leave
from kvbench.engine.cache import KVCache
from kvbench.engine.ledger import Ledger, add_ledgers
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.hardkv.method import HardKV
from kvbench.methods.random import Random
from kvbench.methods.shared.base import Method
from kvbench.methods.snapkv import SnapKV
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.noise import PromptNoise
from kvbench.models.outputs import Text
from kvbench.models.qwen3.model import Qwen3Model
from kvbench.models.qwen3.sampling import TextSampling
from kvbench.models.qwen3.transformer import Qwen3Config

SHAPE = Qwen3Config(
    depth=2, width=32, heads=8, kv_heads=4, head_dim=16, hidden=64, vocabulary=60, rope_base=1e4
)
PROMPTS = ["what is one plus two", "why", "how many are there"]
FEW = {"window": 4, "queries": 4}
CASES: dict[str, tuple[Callable[[], Method], str]] = {
    "full": (Full, "1"),
    "hard_kv, top_p": (lambda: HardKV(**FEW), "16"),
    "hard_kv, top_k": (lambda: HardKV(select="top_k", **FEW), "16"),
    "hard_kv, rkv": (lambda: HardKV(selector="rkv", **FEW), "14"),
    "snapkv": (lambda: SnapKV(window=4, queries="last"), "16"),
    "streaming_llm": (lambda: StreamingLLM(sinks=1), "12"),
    "streaming_llm, a broken share": (lambda: StreamingLLM(sinks=1), "0.337"),
    "random": (Random, "16"),
    "random, a broken share": (Random, "0.4444"),
    "h2o": (H2O, "16"),
}
"""Methods, and their budgets."""
SAMPLED = ["full", "hard_kv, top_p", "random, a broken share"]
"""Of these, those that are also drawn with noise."""


def make_model(processes: Processes, temperature: float) -> Qwen3Model:
    one = Qwen3Model(
        "small",
        SHAPE,
        TextSampling(temperature, 0, 1.0),
        {},
        "random",
        prompt_tokens=8,
        max_tokens=41,
        chunk=8,
        tensor_parallel=processes.count,
    )
    one.processes = processes
    one.load("cpu")
    return one


def write_texts(one: Qwen3Model, case: str) -> tuple[list[Text], Ledger, list[torch.Tensor]]:
    """The texts of one method, what its cache held, and all logits."""
    make, budget = CASES[case]
    method = make()
    own = one.spec.take_share(one.processes.rank, one.processes.count)
    method.prepare(own, Budget.parse(budget, one.spec).take_share(one.spec, own))
    logits: list[torch.Tensor] = []
    hook = one._transformer.norm.register_forward_hook(lambda *given: logits.append(given[-1].clone()))
    cache = KVCache(own, method, dtype=torch.float32)
    cache.prompts = range(3, 3 + len(PROMPTS))
    texts = one.generate(PROMPTS, cache, PromptNoise(0, range(len(PROMPTS))))
    hook.remove()
    return list(texts), cache.ledger, logits


def collect(processes: Processes) -> dict[str, Any]:
    """JSON values of every case, of all processes together."""
    found: dict[str, Any] = {}
    for temperature, cases in ((0.0, list(CASES)), (1.0, SAMPLED)):
        one = make_model(processes, temperature)
        for case in cases:
            texts, ledger, logits = write_texts(one, case)
            everyone = processes.gather((texts, ledger, logits))
            together = add_ledgers([each[1] for each in everyone])
            found[f"{case} at {temperature}"] = {
                "texts": [vars(text) for text in texts],
                "equal": all(each[0] == texts for each in everyone)
                and all(torch.equal(a, b) for each in everyone for a, b in zip(each[2], logits, strict=True)),
                "tokens": together.held,
                "bytes": [together.peak_bytes, together.transient_bytes],
                "last": [row.tolist() for row in logits[-1]],
            }
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    processes = join(2, "cpu")
    found = collect(processes)
    if processes.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    leave()
