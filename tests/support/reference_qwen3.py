"""Qwen3 as transformers has it: small models of random weights, and their logits on prompts of unequal length."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvbench.core.segments import ModelSpec, next_token_image
from kvbench.methods.full import Full
from kvbench.models.noise import PromptNoise
from kvbench.models.parts.text_decoder import TextDecoder
from kvbench.models.qwen3.transformer import Qwen3Config
from kvbench.models.text_model import TextModel
from tests.support.engine import open_cache

VOCABULARY = 97
PAD, END = 0, 1
SHAPE = Qwen3Config(depth=3, width=40, heads=4, kv_heads=2, head_dim=16, hidden=72, vocabulary=VOCABULARY)


def make_official(family: str, settings: Mapping[str, object]) -> Any:
    """transformers' model in float32, its norms, biases and projections random enough to tell any two apart."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**settings)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        for name, parameter in model.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else 1.5 * parameter.shape[-1] ** -0.5
            torch.nn.init.normal_(parameter, mean=float("norm" in name), std=spread)
    return model.requires_grad_(False)


def write_folder(folder: Path) -> Any:
    """Write the folder of a model of `SHAPE` in shards, as the Hub has it, and return the model."""
    model = make_official("Qwen3", {
        "vocab_size": VOCABULARY, "hidden_size": SHAPE.width, "intermediate_size": SHAPE.hidden,
        "num_hidden_layers": SHAPE.depth, "num_attention_heads": SHAPE.heads, "head_dim": SHAPE.head_dim,
        "num_key_value_heads": SHAPE.kv_heads, "rms_norm_eps": SHAPE.eps, "tie_word_embeddings": SHAPE.tied,
        "rope_parameters": {"rope_type": "default", "rope_theta": SHAPE.rope_base},
        "max_position_embeddings": 512, "pad_token_id": PAD, "eos_token_id": END, "bos_token_id": None,
    })  # fmt: skip
    model.save_pretrained(folder, max_shard_size="40KB")
    return model


WORDS = [
    "<pad>", "<end>", "<ask>", "<answer>", "<think>", "</think>", "?", "one", "two", "three", "plus", "is"
]  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}<ask>{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% if not enable_thinking %}<think></think>{% endif %}{% endif %}"
)


def write_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Write a tokenizer of few words whose chat template is shaped like Qwen3's; a word of a number is its token."""
    import tokenizers
    import transformers

    words = WORDS + [str(number) for number in range(len(WORDS), VOCABULARY)]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="?")
    reader = tokenizers.Tokenizer(model)
    reader.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    reader.add_special_tokens(WORDS[:4])
    reader.add_tokens(WORDS[4:6])
    whole = transformers.PreTrainedTokenizerFast(
        tokenizer_object=reader, pad_token="<pad>", eos_token="<end>", unk_token="?"
    )
    whole.chat_template = template
    whole.save_pretrained(folder)


def pad(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Prompts padded in front, int64 [prompts, room], and which tokens exist."""
    room = max(map(len, prompts))
    rows = [[PAD] * (room - len(row)) + [*row] for row in prompts]
    exists = [[0] * (room - len(row)) + [1] * len(row) for row in prompts]
    return torch.tensor(rows), torch.tensor(exists)


def check_greedy(one: TextModel, official: Any) -> None:
    """Check that the likeliest texts after two prompts in the chat template are those of transformers' model."""
    prompts, thought = ["one plus two", "three"], [] if one.thinking else [4, 5]
    asked = [[2, *(WORDS.index(word) for word in prompt.split()), 3, *thought] for prompt in prompts]
    assert [one._text.encode(prompt) for prompt in prompts] == asked
    tokens, exists = pad(asked)
    drawn = official.generate(tokens, attention_mask=exists, do_sample=False, max_new_tokens=30)
    texts = one.generate(prompts, open_cache(Full(), one.spec), PromptNoise(0, range(2)))
    for text, row in zip(texts, drawn[:, tokens.shape[1] :].tolist(), strict=True):
        length = row.index(END) + 1 if END in row else len(row)
        assert (text.tokens, text.ended, text.text) == (length, END in row, one._text.decode(row[:length]))


def official_logits(model: Any, prompts: Sequence[Sequence[int]], answers: Tensor) -> Tensor:
    """Logits float32 [prompts, 1 + answers, vocabulary] of each prompt's last token and of all tokens after it."""
    tokens, exists = pad(prompts)
    whole = torch.cat((tokens, answers), 1)
    mask = torch.cat((exists, torch.ones_like(answers)), 1)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    out = model(input_ids=whole, attention_mask=mask, position_ids=positions).logits
    return out[:, tokens.shape[1] - 1 :].float()


def step_logits(
    model: TextDecoder, prompts: Sequence[Sequence[int]], answers: Tensor, dtype: torch.dtype
) -> Tensor:
    """As `official_logits`: the prompts at once, then one token after the other."""
    tokens, exists = pad(prompts)
    room = tokens.shape[1]
    segments = next_token_image(room, answers.shape[1] + 1, 4)
    spec: ModelSpec = model.config.describe("text", segments, 1)
    cache = open_cache(Full(), spec, dtype=dtype)
    rotation, whole = model.rotations(spec.segments[-1].end), torch.cat((tokens, answers), 1)
    padding = (room - exists.sum(1)).tolist()
    cache.reset(len(prompts), padding if any(padding) else None)
    found = []
    for segment in segments:
        cache.begin(segment)
        size = 1 if segment.index else room
        for start in range(segment.start, segment.end, size):
            part = slice(start, start + size)
            hidden = model(model.embed(whole[:, part]), rotation[part], cache.attend)
            found.append(model.logits(hidden[:, -1]))
    return torch.stack(found, 1)
