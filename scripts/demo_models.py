"""Trains the two small causal models that come with the package: `attemper scan demo:scaled` and `demo:unscaled`.

`python scripts/demo_models.py`           trains both (about five minutes each on one core) and writes src/attemper/trained/
`python scripts/demo_models.py FOLDER`    writes them into FOLDER instead

Both are GPT-2 as transformers has it, with bytes as tokens, and differ in one setting: `scale_attn_weights`. They get the same
initial weights, the same windows of the standard library's sources in the same order, and the same optimizer. Weights are stored
as float16 and loaded as float32. Another machine or another Python gives other bits: the sha256 in attemper/demo.py is that of
the files in this repository.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from attemper import demo
from attemper_lab.training.language import VALIDATION, corpus, windows

HEADS, HEAD_DIM, LAYERS, INNER, LENGTH = 4, 64, 2, 64, 192
WIDTH = HEADS * HEAD_DIM
SEED, STEPS, BATCH, RATE, WARM_UP, CLIP = 0, 1200, 16, 2e-3, 50, 1.0
HELD_OUT = 64  # windows
MODELS = {"scaled": True, "unscaled": False}


def config(scaled: bool) -> GPT2Config:
    return GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=LAYERS,
        n_head=HEADS,
        n_inner=INNER,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        initializer_range=WIDTH**-0.5,  # queries and keys of unit variance, as in the derivation of √d_k
        scale_attn_weights=scaled,
        bos_token_id=None,
        eos_token_id=None,
    )


def train(scaled: bool) -> tuple[GPT2LMHeadModel, float]:
    """A model and its held-out loss in nats per byte."""
    torch.manual_seed(SEED)
    model = GPT2LMHeadModel(config(scaled))
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
    stream, started = torch.Generator().manual_seed(SEED), time.perf_counter()
    for step in range(STEPS):
        loss = loss_of(model, windows(0, VALIDATION, BATCH, LENGTH - 1, stream))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(
                f"step {step}: loss {float(loss.detach()):.3f}, {time.perf_counter() - started:.0f} s",
                file=sys.stderr,
                flush=True,
            )
    model = model.half().float().eval()  # what is stored is what is measured
    text = corpus()[0]
    with torch.no_grad():
        held = windows(VALIDATION, len(text), HELD_OUT, LENGTH - 1, torch.Generator().manual_seed(SEED))
        return model, float(loss_of(model, held))


def rate(step: int) -> float:
    """A factor of the learning rate: a linear warm-up, then a straight line to a tenth."""
    return min((step + 1) / WARM_UP, 1 - 0.9 * step / STEPS)


def loss_of(model: GPT2LMHeadModel, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def tokenizer() -> PreTrainedTokenizerFast:
    """A token per byte of UTF-8, numbered by its value."""
    letters = {letter: byte for byte, letter in enumerate(_letters())}
    found = Tokenizer(models.BPE(vocab=letters, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=found, model_max_length=LENGTH, clean_up_tokenization_spaces=False)


def _letters() -> list[str]:
    """Byte → the character that stands for it in a byte-level vocabulary: itself where it can be printed, else one after 255."""
    shown = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def save(model: GPT2LMHeadModel, loss: float, folder: Path) -> str:
    """The model's folder; the sha256 of its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer().save_pretrained(folder)
    content = {**model.config.to_diff_dict(), "architectures": ["GPT2LMHeadModel"], "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    weights = {
        name: tensor.half().contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"
    }
    about = {
        "format": "pt",
        "made_by": "python scripts/demo_models.py",
        "seed": str(SEED),
        "text_sha256": corpus()[1],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "held_out_nats_per_byte": f"{loss:.4f}",
    }
    save_file(weights, folder / "model.safetensors", metadata=about)
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def main(words: list[str]) -> None:
    torch.set_num_threads(1)  # the same sums in the same order
    place = Path(words[0]) if words else Path(demo.__file__).with_name("trained")
    for name, scaled in MODELS.items():
        model, loss = train(scaled)
        digest = save(model, loss, place / name)
        print(f"{name}: held-out loss {loss:.3f} nats per byte, sha256 {digest}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
