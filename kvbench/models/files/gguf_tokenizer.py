"""Byte-level BPE tokenizers, chat templates and settings of generation in GGUF files, as transformers has them."""

from typing import TYPE_CHECKING

from kvbench.models.files.gguf import Gguf

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2"), (GPT2,)),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), (r"\p{N}", GPT2)),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "dbrx", "smaug-bpe"), (LLAMA3,)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), (QWEN2,)),
}
"""Patterns by `tokenizer.ggml.pre`, applied one after another to what earlier patterns left whole.

They follow llama.cpp's `src/llama-vocab.cpp`; its spelled-out cases are `(?i:...)` here.
"""
WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3"})
"""Values of `tokenizer.ggml.pre` that encode known words without merges, and by default begin texts with `bos`."""
CONTROL, USER_DEFINED = 3, 4
"""Types of tokens that are found before a text is split; control tokens may be skipped in decoding."""
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
END_TOKENS = ("<|endoftext|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>")
"""Names of control tokens that end a text, as in llama.cpp's vocabulary."""
SAMPLING = {
    "general.sampling.temp": "temperature", "general.sampling.top_k": "top_k", "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p", "general.sampling.penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Names of transformers for the sampling that a file's authors recommend."""


def make_generation_config(file: Gguf) -> dict[str, object]:
    """Return a file's stop tokens and sampling under the keys of transformers' generation_config.json.

    Control tokens with a name of `END_TOKENS` are stop tokens too.

    Raises:
        ValueError: the file has no list of tokens.
    """
    values, prefix = file.metadata, "tokenizer.ggml."
    tokens, kinds = values.get(f"{prefix}tokens"), values.get(f"{prefix}token_type", [])
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        raise ValueError(f"it has no lists {prefix}tokens and {prefix}token_type")
    ends = [values[f"{prefix}{key}"] for key in END_KEYS if f"{prefix}{key}" in values]
    typed = zip(tokens, kinds, strict=False)
    ends += [index for index, (token, kind) in enumerate(typed) if kind == CONTROL and token in END_TOKENS]
    found = {name: values[key] for key, name in SAMPLING.items() if key in values}
    if "temperature" in found:
        found["do_sample"] = found["temperature"] != 0
    return {"eos_token_id": ends, **found}


def make_tokenizer(file: Gguf) -> "PreTrainedTokenizerFast":
    """Return the tokenizer of a file, with its chat template if it has one.

    Raises:
        ImportError: the `text` extra is not installed.
        ValueError: the kind of tokenizer is not supported, or a key is missing or of a wrong type.
    """
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    for key in ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_sep_token"):
        if file.metadata.get(key, False) is not False:
            raise ValueError(
                f"{key} is {file.metadata[key]!r:.60}, must be false: an answer follows the prompt"
            )
    kind, tokens = _find_kind(file), _find_strings(file, "tokens")
    ids = _find_special(file, len(tokens))
    special = {name: tokens[index] for name, index in ids.items()}
    template = file.metadata.get("tokenizer.chat_template")
    if not isinstance(template, str | None):
        raise ValueError("tokenizer.chat_template is not a string")
    tokenizer = _build(file, kind, tokens)
    first = special.get("bos_token")
    if first is not None and file.metadata.get("tokenizer.ggml.add_bos_token", kind in WHOLE_WORDS):
        tokenizer.post_processor = TemplateProcessing(
            single=[first, "$A"], special_tokens=[(first, ids["bos_token"])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=template, clean_up_tokenization_spaces=False, **special
    )


def _find_special(file: Gguf, count: int) -> dict[str, int]:
    """Return the ids of special tokens by transformers' names; `count` is the size of the vocabulary."""
    names = {"bos_token": "bos", "eos_token": "eos", "pad_token": "padding", "unk_token": "unknown"}
    keys = {name: f"tokenizer.ggml.{part}_token_id" for name, part in names.items()}
    found = {}
    for name, key in keys.items():
        if (number := file.metadata.get(key)) is None:
            continue
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
            raise ValueError(f"{key} is {number!r:.60}, must be a token id below {count}")
        found[name] = number
    return found


def _build(file: Gguf, kind: str, tokens: list[str]) -> "Tokenizer":
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: index for index, token in enumerate(tokens)}
    pairs = [merge.partition(" ")[::2] for merge in _find_strings(file, "merges")]
    unknown = [pair for pair in pairs if not vocabulary.keys() >= {*pair, "".join(pair)}]
    if unknown:
        raise ValueError(f"tokenizer.ggml.merges: {unknown[0]!r:.60} are not two tokens that join to a third")
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs, ignore_merges=kind in WHOLE_WORDS))
    if SPLITS[kind] == (QWEN2,) and kind != "stablelm2":
        tokenizer.normalizer = normalizers.NFC()  # llama.cpp leaves it out, Qwen's tokenizer.json has it
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS[kind]]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    types = file.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(types, list) or len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type is not a list of {len(tokens)} types")
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=type_ == CONTROL)
            for token, type_ in zip(tokens, types, strict=True)
            if type_ in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def _find_kind(file: Gguf) -> str:
    """Return `tokenizer.ggml.pre`, the name of the patterns that split texts (`SPLITS`)."""
    model, kind = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("model", "pre"))
    if model != "gpt2":
        raise ValueError(f"tokenizer.ggml.model is {model!r:.60}, only gpt2 (byte-level BPE) is supported")
    if not isinstance(kind, str) or kind not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre is {kind!r:.60}, only {', '.join(SPLITS)} are supported")
    return kind


def _find_strings(file: Gguf, name: str) -> list[str]:
    found = file.metadata.get(f"tokenizer.ggml.{name}")
    if not isinstance(found, list) or not found or not isinstance(found[0], str):
        raise ValueError(f"no tokenizer: tokenizer.ggml.{name} must be a list of strings")
    return found  # type: ignore[return-value]  # an array's values are of one type
