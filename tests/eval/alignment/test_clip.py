"""CLIP score, HPSv2.1, aesthetics, PickScore, GenEval's colours on tiny random networks, against other ways to them."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from kvbench.eval.alignment import aesthetic
from kvbench.eval.alignment.clip import Clip, ClipScore, read_state
from kvbench.eval.alignment.hps import Hps, preprocess
from kvbench.eval.alignment.pickscore import PickScore
from kvbench.eval.files.images import ImageSet
from kvbench.eval.files.weights import Weight
from kvbench.eval.geneval.colors import COLORS, TEMPLATES, ClipColors, MaskedInstance, color_vectors, cut_out
from kvbench.eval.geneval.mask2former import find_mask_box
from tests.support.image_sets import make_noise, only, reason
from tests.support.marks import needs
from tests.support.tiny import MODEL, tiny_clip

pytestmark = [pytest.mark.usefixtures("offline"), needs("open_clip")]


@pytest.fixture(scope="module")
def clip_weight(tmp_path_factory: pytest.TempPathFactory) -> Weight:
    return tiny_clip(tmp_path_factory.mktemp("clip"))


def by_hand(
    weight: Weight, images: ImageSet, transform: Callable[[np.ndarray], Tensor], *, quick: bool
) -> list[float]:
    """100 x cosine, one image at a time, on a network that open_clip loads itself."""
    import open_clip

    network = open_clip.create_model(MODEL, pretrained=weight.path, force_quick_gelu=quick).eval()
    tokenize = open_clip.get_tokenizer(MODEL)
    found = []
    with torch.no_grad():
        for index in images.indices:
            image = network.encode_image(transform(images.image(index))[None])[0].double()
            text = network.encode_text(tokenize([images.samples[index].prompt]))[0].double()
            found.append(float(100 * image @ text / image.norm() / text.norm()))
    return found


def test_clip_score_is_the_cosine_of_the_named_network(clip_weight: Weight, tmp_path: Path) -> None:
    import open_clip

    images = make_noise(tmp_path / "run", [{}] * 5)
    scorer = ClipScore(model=MODEL, path=clip_weight.path, batch=2, network=clip_weight)
    result = only(scorer, images)
    official = open_clip.image_transform(28, is_train=False)
    cosines = by_hand(clip_weight, images, lambda x: official(Image.fromarray(x)), quick=True)
    assert result.samples[f"clip_score[{MODEL}]"] == pytest.approx([max(c, 0) for c in cosines], abs=1e-4)
    assert result.scores[f"clip_score[{MODEL}]"].value == pytest.approx(
        np.maximum(cosines, 0).mean(), abs=1e-4
    )
    assert result.provenance["weights"] == {"tiny.safetensors": clip_weight.sha256}
    plain = by_hand(clip_weight, images, lambda x: official(Image.fromarray(x)), quick=False)
    assert max(abs(a - b) for a, b in zip(cosines, plain, strict=True)) > 0.05  # the trap is a real one


def test_other_weights_activations_and_what_holds_no_tensors_are_refused(
    clip_weight: Weight, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import open_clip

    save_file({"visual.proj": torch.zeros(3)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match=f"does not hold a {MODEL}"):
        Clip(MODEL, tmp_path / "other.safetensors", "cpu", quick_gelu=True)
    (tmp_path / "page.pt").write_text("<html>not found</html>")
    torch.save([1, 2], tmp_path / "list.pt")
    torch.save(nn.Linear(1, 1), tmp_path / "object.pt")
    for name in ("page", "list", "object"):
        with pytest.raises(ValueError, match=f"{name}.pt (cannot be read|holds no tensors)"):
            read_state(tmp_path / f"{name}.pt")
    create = open_clip.create_model
    monkeypatch.setattr(open_clip, "create_model", lambda name, **_: create(name, load_weights=False))
    with pytest.raises(ValueError, match=f"built {MODEL} with GELU, not QuickGELU"):
        Clip(MODEL, Path(str(clip_weight.path)), "cpu", quick_gelu=True)


@pytest.mark.parametrize("kind", ["plain", "nested", "parallel", "script"])
def test_every_container_of_tensors_is_read(kind: str, tmp_path: Path) -> None:
    layer = nn.Linear(2, 3)
    layer.register_buffer("vocab_size", torch.tensor(7))
    state = {name: value for name, value in layer.state_dict().items() if name != "vocab_size"}
    path = tmp_path / "weights.pt"
    if kind == "script":
        torch.jit.script(layer).save(str(path))
    else:
        names = {f"module.{name}": value for name, value in state.items()} if kind == "parallel" else state
        torch.save({"state_dict": names, "epoch": 3} if kind == "nested" else names, path)
    found = read_state(path, scripted=kind == "script")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize(
    ("meta", "prompts", "why"),
    [({"class": 3}, ["3", "207"], "class numbers"), ({"rewritten_from": "a dog"}, None, "were rewritten")],
)
def test_only_texts_that_the_model_received_have_a_score(
    clip_weight: Weight, tmp_path: Path, meta: dict[str, object], prompts: list[str] | None, why: str
) -> None:
    images = make_noise(tmp_path / "run", [meta] * 2, prompts)
    for evaluator in (
        ClipScore(clip_weight.path, model=MODEL, network=clip_weight),
        Hps(clip_weight.path, model=MODEL),
    ):
        assert why in reason(evaluator, "skipped", images)


def test_code_in_a_file_needs_a_known_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "network.pt"
    torch.jit.script(nn.Linear(1, 1)).save(str(path))
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("its code runs"))
    with pytest.raises(ValueError, match=r"network\.pt is a TorchScript archive"):
        read_state(path)
    images = make_noise(tmp_path / "run", [{}] * 2)
    for evaluator in (Hps(str(path)), ClipScore(path=str(path), network=Weight("network.pt"))):
        assert "its SHA-256 must be known" in reason(evaluator, "failed", images)


# HPSv2.1


@pytest.mark.parametrize(
    ("height", "width", "antialias"), [(50, 21, True), (17, 64, False), (28, 28, True), (9, 14, True)]
)
def test_hps_transform_equals_torchvision(height: int, width: int, antialias: bool) -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms import functional as tv

    image = np.random.default_rng(1).integers(0, 256, (height, width, 3), np.uint8)
    scale = 28 / max(height, width)
    h, w = round(height * scale), round(width * scale)
    x = tv.resize(tv.to_tensor(image), [h, w], InterpolationMode.BICUBIC, antialias=antialias)
    x = tv.pad(x, [(28 - w) // 2, (28 - h) // 2, 28 - w - (28 - w) // 2, 28 - h - (28 - h) // 2])
    x = tv.normalize(x, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    torch.testing.assert_close(preprocess(image, 28, antialias=antialias), x)


def test_hps_scores_by_style(clip_weight: Weight, tmp_path: Path) -> None:
    styles = ["anime", "photo", "anime", "photo", "photo"]
    images = make_noise(tmp_path / "run", [{"style": style} for style in styles])
    result = only(Hps(clip_weight.path, batch=2, model=MODEL), images)
    cosines = by_hand(clip_weight, images, lambda x: preprocess(x, 28, antialias=True), quick=False)
    assert result.samples["hpsv2.1"] == pytest.approx(cosines, abs=1e-4)
    scores = result.scores
    assert set(scores) == {"hpsv2.1", "hpsv2.1/anime", "hpsv2.1/photo"}
    assert scores["hpsv2.1"].value == pytest.approx(np.mean(cosines), abs=1e-4)
    assert scores["hpsv2.1/anime"].value == pytest.approx(np.mean([cosines[0], cosines[2]]), abs=1e-4)
    assert scores["hpsv2.1/photo"].n == 3
    assert f"sha256 {clip_weight.sha256}, expected {'0' * 64}" in reason(
        Hps(clip_weight.path, sha256="0" * 64, model=MODEL), "failed", images
    )


def test_objects_are_cut_out_on_grey() -> None:
    pixels = np.arange(6 * 8 * 3, dtype=np.uint8).reshape(6, 8, 3)
    mask = np.zeros((6, 8), bool)
    mask[1:4, 2:5] = True
    mask[1, 2] = False
    crop = np.array(cut_out(pixels, MaskedInstance("dog", 1.0, find_mask_box(mask), mask=mask)))
    assert crop.shape == (3, 3, 3)
    assert (crop[0, 0] == 0x99).all()
    inside = mask[1:4, 2:5]
    assert (crop[inside] == pixels[1:4, 2:5][inside]).all()
    with pytest.raises(TypeError, match="has none"):
        cut_out(pixels, object())


def test_the_nearest_of_ten_colours_is_named(clip_weight: Weight) -> None:
    classifier = ClipColors(clip_weight.path, MODEL, clip_weight)
    of_image, hashes = classifier.load("cpu")
    assert hashes == {"tiny.safetensors": clip_weight.sha256}
    pixels = np.random.default_rng(2).integers(0, 256, (40, 40, 3), np.uint8)
    masks = [np.zeros((40, 40), bool) for _ in range(6)]
    for number, mask in enumerate(masks):
        mask[number : 10 + 5 * number, 3 * number : 12 + 4 * number] = True
    segments = [MaskedInstance("dog", 1.0, find_mask_box(mask), mask=mask) for mask in masks]
    clip = Clip(MODEL, Path(str(clip_weight.path)), "cpu", quick_gelu=True)
    sentences = torch.stack(
        [clip.texts([t.format(color=c, label="dog") for t in TEMPLATES]).mean(0) for c in COLORS]
    )
    vectors = nn.functional.normalize(sentences, dim=-1)
    torch.testing.assert_close(color_vectors(clip, "dog"), vectors)
    expected = []
    for segment in segments:
        cosines = clip.images(clip.transform(cut_out(pixels, segment))[None])[0] @ vectors.T
        expected.append(COLORS[int(cosines.argmax())])
    assert of_image(pixels)(segments, "dog") == expected


# Networks and heads on CLIP


@torch.no_grad()
def test_aesthetic_ratings_are_those_of_the_authors_layers(clip_weight: Weight, tmp_path: Path) -> None:
    import open_clip

    layers = nn.Sequential(
        *(nn.Linear(8, 12), nn.Dropout(0.2), nn.Linear(12, 6), nn.Dropout(0.2)),
        *(nn.Linear(6, 5), nn.Dropout(0.1), nn.Linear(5, 4), nn.Linear(4, 1)),
    ).eval()
    path = tmp_path / "head.pth"
    torch.save({f"layers.{name}": value for name, value in layers.state_dict().items()}, path)
    images = make_noise(tmp_path / "run", [{}] * 5, ["0", "0", "1", "1", "2"])
    evaluator = aesthetic.Aesthetic(str(path), 2, clip_weight.path, model=MODEL, network=clip_weight)
    result = only(evaluator, images)
    network = open_clip.create_model(MODEL, pretrained=clip_weight.path, force_quick_gelu=True).eval()
    transform = open_clip.image_transform(28, is_train=False)
    expected = []
    for index in images.indices:
        vector = network.encode_image(transform(Image.fromarray(images.image(index)))[None])
        expected.append(float(layers(vector / vector.norm())))
    assert result.samples["iqa[laion-aesthetic-v2]"] == pytest.approx(expected, abs=1e-5)
    assert np.std(expected) > 1e-3
    assert result.scores["iqa[laion-aesthetic-v2]"].value == pytest.approx(np.mean(expected), abs=1e-5)
    torch.save({"layers.0.weight": torch.zeros(2, 2)}, path)
    assert "does not hold LAION's aesthetic predictor: it has no layers.0.bias" in reason(
        evaluator, "failed", images
    )


@needs("transformers")
@torch.no_grad()
def test_pickscore_is_that_of_its_authors(tmp_path: Path) -> None:
    import open_clip
    import transformers

    text = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 2}
    config = transformers.CLIPConfig(
        text_config={**text, "vocab_size": 49408, "eos_token_id": 49407, "bos_token_id": 49406},
        vision_config={**text, "image_size": 28, "patch_size": 14},
        projection_dim=8,
    )
    model = transformers.CLIPModel(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    model.logit_scale.data.fill_(4.5)
    model.save_pretrained(tmp_path / "pickscore")
    prompts = ["a red fox", "two owls on a wall, oil on canvas", "word " * 200]
    images = make_noise(tmp_path / "run", [{}] * 3, prompts, size=40)
    expected = []
    for index, prompt in zip(images.indices, prompts, strict=True):
        resized = np.asarray(Image.fromarray(images.image(index)).resize((28, 28), Image.BICUBIC)) / 255
        pixels = (resized - open_clip.OPENAI_DATASET_MEAN) / open_clip.OPENAI_DATASET_STD
        seen = model.vision_model(torch.from_numpy(pixels).permute(2, 0, 1)[None].float()).pooler_output
        [tokens] = open_clip.get_tokenizer("ViT-H-14")([prompt])
        tokens = tokens[: int((tokens == 49407).nonzero()[0]) + 1]  # without padding
        read = model.text_model(tokens[None]).last_hidden_state[:, -1]
        image, text = model.visual_projection(seen)[0], model.text_projection(read)[0]
        expected.append(float(np.exp(4.5) * image @ text / image.norm() / text.norm()))
    result = only(PickScore(str(tmp_path / "pickscore"), batch=2), images)
    assert result.samples["pickscore"] == pytest.approx(expected, abs=1e-3)
    assert result.scores["pickscore"].value == pytest.approx(np.mean(expected), abs=1e-3)
