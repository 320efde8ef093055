"""Patches: which tokens lie where on an image, for models that see in different ways, and the image itself, small."""

import base64

import numpy
import pytest
import torch
import transformers
from torch import nn

import attemper
from folders import tokenizer
from watched import Block

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
SEES = {**SIZES, "image_size": 24, "patch_size": 8}


def vit(**options):
    return transformers.ViTModel(transformers.ViTConfig(**SEES, **options)).eval()


def scanned(model, batch, **options):
    return attemper.scan(model, batch, **options).document


@pytest.mark.parametrize(
    ("model", "first"),
    [
        (vit, 1),
        (lambda: transformers.DeiTModel(transformers.DeiTConfig(**SEES)), 2),
        (lambda: transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**SEES)), 0),
        (lambda: transformers.Dinov2WithRegistersModel(transformers.Dinov2WithRegistersConfig(**SEES)), 5),
    ],
    ids=["vit", "deit", "siglip", "registers"],
)
def test_tokens_behind_the_models_own_are_patches(model, first):
    document = scanned(model().eval(), {"pixel_values": torch.rand(1, 3, 24, 24)})
    found = {(entry["queries"], entry["keys"]): entry.get("patches") for entry in document["attention"]}
    assert found.pop((9 + first, 9 + first)) == {"rows": 3, "columns": 3, "first": first}
    assert not any(found.values())  # SigLIP ends with one query that pools
    assert [image["input"] for image in document["images"]] == [0]


def test_an_image_need_not_be_square():
    batch = {"pixel_values": torch.rand(1, 3, 16, 40), "interpolate_pos_encoding": True}
    assert scanned(vit(), batch)["attention"][0]["patches"] == {"rows": 2, "columns": 5, "first": 1}


def test_of_two_towers_the_one_that_sees_has_patches():
    config = transformers.CLIPConfig(
        text_config={**SIZES, "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 2},
        vision_config=SEES,
        projection_dim=8,
    )
    words = tokenizer()("the dog chased the ball . the cat", return_tensors="pt")["input_ids"]
    assert words.shape[1] == 10  # as many as there are patches and a class token
    document = scanned(
        transformers.CLIPModel(config).eval(), {"input_ids": words, "pixel_values": torch.rand(1, 3, 24, 24)}
    )
    assert {(entry["layer"].split(".")[0], "patches" in entry) for entry in document["attention"]} == {
        ("text_model", False),
        ("vision_model", True),
    }


class Seeing(nn.Module):
    """A model without a config: a convolution, tokens of its own, attention."""

    def __init__(self, stride, extra):
        super().__init__()
        self.cut = nn.Conv2d(1, 16, 4, stride)
        self.extra, self.block = extra, Block()

    def forward(self, x):
        found = self.cut(x).flatten(2).mT
        return self.block(torch.cat([found.new_ones(len(found), self.extra, 16), found], 1))


@pytest.mark.parametrize(("stride", "extra", "known"), [(4, 0, True), (4, 8, True), (4, 9, False), (2, 1, False)])
def test_what_is_not_known_to_be_patches_is_not_called_so(stride, extra, known):
    document = scanned(Seeing(stride, extra), torch.randn(1, 1, 12, 20))
    assert [entry.get("patches") for entry in document["attention"]] == [
        {"rows": 3, "columns": 5, "first": extra} if known else None
    ]
    assert ("images" in document) is known


def pixels(image):
    raw = numpy.frombuffer(base64.b64decode(image["data"]), dtype=numpy.uint8)
    return raw.reshape(image["height"], image["width"], 3)


def test_the_image_is_small_and_as_people_see_it(folder, tmp_path):
    from PIL import Image

    from attemper.scan.input.batch import make
    from attemper.scan.input.model import load
    from attemper.scan.run import run

    whole = numpy.zeros((40, 40, 3), dtype=numpy.uint8)
    whole[:, :20], whole[:, 20:] = (255, 0, 51), (0, 128, 255)
    Image.fromarray(whole).save(tmp_path / "two.png")
    loaded = load(folder("vit"))
    found = run(loaded, make(loaded, images=[str(tmp_path / "two.png")]))
    (image,) = found.document["images"]
    assert pixels(image)[8, 0].tolist() == [255, 0, 51]
    assert pixels(image)[8, -1].tolist() == [0, 128, 255]
    assert "images" in found.to_dict(attention=True)
    assert "images" not in found.to_dict()


def test_an_image_of_ones_own_is_stretched_and_bounded():
    given = torch.full((1, 1, 300, 200), -2.0)
    given[:, :, 150:] = 3.0
    model = Seeing(4, 1)
    model.cut = nn.Conv2d(1, 16, 100, 100)
    (image,) = scanned(model, given)["images"]
    assert (image["width"], image["height"]) == (59, 88)
    assert len(image["data"]) <= 31_000
    shown = pixels(image)
    assert (shown[0, 0, 0], shown[-1, -1, 2]) == (0, 255)
    assert (shown[..., 0] == shown[..., 1]).all()
