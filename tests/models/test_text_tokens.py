"""Tokenizers of texts: lists of words, spaces of decoded texts, and those that put a space before every text."""

import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbench.models.files.checkpoints import WeightsError
from kvbench.models.files.weights import Source
from kvbench.models.text_tokens import ChatTokenizer, TextTokenizer, WordTokens, read_tokenizer
from kvbench.prompts.retrieval import Passkey, PlantedFacts
from kvbench.prompts.text_files import read_shipped

WORDS = ("<pad>", "<end>", "\n1", "\n12", " a", " a<", "do")


@given(st.lists(st.sampled_from(WORDS[2:]), max_size=12))
def test_texts_of_words_come_back(words: list[str]) -> None:
    tokenizer, text = WordTokens(WORDS), "".join(words)
    tokens = tokenizer.encode(text)
    assert tokens == [WORDS.index(word) for word in words]
    assert tokenizer.decode([0, *tokens, 1, 0]) == text


def test_what_is_no_word_and_no_list_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"prompt 'do a<x'\.\.\.: 'x' is not in the model's vocabulary"):
        WordTokens(WORDS).encode("do a<x")
    with pytest.raises(ValueError, match="is not in the model"):
        WordTokens(WORDS).encode("<end>")
    source = Source("model.sources.weights", str(tmp_path))
    for words in (["<pad>", "<end>"], [*WORDS, "do"]):
        (tmp_path / "vocabulary.json").write_text(json.dumps(words))
        with pytest.raises(WeightsError, match=r"model\.sources\.weights: .*three words or more"):
            read_tokenizer(source, thinking=True)
    (tmp_path / "vocabulary.json").write_text(json.dumps(WORDS))
    assert read_tokenizer(source, thinking=True).encode("do a") == [6, 4]


def test_decoded_texts_keep_their_spaces(tmp_path: Path) -> None:
    """Although the file asks for a clean-up, which transformers below 5.3 does for every kind of tokenizer."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    text = "x != y , it 's ! do n't ?"
    vocabulary = {word: number for number, word in enumerate(["<end>", *dict.fromkeys(text.split())])}
    reader = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<end>"))
    reader.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=reader, eos_token="<end>", clean_up_tokenization_spaces=True
    ).save_pretrained(tmp_path)
    tokenizer = ChatTokenizer(tmp_path, thinking=False, chat=False)
    assert tokenizer.decode(tokenizer.encode(text)) == text


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
    letters, special = pre.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=letters, show_progress=False
    )
    whole.train_from_iterator(texts(), trainer)
    return whole


def legacy(whole: Any, spaced: bool) -> None:
    """Llama 1 and 2, Mistral 0.1, TinyLlama, Phi-3."""
    steps = [normalizers.Prepend(MARK)] * spaced + [normalizers.Replace(" ", MARK)]
    whole.normalizer = normalizers.Sequence(steps)


def metaspace(whole: Any, spaced: bool) -> None:
    whole.pre_tokenizer = pre.Metaspace(MARK, prepend_scheme="first" if spaced else "never", split=False)


def byte_level(whole: Any, spaced: bool) -> None:
    whole.pre_tokenizer = pre.ByteLevel(add_prefix_space=spaced)


KINDS = {
    "legacy": (train_pieces, legacy), "first": (train_pieces, metaspace), "bytes": (train_bytes, byte_level)
}  # fmt: skip


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


def test_scored_tokens_decode_to_the_answer(pair: Pair) -> None:
    for source in (Passkey(count=3, context=512), PlantedFacts(count=2, asked="after")):
        for prompt in source.load():
            laid = prompt.reading.tokenize(lambda text, first: pair.spaced.encode_part(text, first=first))
            given, answer = laid.tokens[: laid.given], str(prompt.meta["answer"])
            assert laid.given == source.context
            assert pair.spaced.decode(given).endswith(prompt.reading.parts[-2].text)
            assert pair.spaced.decode(laid.tokens) == pair.spaced.decode(given) + answer
            assert "".join(pair.spaced.token_strings(laid.tokens[laid.given :])) == answer


def test_a_text_begins_as_the_tokenizer_begins_it_and_words_keep_their_spaces(pair: Pair) -> None:
    text = "The pass key is 12 345."
    tokens = pair.official(text)["input_ids"]
    assert pair.spaced.encode_part(text, first=True) == tokens
    assert "".join(pair.spaced.token_strings(tokens)) == f" {text}"
    assert pair.spaced.encode("Hi") == pair.official.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, return_dict=False
    )


def write_slow(folder: Path, kind: str) -> TextTokenizer:
    """A tokenizer of transformers that does not tell where its tokens begin."""
    settings = {"tokenizer_class": kind, "eos_token": "</s>", "unk_token": "<unk>"}
    words = {word: number for number, word in enumerate(("<unk>", "</s>", "a", "b@@", "a@@", "b"))}
    files = {"tokenizer_config": settings, "vocab": words, "config": {"model_type": "llama"}}
    for name, content in files.items():
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
