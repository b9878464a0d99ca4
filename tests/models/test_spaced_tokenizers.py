"""Tokenizers that put a space before every text, beside the same ones without it."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvbench.models.files.weights import Source
from kvbench.models.text_tokens import TextTokenizer, read_tokenizer
from kvbench.prompts.retrieval import Passkey, PlantedFacts, Retrieval
from kvbench.prompts.text_files import read_shipped

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
normalizers, pre, decoders = tokenizers.normalizers, tokenizers.pre_tokenizers, tokenizers.decoders
MARK = "▁"
LETTERS = "abcthe  \n\n\t.,'12890éß中🙂-("
TEMPLATE = "{{ bos_token }}[user] {{ messages[0]['content'] }}{{ eos_token }}\n[answer]"


class Pair(NamedTuple):
    """A tokenizer with a space before every text, read from a folder, and the same one without."""

    spaced: TextTokenizer
    plain: Any
    official: Any

    def encode_plain(self, text: str) -> list[int]:
        return list(self.plain.encode(text, add_special_tokens=False).ids)


def texts() -> list[str]:
    return [
        text[:4000] for domain in ("manuals", "code") for text, _ in read_shipped(domain, "calibration")[:8]
    ]


def train_pieces() -> Any:
    """BPE of pieces with `▁` for a space; what is none of them is spelled in bytes, as SentencePiece does it."""
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = pre.Metaspace(MARK)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=700, limit_alphabet=80, show_progress=False)
    trained.train_from_iterator(texts(), trainer)
    model = json.loads(trained.to_str())["model"]
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    words = {piece: number for number, piece in enumerate(pieces)}
    merges = [tuple(merge) for merge in model["merges"]]
    bpe = tokenizers.models.BPE(words, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    whole = tokenizers.Tokenizer(bpe)
    whole.decoder = decoders.Sequence(
        [decoders.Replace(MARK, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return whole


def train_bytes() -> Any:
    """Byte-level BPE, as in GPT-2."""
    whole = tokenizers.Tokenizer(tokenizers.models.BPE())
    whole.pre_tokenizer, whole.decoder = pre.ByteLevel(), decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    whole.train_from_iterator(texts(), trainer)
    return whole


def legacy(whole: Any, spaced: bool) -> None:
    """Llama 1 and 2, Mistral 0.1, TinyLlama, Phi-3."""
    steps = [normalizers.Prepend(MARK)] * spaced + [normalizers.Replace(" ", MARK)]
    whole.normalizer = normalizers.Sequence(steps)


def metaspace(scheme: str, split: bool) -> Callable[[Any, bool], None]:
    def change(whole: Any, spaced: bool) -> None:
        whole.pre_tokenizer = pre.Metaspace(MARK, prepend_scheme=scheme if spaced else "never", split=split)

    return change


def byte_level(whole: Any, spaced: bool) -> None:
    whole.pre_tokenizer = pre.ByteLevel(add_prefix_space=spaced)


KINDS = {
    "legacy": (train_pieces, legacy),
    "always": (train_pieces, metaspace("always", True)),
    "first": (train_pieces, metaspace("first", False)),
    "bytes": (train_bytes, byte_level),
}


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    train, change = KINDS[request.param]
    spaced = train()
    plain = tokenizers.Tokenizer.from_str(spaced.to_str())  # two trainings may differ in ties
    change(spaced, True)
    change(plain, False)
    official = transformers.PreTrainedTokenizerFast(
        tokenizer_object=spaced, bos_token="<s>", eos_token="</s>"
    )
    official.chat_template = TEMPLATE
    folder = tmp_path_factory.mktemp(request.param)
    official.save_pretrained(folder)
    return Pair(read_tokenizer(Source("weights", str(folder)), thinking=False), plain, official)


def test_a_later_part_gets_no_space(pair: Pair) -> None:
    rng, pieces = random.Random(0), texts()
    cut = [rng.choice(pieces)[rng.randrange(3000) :][: rng.randint(1, 60)] for _ in range(300)]
    front = pair.spaced.encode_part("Hi", first=True)
    assert pair.spaced.spaced
    for text in ["", *cut, *("".join(rng.choices(LETTERS, k=rng.randint(1, 9))) for _ in range(300))]:
        tokens = pair.spaced.encode_part(text, first=False)
        assert tokens == pair.encode_plain(text)
        assert pair.spaced.decode([*front, *tokens]).lstrip(" ") == f"Hi{text}"


@pytest.mark.parametrize("source", [Passkey(count=3, context=512), PlantedFacts(count=2, asked="after")])
def test_scored_tokens_decode_to_the_answer(pair: Pair, source: Retrieval) -> None:
    for prompt in source.load():
        laid = prompt.reading.tokenize(lambda text, first: pair.spaced.encode_part(text, first=first))
        given, answer = laid.tokens[: laid.given], str(prompt.meta["answer"])
        assert laid.given == source.context
        assert pair.spaced.decode(given).endswith(prompt.reading.parts[-2].text)
        assert pair.spaced.decode(laid.tokens) == pair.spaced.decode(given) + answer
        assert "".join(pair.spaced.token_strings(laid.tokens[laid.given :])) == answer
        for part in prompt.reading.parts[1:]:
            assert pair.spaced.encode_part(part.text, first=False) == pair.encode_plain(part.text)


def test_a_text_begins_as_the_tokenizer_begins_it(pair: Pair) -> None:
    text = "The code is 12."
    assert pair.spaced.encode_part(text, first=True) == pair.official(text)["input_ids"]
    assert pair.spaced.encode("Hi") == pair.official.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )


def test_words_keep_their_spaces(pair: Pair) -> None:
    text = "The pass key is 12 345."
    assert "".join(pair.spaced.token_strings(pair.official(text)["input_ids"])) == f" {text}"


def write_slow(folder: Path, kind: str) -> TextTokenizer:
    """A tokenizer of transformers that does not tell where its tokens begin."""
    settings = {"tokenizer_class": kind, "eos_token": "</s>", "unk_token": "<unk>"}
    words = {word: number for number, word in enumerate(("<unk>", "</s>", "a", "b@@", "a@@", "b"))}
    for name, content in {
        "tokenizer_config": settings,
        "vocab": words,
        "config": {"model_type": "llama"},
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return read_tokenizer(Source("model.sources.weights", str(folder)), thinking=False, chat=False)


def test_a_tokenizer_without_offsets_is_read_if_its_parts_join(tmp_path: Path) -> None:
    joined = write_slow(tmp_path, "ByT5Tokenizer")
    assert joined.encode_part("ab", first=False) == [100, 101]
    words = write_slow(tmp_path, "CTRLTokenizer")
    assert words.encode_part("a", first=True) == [2]
    with pytest.raises(ValueError, match=r"^the tokenizer puts a space .* a folder with tokenizer\.json$"):
        words.encode_part("a", first=False)
