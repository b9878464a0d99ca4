"""Least work of a generation, against loops over queries and keys, and what torch counts of a real one."""

import importlib

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from kvbench.core.budget import Budget
from kvbench.core.cards import Card
from kvbench.core.segments import ModelSpec
from kvbench.engine.schedule import predict_row_lengths
from kvbench.engine.work import hold, list_steps, measure_attention, measure_products, measure_writes
from kvbench.methods.full import Full
from kvbench.models.parts.autoencoder import ConvDecoder, NetworkConfig
from kvbench.models.parts.least_work import count_decoding
from kvbench.plan import find_floors, make_plan
from tests.support.engine import D, Drawn, draw_seen, prepared, small
from tests.support.steps import shapes

TOKEN = 2 * D * 2
"""Bytes of a key and a value in 16 bits."""


@pytest.mark.parametrize("spec", [small(), shapes()], ids=["scales", "tokens"])
def test_attention_and_writes_are_those_of_every_query_and_key(spec: ModelSpec) -> None:
    seen, operations, read, written = draw_seen(spec, 3, 0.6), 0, 0, []
    for at in spec.segments:
        past = [int(row.sum()) for row in seen[at.index, ..., : at.start].flatten(0, 1)]
        for step in range(at.length if at.index and at.causal else 1):
            tokens = 1 if at.index and at.causal else at.length
            for held in past:
                for query in range(tokens):
                    keys = held + step + (query + 1 if at.causal else tokens)
                    operations += 2 * D * keys + 2 * D * keys  # q k^T, then its product with the values
                # What is held and pending, the step's own tokens, and as many queries and outputs.
                read += TOKEN * (held + step + tokens) + TOKEN * tokens
        if not at.last:
            after = int(seen[at.index + 1, ..., : at.end].sum())
            came = spec.all_heads * at.length if at.causal else 0
            written.append(TOKEN * max(came, after - sum(past)))
    lengths = predict_row_lengths(spec, prepared(Drawn(seen), spec))
    assert lengths is not None
    held, steps = hold(lengths, TOKEN * lengths.sum(2), TOKEN), list_steps(spec)
    work = measure_attention(spec, steps, held, 1)
    assert (work.operations.sum(), work.bytes.sum()) == (operations, read)
    assert measure_writes(spec, held, 3).bytes.tolist() == [3 * size for size in written]


def test_products_are_those_that_torch_counts() -> None:
    """Those of a text that the embedded language model writes; its attention has no products of its own."""
    load = importlib.import_module("benchmarks.gpu_steps.generations").load
    one = load(["model=reasoner_tiny", "prompts=math_tiny", "model.max_tokens=12"], 1, "cpu")
    spec, least = one.model.spec, one.model.least_work
    cache = one.open_cache(one.prepare(["method=full"], "1"))
    with FlopCounterMode(display=False) as counter:
        one.draw(cache)
    work = measure_products(spec, list_steps(spec), least.layers, least.head, 1)
    assert counter.get_flop_counts()["Global"][torch.ops.aten.mm] == work.operations.sum()
    assert work.bytes.tolist() == [2 * (least.layers + least.head)] * 12


@pytest.mark.parametrize(
    ("name", "layers", "head"),
    [
        ("infinity_2b", 32 * (4 + 2 + 8) * 2048**2, 2048 * 64),
        ("var_d30", 30 * (4 + 8) * 1920**2, 1920 * 4096),
        ("janus_pro_7b", 30 * (4 * 4096**2 + 3 * 4096 * 11008), 4096**2 + 4096 * 16384),
    ],
)
def test_weights_of_products_are_those_of_published_shapes(name: str, layers: int, head: int) -> None:
    """Attention (and half of it over a text), feed-forward and logits."""
    least = importlib.import_module("benchmarks.support.build").build_model(name).least_work
    assert (least.layers, least.head) == (layers, head)


def test_operations_of_a_decoder_are_those_of_its_convolutions() -> None:
    config = NetworkConfig(latents=4, base=32, encoder_widths=(32, 64), decoder_widths=(32, 64), blocks=1)
    decoder, counted = ConvDecoder(config), [0]

    def count(layer: nn.Conv2d, _: object, out: torch.Tensor) -> None:
        counted[0] += 2 * out[0].numel() * layer.in_channels * layer.kernel_size[0] * layer.kernel_size[1]

    for module in decoder.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(count)
    with torch.no_grad():
        decoder(torch.zeros(1, 4, 4, 4))
    expected = counted[0]
    assert count_decoding(decoder.to("meta"), config, 16) == expected > 0


def test_a_floor_is_the_longer_of_operations_and_bytes_in_each_step() -> None:
    model = importlib.import_module("benchmarks.support.build").build_model("llamagen_tiny")
    budget, dtypes = Budget.parse(1, model.spec), (torch.float32, torch.bfloat16)
    plan = make_plan(model, budget, Full(), 2, 80, TOKEN, TOKEN, dtypes)
    rates = {"operations": (1e-12, 1e30), "bytes": (1e30, 1e-9), "both": (1e-12, 1e-9)}
    found = {}
    for name, (tera, giga) in rates.items():
        card, contents = Card(name, tera, tera, giga, "", ""), plan.contents["full"]
        found[name] = find_floors(plan.spec, plan.steps, contents, 2, model.least_work, card)
    assert list(found["both"]) == ["transformer", "attention", "cache writes", "decoder"]
    for phase, floor in found["both"].items():
        # TF32, in which this model decodes, has half of the rate.
        operations = floor.operations * (2 if phase == "decoder" else 1)
        seconds = [found[name][phase].seconds for name in ("operations", "bytes")]
        assert seconds == pytest.approx([operations, floor.bytes])
        assert max(seconds) <= floor.seconds <= sum(seconds)
