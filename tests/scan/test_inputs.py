"""Inputs: texts, images and sounds as batches, with tokens that people can read, and a sentence for what cannot be used."""

import json
import os
import struct
import sys
import warnings
import wave
import zlib

import numpy
import pytest
import torch
import transformers
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from attemper.errors import InputError, MissingExtra
from attemper.scan.document import plain
from attemper.scan.input import model as load
from attemper.scan.input.batch import make
from attemper.scan.input.text import VOCABULARIES, WITHOUT_VOCABULARY, FolderTokenizer, limit_of, readable
from close import assert_reordered
from folders import WORDS, save, tokenizer

SENTENCE = "the dog chased the ball ."


@pytest.fixture
def loaded(folder):
    def of(name):
        return load.load(folder(name))

    return of


def refused(*arguments, **options):
    with pytest.raises(InputError) as raised:
        make(*arguments, **options)
    return str(raised.value)


def test_a_text_becomes_tokens_that_people_can_read(loaded):
    (found,) = make(loaded("bert"), texts=[SENTENCE])
    assert plain(found.about()) == {
        "modality": "text",
        "text": SENTENCE,
        "tokens": ["[CLS]", *SENTENCE.split(), "[SEP]"],
        "special": [True, *[False] * 6, True],
        "length": 8,
        "generated": False,
        "truncated": False,
    }
    assert found.batch["input_ids"].tolist() == [[1, 5, 6, 7, 5, 8, 13, 2]]
    assert found.batch["use_cache"] is False
    assert found.notes == []


def test_each_text_is_an_input_of_its_own(loaded):
    found = make(loaded("gpt2"), texts=["the dog", "a cat sat on the mat"])
    assert [one.length for one in found] == [2, 6]
    assert [one.batch["input_ids"].shape for one in found] == [(1, 2), (1, 6)]


def test_without_a_text_it_is_the_dog(loaded):
    assert make(loaded("bert"))[0].text == "The dog chased the ball because it was fast."


def test_unknown_words_are_said(loaded):
    (found,) = make(loaded("bert"), texts=["the xylophone chased a xylophone and <b>"])
    assert found.notes == ["'xylophone', '<', 'b', '>' are not in the vocabulary and became [UNK]."]
    assert found.tokens[2] == "[UNK]"
    assert found.special[2] is False
    assert make(loaded("bert"), texts=["the xylophone"])[0].notes == [
        "'xylophone' is not in the vocabulary and became [UNK]."
    ]


@pytest.mark.parametrize("text", ["", "  \n"])
def test_an_empty_text_is_refused(loaded, text):
    assert "must hold at least one word" in refused(loaded("bert"), texts=[text])


def test_a_text_that_is_too_long_says_the_limit(loaded):
    model = loaded("bert")
    text = " ".join(WORDS * 5)
    sentence = refused(model, texts=[text])
    assert f"the text has {len(WORDS) * 5 + 2} tokens and BertModel has positions for 64" in sentence
    assert "--truncate" in sentence
    (found,) = make(model, texts=[text], truncate=True)
    assert (found.length, found.truncated) == (64, True)
    assert found.tokens[-1] == "[SEP]"
    assert found.special[-1]
    assert "to its first 64 tokens" in found.notes[0]
    model.model(**found.batch)


def test_the_longest_text_that_fits_is_not_refused(loaded):
    (found,) = make(loaded("bert"), texts=[" ".join((WORDS * 4)[:62])])
    assert (found.length, found.truncated) == (64, False)


def test_roberta_counts_its_positions_after_padding():
    config = {"vocab_size": 30, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 1}
    model = transformers.RobertaModel(transformers.RobertaConfig(**config, max_position_embeddings=34)).eval()
    assert limit_of(model) == 32
    model(torch.full((1, 32), 5))
    with pytest.raises((IndexError, RuntimeError)):
        model(torch.full((1, 33), 5))


def test_t5_has_no_limit_and_its_decoder_reads_the_text_behind_its_start(loaded):
    model = loaded("t5")
    assert limit_of(model.model) is None
    (found,) = make(model, texts=[SENTENCE])
    ids = found.batch["input_ids"]
    assert found.batch["decoder_input_ids"].tolist() == [[0, *ids[0].tolist()]]
    model.model(**found.batch)


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    bare = load.load(save(tmp_path / "bare", "bert", with_tokenizer=False))
    sentence = refused(bare, texts=["the dog"])
    assert "has no tokenizer" in sentence
    assert "input_ids" in sentence


@pytest.mark.parametrize("name", WITHOUT_VOCABULARY)
def test_a_tokenizer_of_bytes_or_characters_has_no_file_of_words(tmp_path, name):
    bare = save(tmp_path / "bare", "bert", with_tokenizer=False)
    getattr(transformers, name)().save_pretrained(bare)
    loaded = load.load(bare)
    (path,) = bare.glob("tokenizer_config.json")
    assert not any(next(bare.glob(one), None) for one in VOCABULARIES)
    assert FolderTokenizer(loaded).present()
    tokenizer = FolderTokenizer(loaded).tokenizer()
    assert type(tokenizer).__name__ == name
    assert tokenizer.decode(tokenizer("the dog")["input_ids"], skip_special_tokens=True) == "the dog"
    path.write_text('{"tokenizer_class": "BertTokenizer"}', encoding="utf-8")  # which would be empty
    assert not FolderTokenizer(load.load(bare)).present()


def test_a_broken_tokenizer_is_said(tmp_path):
    broken = save(tmp_path / "broken", "bert")
    (broken / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "Evil"}}')
    assert "the tokenizer of 'broken' could not be loaded" in refused(load.load(broken), texts=["the dog"])


def test_a_tokenizer_of_another_model_is_said(loaded):
    model = loaded("bert")
    other = tokenizer()
    other.add_tokens([f"w{number}" for number in range(100)])
    model.tokenizer = other
    assert "the model has embeddings for 99" in refused(model, texts=["the w99"])


def byte_words(*merged):
    """A GPT-2 with a vocabulary of bytes, and some merged tokens beside them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: index for index, word in enumerate(dict.fromkeys([*letters, *merged, "<s>"]))}
    merges = [(word[:-1], word[-1]) for word in merged]
    inner = Tokenizer(models.BPE(words, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")
    sizes = {"n_layer": 1, "n_head": 1, "n_embd": 4, "vocab_size": len(words), "n_positions": 64}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    return FolderTokenizer(load.Loaded(transformers.GPT2Model(config), "x", "object", tokenizer=fast))


@pytest.mark.parametrize(
    ("text", "merged", "tokens"),
    [
        ("a é\n\t b", (), ["a", "␣", "é (1/2)", "é (2/2)", "↵", "⇥", "␣", "b"]),
        ("👩", (), ["👩 (1/4)", "👩 (2/4)", "👩 (3/4)", "👩 (4/4)"]),
        ("👩", ("ðŁ", "ðŁĳ"), ["👩 (1/2)", "👩 (2/2)"]),
        ("a 👩", ("Ġð", "ĠðŁ", "ĠðŁĳ"), ["a", "👩 (1/2)", "👩 (2/2)"]),
        ("éé", ("©Ã",), ["éé (1/3)", "éé (2/3)", "éé (3/3)"]),  # two letters that share a token
        ("x\ufffd", (), ["x", "\ufffd (1/3)", "\ufffd (2/3)", "\ufffd (3/3)"]),  # a letter as good as any
    ],
)
def test_a_letter_of_several_tokens_stands_in_each_of_them(text, merged, tokens):
    found = byte_words(*merged).encode(text)
    assert found.tokens == tokens
    assert found.special == [False] * len(tokens)


def test_what_nobody_can_see_or_turns_a_line_round_is_written_as_its_number():
    found = byte_words().encode("a\u202eb\x1b").tokens
    assert found == ["a", *(f"⟨U+202E⟩ ({part}/3)" for part in (1, 2, 3)), "b", "⟨U+001B⟩"]


def test_bytes_that_are_no_letter_are_written_as_bytes():
    words = byte_words("ðŁ")
    numbers = words.tokenizer().convert_tokens_to_ids(["©", "ðŁ", "a", "ð", "Ã", "©", "ð", "Ł"])
    assert readable(words.tokenizer(), numbers) == [
        "⟨A9⟩",
        "⟨F0 9F⟩",
        "a",
        "⟨F0⟩",
        "é (1/2)",
        "é (2/2)",
        "⟨F0⟩",
        "⟨9F⟩",
    ]


def test_byte_tokens_of_sentencepiece_are_joined():
    words = {word: index for index, word in enumerate(["<unk>", "▁a", "<0xC3>", "<0xA9>", "<0xF0>"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>")
    assert readable(fast, [1, 2, 3, 4, 1]) == ["a", "é (1/2)", "é (2/2)", "⟨F0⟩", "a"]


def test_a_model_that_sees_gets_a_picture_and_says_so(loaded):
    model = loaded("vit")
    (found,) = make(model)
    assert plain(found.about()) | {"tokens": None} == {
        "modality": "image",
        "text": None,
        "tokens": None,
        "special": None,
        "length": None,
        "generated": True,
        "truncated": False,
    }
    assert "generated" in found.notes[0]
    assert found.batch["pixel_values"].shape == (1, 3, 16, 16)
    model.model(**found.batch)


def test_an_image_is_resized_and_normalised_as_the_folder_says(folder, tmp_path):
    model = load.load(folder("vit"))
    pixels = numpy.zeros((40, 20, 3), dtype=numpy.uint8)
    pixels[:] = (255, 0, 51)
    Image.fromarray(pixels).save(tmp_path / "flat.png")
    (found,) = make(model, images=[str(tmp_path / "flat.png")])
    assert not found.generated
    assert found.notes == ["'flat.png' was resized to 16 × 16 pixels."]
    expected = torch.tensor([1.0, -1.0, -0.6]).view(1, 3, 1, 1).expand(1, 3, 16, 16)
    assert_reordered(found.batch["pixel_values"], expected, terms=4)
    (model.folder / "preprocessor_config.json").write_text('{"image_mean": [0.0, 0.0, 0.1], "image_std": [1, 2, 0.1]}')
    try:
        (found,) = make(model, images=[str(tmp_path / "flat.png")])
    finally:
        (model.folder / "preprocessor_config.json").unlink()
    assert_reordered(found.batch["pixel_values"][0, :, 0, 0], torch.tensor([1.0, 0.0, 1.0]), terms=4)


PROCESSOR = {
    "image_processor_type": "CLIPImageProcessor",
    "do_resize": True,
    "size": {"shortest_edge": 20},
    "do_center_crop": True,
    "crop_size": {"height": 16, "width": 16},
    "do_rescale": True,
    "rescale_factor": 1 / 510,
    "do_normalize": True,
    "image_mean": [0.25] * 3,
    "image_std": [0.5] * 3,
}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({}, None),
        ({"crop_size": {"height": 8, "width": 8}}, "it makes 3 × 8 × 8 numbers, and the model takes 3 × 16 × 16"),
        ({"size": {"shortest_edge": 10**6}}, "1000000 pixels along a side, which is too large"),
        ({"image_processor_type": "NoProcessor"}, "ValueError"),
    ],
    ids=["used", "another size", "too large", "unknown"],
)
def test_an_image_is_cropped_and_rescaled_by_the_processor_of_the_folder(folder, tmp_path, change, why):
    """Left half 0, right half 255: the crop takes 16 of 40 columns from the middle, and 255 becomes (0.5 - 0.25) / 0.5."""
    model = load.load(folder("vit"))
    halves = numpy.zeros((20, 40, 3), dtype=numpy.uint8)
    halves[:, 20:] = 255
    Image.fromarray(halves).save(tmp_path / "halves.png")
    written = model.folder / "preprocessor_config.json"
    written.write_text(json.dumps(PROCESSOR | change))
    try:
        (found,) = make(model, images=[str(tmp_path / "halves.png")])
    finally:
        written.unlink()
    pixels = found.batch["pixel_values"]
    assert pixels.shape == (1, 3, 16, 16)
    assert any("was not used" in note and why in note for note in found.notes) == (why is not None)
    assert found.notes[-1] == "'halves.png' was resized to 16 × 16 pixels."
    if why is None:
        expected = torch.tensor([-0.5] * 8 + [0.5] * 8).expand(1, 3, 16, 16)
        assert torch.equal(pixels, expected)
        assert torch.equal(found.pixels, (expected[0] + 0.5) / 2)
    else:
        # resized without a crop, and by 1/255 where the folder says 1/510: 0 and 1, by 0.25 and 0.5
        assert_reordered(pixels[0, 0, 0, [0, -1]], torch.tensor([-0.5, 1.5]), 3)


def test_files_that_are_no_image_or_sound_are_refused(loaded, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("no picture")
    assert "could not be read as an image" in refused(loaded("vit"), images=[str(text)])
    assert "could not be read as an image" in refused(loaded("vit"), images=[str(tmp_path / "none.png")])
    assert "could not be read as WAV" in refused(loaded("whisper"), sounds=[str(text)])
    assert "could not be read as WAV" in refused(loaded("whisper"), sounds=[str(tmp_path / "none.wav")])
    sound(tmp_path / "empty.wav", b"", 2, 1)
    assert "has no samples" in refused(loaded("whisper"), sounds=[str(tmp_path / "empty.wav")])


def bomb(width, height):
    """A PNG of one colour: its pixels take a few kilobytes, and gigabytes once they are decompressed."""
    squeeze = zlib.compressobj(9)
    row = bytes(1 + (width + 7) // 8)
    packed = b"".join(squeeze.compress(row * 1000) for _ in range(height // 1000)) + squeeze.flush()
    parts = [(b"IHDR", struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)), (b"IDAT", packed), (b"IEND", b"")]
    framed = (
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@pytest.mark.parametrize("side", [13_000, 30_000])
def test_an_image_that_would_take_gigabytes_is_refused_from_its_header(side, loaded, tmp_path):
    path = tmp_path / "bomb.png"
    path.write_bytes(bomb(side, side))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "pixels, which would take gigabytes to decompress" in refused(loaded("vit"), images=[str(path)])


@pytest.mark.parametrize(
    ("at", "form", "number", "message"),
    [
        (24, "<I", 1, "would be 128,000,000 samples, by its 1 samples per second; at most"),
        (24, "<I", 0, "would be 128,000,000 samples, by its 1 samples per second; at most"),
        (34, "<H", 64, "has samples of 64 bits"),
        (34, "<H", 0, "could not be read as WAV"),
        (22, "<H", 0, "could not be read as WAV"),
        (22, "<H", 65_535, "has no samples"),
        (4, "<I", 2**32 - 1, None),
        (40, "<I", 2**32 - 2, None),
    ],
)
def test_an_absurd_header_of_a_sound_is_refused_or_does_no_harm(at, form, number, message, loaded, tmp_path):
    path = tmp_path / "a.wav"
    sound(path, bytes(16_000), 2, 1)
    raw = bytearray(path.read_bytes())
    struct.pack_into(form, raw, at, number)
    path.write_bytes(raw)
    if message is None:
        make(loaded("whisper"), sounds=[str(path)])
    else:
        assert message in refused(loaded("whisper"), sounds=[str(path)])


def test_pillow_is_asked_for_where_it_is_missing(loaded, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(MissingExtra, match=r"Type pip install 'attemper\[hf\]'"):
        make(loaded("vit"), images=["any.png"])


def sound(path, raw, width, channels, rate=16_000):
    with wave.open(str(path), "wb") as file:
        file.setsampwidth(width)
        file.setnchannels(channels)
        file.setframerate(rate)
        file.writeframes(raw)


@pytest.mark.parametrize(
    ("width", "raw"),
    [
        (1, bytes([128, 192, 64, 0])),
        (2, struct.pack("<4h", 0, 2**14, -(2**14), -(2**15))),
        (3, b"".join((number % 2**24).to_bytes(3, "little") for number in (0, 2**22, -(2**22), -(2**23)))),
        (4, struct.pack("<4i", 0, 2**30, -(2**30), -(2**31))),
    ],
)
def test_wave_files_are_read_at_every_width(tmp_path, width, raw):
    from attemper.scan.input.media import _read_wave

    sound(tmp_path / "a.wav", raw, width, 1)
    assert _read_wave(tmp_path / "a.wav", 16_000).tolist() == [0.0, 0.5, -0.5, -1.0]
    sound(tmp_path / "b.wav", raw, width, 2)
    assert _read_wave(tmp_path / "b.wav", 16_000).tolist() == [0.25, -0.75]
    sound(tmp_path / "c.wav", raw, width, 1, rate=8_000)
    assert len(_read_wave(tmp_path / "c.wav", 16_000)) == 8


def test_a_model_that_hears_gets_a_tone_and_its_decoder_a_text(loaded, tmp_path):
    model = loaded("whisper")
    (found,) = make(model, texts=["the dog sat"])
    assert found.generated
    assert found.modality == "audio"
    assert found.batch["input_features"].shape == (1, 8, 24)
    assert found.batch["decoder_input_ids"].tolist() == [[1, 5, 6, 16]]
    assert any("rising tone was generated" in note for note in found.notes)
    assert any("the decoder was given the text 'the dog sat'" in note for note in found.notes)
    model.model(**found.batch)
    sound(tmp_path / "a.wav", struct.pack("<8000h", *range(8000)), 2, 1)
    (heard,) = make(model, sounds=[str(tmp_path / "a.wav")])
    assert not heard.generated
    assert not torch.equal(heard.batch["input_features"], found.batch["input_features"])


def test_a_decoder_without_a_tokenizer_gets_its_start(tmp_path):
    bare = load.load(save(tmp_path / "bare", "whisper", with_tokenizer=False))
    (found,) = make(bare)
    assert found.batch["decoder_input_ids"].tolist() == [[1] * 8]
    assert any("has no tokenizer" in note for note in found.notes)


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("bert", {"images": ["a.png"]}, "BertModel takes text, so --image cannot be used"),
        ("bert", {"sounds": ["a.wav"]}, "BertModel takes text, so --audio cannot be used"),
        ("vit", {"texts": ["the dog"]}, "ViTForImageClassification takes image, so --text cannot be used"),
        ("whisper", {"images": ["a.png"]}, "takes audio and text, so --image cannot be used"),
        ("whisper", {"texts": ["the dog", "a cat"]}, "takes one text with each audio; got 2"),
    ],
)
def test_what_a_model_does_not_take_is_refused(loaded, name, options, words):
    assert words in refused(loaded(name), **options)


def test_a_model_of_text_and_images_gets_both():
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 99, "max_position_embeddings": 20, "eos_token_id": 2},
        vision_config={**sizes, "image_size": 16, "patch_size": 4},
        projection_dim=8,
    )
    model = load.Loaded(transformers.CLIPModel(config).eval(), "clip", "object", tokenizer=tokenizer())
    (found,) = make(model, texts=[SENTENCE])
    assert found.batch["pixel_values"].shape == (1, 3, 16, 16)
    assert found.batch["input_ids"].shape == (1, 8)
    model.model(**found.batch)
    assert f"the text encoder was given {SENTENCE!r}." in found.notes


@pytest.mark.parametrize(("name", "option"), [("vit", "images"), ("whisper", "sounds")])
def test_a_pipe_is_no_picture_and_no_sound(loaded, tmp_path, name, option):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a plain file"):
        make(loaded(name), **{option: [str(tmp_path / "pipe")]})


def test_an_absurd_picture_is_refused(loaded):
    found = loaded("vit")
    found.model.config.image_size = 10**9
    with pytest.raises(InputError, match="which is too large"):
        make(found)
