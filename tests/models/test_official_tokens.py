"""Janus-Pro, Lumina-mGPT and Emu3 draw the official tokens, run by run, on the engine, and however padded."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from kvbench.core.segments import ModelSpec, next_token
from kvbench.methods.full import Full
from kvbench.methods.h2o import H2O
from kvbench.methods.snapkv import SnapKV
from kvbench.models.janus.transformer import Janus
from kvbench.models.llamagen.sampling import LlamaGenSampling
from kvbench.models.lumina.sampling import LuminaSampling
from kvbench.models.parts.decoder import Decoder
from kvbench.models.parts.image_prompts import forbid
from kvbench.models.parts.sampling import TokenSampling, guide, truncate
from kvbench.models.parts.tokens import FramedTokens, lay_out
from kvbench.models.token_loop import ImageHead, draw_tokens
from tests.support import reference_emu3 as emu3
from tests.support import reference_janus as janus
from tests.support import reference_lumina as lumina
from tests.support.drawing import Recorded, Silence, close
from tests.support.engine import open_cache, prepared
from tests.support.reference import OneStream
from tests.support.reference_llamagen import PlainCache

TOKENS = 4 * 7
"""Of an image with newlines; official runs go on after it."""


@dataclass
class Run:
    """A reference run drawn again: its settings and tensors, and prompts that are token numbers.

    A greedy run takes the likeliest of what its sampling leaves; `forbidden` has the codes that a token cannot be.
    """

    given: dict[str, Any]
    expected: dict[str, Tensor]
    model: Decoder
    numbers: FramedTokens
    prompts: list[str]
    settings: TokenSampling
    forbidden: Callable[[int], Tensor] | None = None

    def spec(self, room: int, branches: int) -> ModelSpec:
        config = self.model.config
        equal = branches == 1 or self.forbidden is None
        return config.describe("tiny", config.segments(room), branches, equal_branches=equal)

    def draw(
        self, prompts: Sequence[str], room: int, cache: Any, noise: Any, sampling: TokenSampling
    ) -> Tensor:
        rows, padding = lay_out(prompts, self.numbers, room, guided=sampling.branches > 1)
        x, head = self.model.tok_embeddings(rows), ImageHead(sampling, self.forbidden)
        segments = self.model.config.segments(room)
        return draw_tokens(self.model, x, segments, cache, noise, head, padding=padding).tokens

    def count(self, prompt: str) -> int:
        return len(self.numbers.encode(prompt))


def own_tensors(tensors: dict[str, Tensor], run: str) -> dict[str, Tensor]:
    return {name.removeprefix(f"{run}."): one for name, one in tensors.items() if name.startswith(f"{run}.")}


def forbid_words(numbers: FramedTokens, vocabulary: int) -> Callable[[int], Tensor]:
    codes = F.pad(numbers.codes, (0, vocabulary - len(numbers.codes)), value=-1)
    return forbid(codes, numbers.newline, 7)


def open_janus(case: str) -> Run:
    kind, run = case.split(".")
    given = janus.meta()["cases"][case]
    settings = LlamaGenSampling(given["cfg"], temperature=given["temperature"], top_k=0)
    prompts = [janus.prompt_of(kind, run)] * given["B"]
    tensors = own_tensors(janus.golden(kind), run)
    return Run(given, tensors, janus.language_model(kind), janus.read_numbers(), prompts, settings)


def open_lumina(run: str) -> Run:
    given, numbers = lumina.meta()["cases"][run], lumina.read_numbers()
    settings = LuminaSampling(given["cfg"], temperature=given["temperature"], top_k=given["image_top_k"])
    forbidden, prompts = forbid_words(numbers, 8832), [lumina.prompt_of(run)]
    tensors = own_tensors(lumina.golden(), run)
    return Run(given, tensors, lumina.language_model(), numbers, prompts, settings, forbidden)


def open_emu3(run: str) -> Run:
    given, numbers = emu3.meta()["cases"][run], emu3.read_numbers()
    settings = TokenSampling(given["cfg"], top_k=given["top_k"])
    prompts = [emu3.prompt_of()] * given["prompts"]
    given = {**given, "mode": "greedy" if given["seed"] is None else "sampled"}
    forbidden = forbid_words(numbers, emu3.CONFIG.vocabulary)
    tensors = own_tensors(emu3.golden(), run)
    return Run(given, tensors, emu3.language_model(), numbers, prompts, settings, forbidden)


OPEN = {"janus": open_janus, "lumina": open_lumina, "emu3": open_emu3}
CASES = {"janus": janus.meta()["cases"], "lumina": lumina.meta()["cases"], "emu3": emu3.meta()["cases"]}
FIRST = {"janus": "mha.greedy_cfg5", "lumina": "greedy_cfg4", "emu3": next(iter(CASES["emu3"]))}
DECODERS = {"janus": janus.tokenizer, "lumina": lumina.tokenizer, "emu3": emu3.tokenizer}
Pairs = Iterator[tuple[Tensor, Tensor, float]]
"""Found and official tensors, and the tolerance."""


def count_kept(run: Run, guided: list[Tensor]) -> Tensor:
    """Codes that truncation leaves, [tokens, images]."""
    assert run.forbidden is not None
    masked = [one.masked_fill(run.forbidden(token), -math.inf) for token, one in enumerate(guided)]
    return torch.stack([truncate(one, run.settings).isfinite().sum(-1) for one in masked])


def compare_janus(run: Run, seen: Recorded, guided: list[Tensor]) -> Pairs:
    expected = run.expected
    yield torch.stack(guided), expected["cfg_logits"], 1e-4
    for name, parts in (("raw_logits", seen.logits), ("hidden", seen.hidden)):
        if name in expected:
            # Janus' program has sequences of both branches in turns.
            yield torch.stack(torch.stack(parts).chunk(2, 1), 2).flatten(1, 2), expected[name], 1e-4


def compare_lumina(run: Run, seen: Recorded, guided: list[Tensor]) -> Pairs:
    expected, start = run.expected, len(run.given["forced"])
    kept = count_kept(run, guided)[:, 0]
    yield kept, expected["kept_counts"][start : start + TOKENS].to(kept), 0
    for row, branch in enumerate(("cond", "uncond")):
        if f"{branch}_hidden" in expected:
            hidden = torch.stack(seen.hidden, 1)[row]
            yield hidden, expected[f"{branch}_hidden"][start : start + TOKENS], 1e-5
    for step in (0, 7):
        if f"step{step}.raw" in expected:
            yield seen.logits[step][0], expected[f"step{step}.raw"], 1e-4
            yield guided[step][0], expected[f"step{step}.cfg"], 1e-4


def compare_emu3(run: Run, seen: Recorded, guided: list[Tensor]) -> Pairs:
    logits, count = torch.stack(seen.logits), len(run.prompts)
    yield logits[:, :count], run.expected["logits"][:TOKENS], 1e-4
    if run.settings.branches > 1:
        yield logits[:, count:], run.expected["negative_logits"][:TOKENS], 1e-4
    if run.given["mode"] != "greedy":
        kept = count_kept(run, guided)
        yield kept, run.expected["kept_counts"][:TOKENS].to(kept), 0


COMPARE = {"janus": compare_janus, "lumina": compare_lumina, "emu3": compare_emu3}


@pytest.mark.parametrize(
    ("family", "case"), [(family, case) for family, cases in CASES.items() for case in cases]
)
def test_prompts_give_the_official_tokens(family: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OPEN[family](case)
    seen, count, greedy = Recorded(run.model, monkeypatch), len(run.prompts), run.given["mode"] == "greedy"
    sampling = replace(run.settings, top_k=1) if greedy else run.settings
    room = run.count(run.prompts[0])
    if family == "emu3":
        room = max(room, len(run.numbers.drop_condition([])) * (sampling.branches > 1)) + 2
    cache = open_cache(Full(), run.spec(room, sampling.branches))
    noise = Silence(count) if greedy else OneStream(run.given["seed"], count)
    tokens = run.draw(run.prompts, room, cache, noise, sampling)
    official = run.expected["tokens"].view(count, -1)[:, len(run.given.get("forced", ())) :]
    assert torch.equal(tokens, official[:, : tokens.shape[1]])
    guided = [guide(logits, run.settings, token) for token, logits in enumerate(seen.logits)]
    for found, expected, atol in COMPARE[family](run, seen, guided):
        close(found, expected, atol)
    if "image_u8" in run.expected:
        codes = tokens.unflatten(1, (4, -1))
        codes = codes if run.numbers.codes is None else run.numbers.codes[codes[..., :-1]]
        images = DECODERS[family]().decode(DECODERS[family]().codes(codes))
        if "pixels" in run.expected:
            close(images.clamp(-1, 1), run.expected["pixels"].clamp(-1, 1))
        pixels = ((images.clamp(-1, 1) + 1) / 2 * 255).to(torch.uint8).permute(0, 2, 3, 1)
        expected = run.expected["image_u8"].reshape(pixels.shape)
        assert (pixels.int() - expected.int()).abs().max() <= 1
        assert (pixels != expected).float().mean() < 1e-2


def find_prompts(family: str, run: Run) -> list[str]:
    """A short prompt, the one of the run, and a long one."""
    if family == "janus":
        return [janus.prompt_of("mha", name) for name in ("greedy_long", "greedy_cfg5")]
    words = run.prompts[0].split()
    end = words[run.count(run.prompts[0]) - 4 :]
    return [" ".join(words[:2] + end), run.prompts[0], " ".join(words[:5] * 2 + end)]


@pytest.mark.parametrize("family", OPEN)
def test_unequal_prompts_are_drawn_as_alone(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = OPEN[family](FIRST[family])
    seen, sampling = Recorded(run.model, monkeypatch), replace(run.settings, top_k=1)
    prompts, branches = find_prompts(family, run), sampling.branches
    lengths = [run.count(prompt) for prompt in prompts]
    dropped = [len(run.numbers.drop_condition(run.numbers.encode(prompt))) for prompt in prompts]
    assert len(set(lengths)) == len(prompts)
    room = max(*lengths, *dropped) + 3
    cache = open_cache(Full(), run.spec(room, branches))
    tokens = run.draw(prompts, room, cache, Silence(len(prompts)), sampling)
    together = torch.stack(seen.logits)
    for index, prompt in enumerate(prompts):
        seen.logits.clear()
        alone = run.draw([prompt], max(lengths[index], dropped[index]), PlainCache(), Silence(), sampling)
        assert torch.equal(alone[0], tokens[index])
        close(together[:, index :: len(prompts)], torch.stack(seen.logits))
    if family == "janus":  # the last row is never held
        assert cache.ledger.peak_tokens == 3 * 4 * (max(lengths) + 15 - 3)


def test_a_rectangle_is_decoded_as_officially() -> None:
    expected = {"janus": janus.golden("mha"), "lumina": lumina.golden(), "emu3": emu3.golden()}
    for family, codes, pixels, shape, atol in (
        ("janus", "decode.codes", "decode.rect_4x6_fp32", (2, 4, 6), 1e-4),
        ("lumina", "vq.codes_4x6", "vq.pixels", (1, 4, 6), 1e-5),
        ("emu3", "vq.codes", "vq.pixels", (2, 3, 5), 1e-4),
    ):
        tokenizer, known = DECODERS[family](), expected[family]
        entries = tokenizer.codes(known[codes].reshape(shape))
        if family == "janus":
            close(entries, known["decode.codebook_entry"], 1e-6)
        images = tokenizer.decode(entries)
        assert images.std() > 0.1
        close(images, known[pixels], atol)


def test_head_embedding_and_guidance_of_janus_are_the_official_ones() -> None:
    model, expected = janus.language_model("mha"), janus.golden("mha")
    sampling = LlamaGenSampling(5.0, top_k=0)
    close(model.gen_head(expected["head.in"]), expected["head.out"], 1e-5)
    close(model.embed(expected["embed.ids"]), expected["embed.out"], 1e-5)
    blocked = torch.cat((expected["bf16.raw"][::2], expected["bf16.raw"][1::2]))
    mixed = guide(blocked, sampling, 0)
    assert torch.equal(mixed, expected["bf16.mix"])
    assert torch.equal(truncate(mixed, sampling).softmax(-1), expected["bf16.probs"])
    for wide, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        half = Janus(replace(janus.CONFIGS["mha"], wide_logits=wide)).bfloat16()
        assert half.logits(torch.zeros(1, 64, dtype=torch.bfloat16)).dtype == dtype


@pytest.mark.parametrize("kind", ["mp2_gqa", "swin"])
def test_rarer_models_give_the_official_logits(kind: str) -> None:
    model, config = lumina.language_model(kind), lumina.CONFIGS[kind]
    ids, found = lumina.golden()[f"{kind}.ids"], []
    segments = next_token(4, [3, 2])
    cache = open_cache(Full(), config.describe("rare", segments, 1))
    cache.reset(len(ids))
    rotation = model.rotations(9)
    for segment in segments:
        cache.begin(segment)
        size = 1 if segment.index else segment.length
        for start in range(segment.start, segment.end, size):
            part = slice(start, start + size)
            found.append(model.logits(model(model.embed(ids[:, part]), rotation[part], cache.attend)))
    close(torch.cat(found, 1), lumina.golden()[f"{kind}.logits"], 1e-5)


def test_deciders_for_both_branches_are_refused() -> None:
    run = open_lumina("greedy_cfg4")
    for method in (SnapKV(branch_mode="mean"), H2O(branch_mode="conditional")):
        mode = method.branch_mode
        message = rf"^method\.branch_mode={mode}: .*unequal length; use method\.branch_mode=per_row$"
        with pytest.raises(ValueError, match=message):
            prepared(method, run.spec(12, 2), "0.7")
    prepared(SnapKV(branch_mode="mean"), run.spec(12, 1), "0.7")


def test_truncation_comes_before_the_temperature() -> None:
    logits = torch.tensor([[4 - 2**-21, 4 - 3 * 2**-22, 1.0]])  # equal once divided by 3
    assert logits[0, 0] > logits[0, 1]
    assert (logits / 3)[0, 0] == (logits / 3)[0, 1]
    kept = truncate(logits, LuminaSampling(temperature=3.0, top_k=1))
    assert kept.isfinite().tolist() == [[True, False, False]]
    assert kept[0, 0] == logits[0, 0] / 3
