"""A run of a tiny model with random weights, for tests."""

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_scale
from kvbench.core.settings import Settings
from kvbench.eval.paired.psnr import Psnr
from kvbench.methods.streaming_llm import StreamingLLM
from kvbench.models.base import Cache, Model
from kvbench.models.noise import Noise
from kvbench.prompts.base import Prompt
from kvbench.runs import execute
from kvbench.runs.job import Job
from kvbench.runs.prepare import calibrate_job
from kvbench.runs.record.folder import RunFolder

WIDTH, HEADS, LAYERS, BITS = 8, 2, 2, 3
SPEC = ModelSpec("fake", LAYERS, HEADS, WIDTH // HEADS, next_scale([(1, 1), (2, 2), (3, 3), (4, 4)]))


@dataclass
class Fake(Model):
    """Random transformer over four scales with guidance, sampled bits, and images of 16 x 16 pixels.

    `salt` chooses the weights, more than `max_prompts` prompts run out of memory, a batch takes `pause` seconds longer.
    """

    name: str = "fake"
    salt: int = 0
    max_prompts: int = 1000
    pause: float = 0.0
    spec: ModelSpec = SPEC
    batches: list[int] = field(default_factory=list, init=False)

    def load(self, device: str) -> None:
        rng = torch.Generator().manual_seed(self.salt)
        self.qkv = torch.randn(LAYERS, WIDTH, 3 * WIDTH, generator=rng) / 3
        self.head = torch.randn(WIDTH, BITS, generator=rng)
        self.weights_sha256 = hashlib.sha256(self.qkv.numpy().tobytes()).hexdigest()

    def generate(self, prompts: Sequence[str], cache: Cache, noise: Noise) -> Tensor:
        count = len(prompts)
        self.batches.append(count)
        if count > self.max_prompts:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")
        time.sleep(self.pause)
        cache.reset(2 * count)
        text = torch.zeros(2 * count, 1, WIDTH)
        for row, prompt in enumerate(prompts):
            seed = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big")
            text[row, 0] = torch.randn(WIDTH, generator=torch.Generator().manual_seed(seed))
        carried = torch.zeros(count, 1, WIDTH)
        for segment in self.spec.segments:
            cache.begin(segment)
            place = torch.arange(segment.length)[:, None] * 0.1 + torch.arange(WIDTH)
            x = text + carried.repeat(2, 1, 1) + place.sin()
            for layer in range(LAYERS):
                q, k, v = (
                    (x @ self.qkv[layer]).view(2 * count, segment.length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
                )
                x = x + cache.attend(layer, q, k, v).transpose(1, 2).flatten(2)
            conditional, free = (x @ self.head).chunk(2)
            p = (2 * conditional - free).sigmoid()
            chances = torch.stack((1 - p, p), -1)
            bits = (chances / noise.draw(p[0].numel() * 2).view(chances.shape)).argmax(-1).float()
            carried = (bits.mean(1, keepdim=True) @ self.head.T) / 2
        pixels = (bits * 150 + p * 100).round().to(torch.uint8).view(count, 4, 4, BITS)
        return pixels.repeat_interleave(4, 1).repeat_interleave(4, 2)


def images_of(folder: Path) -> dict[str, str]:
    """SHA-256 of every image of a run, by file name."""
    files = sorted((folder / "images").iterdir())
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.suffix == ".png"
    }


def count_records(root: Path) -> int:
    """Lines of every samples.jsonl below a folder."""
    return sum(path.read_bytes().count(b"\n") for path in root.rglob("samples.jsonl"))


def job_in(root: Path, count: int = 10, method: object = None, **more: Any) -> Job:
    values: dict[str, object] = {
        "task": "run", "budget": 0.5, "sinks": 1, "seed": 0, "batch_size": 2, "device": "cpu",
        "cache_dtype": "auto", "runs_dir": root,
    }  # fmt: skip
    values |= {
        key: more.pop(key)
        for key in list(more)
        if key in values or key in ("shard", "profile", "budget_unit", "cuda_graph", "storage", "noise")
    }
    method = StreamingLLM(sinks=1) if method is None else method
    config = {
        "model": {"name": "fake", "sources": {"path": "/somewhere"}},
        "method": {"_target_": type(method).__qualname__, **vars(method)},
        "eval": {name: vars(one) for name, one in more.get("evaluators", {"psnr": Psnr()}).items()},
        "cache_dtype": values["cache_dtype"],
        "noise": values.get("noise", "stream"),
    }
    return Job(
        **{
            "settings": Settings(**values),
            "model": Fake(),
            "method": method,
            "method_name": "streaming_llm",
            "prompts": [Prompt(i, f"prompt {i}", {"number": i}) for i in range(count)],
            "config": config,
            "calibration_prompts": [Prompt(i, f"calibration {i}") for i in range(2)],
            "evaluators": {"psnr": Psnr()},
            **more,
        }
    )


def open_folder(job: Job) -> RunFolder:
    """Open the folder of a job whose model is loaded."""
    return execute.open_folder(job, calibrate_job(job))
