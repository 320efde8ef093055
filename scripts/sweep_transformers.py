"""Scans a small model of every architecture of transformers, eager, with SDPA, and padded: accusations are confirmed or mended.

    python scripts/sweep_transformers.py                all; exit code 1 if anything is accused that CONFIRMED does not have
    python scripts/sweep_transformers.py --only gemma   model types that contain this

A model has random weights, two layers and a few heads. An architecture that cannot be made so from its config's own fields is
left out, with the reason. What is accused is printed with its finding, and with the line that builds it again.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "tests")]
HOW = ("eager", "sdpa", "padded")  # padded: as transformers chooses, and one text shorter than the other
LIMIT, LEAST = 90, 60  # seconds for a model; architectures that must have run
SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "init_std": 0.2,
    "initializer_factor": 5.0,
    "type_vocab_size": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
    "sliding_window": 6,
    "attention_window": 4,
    "num_experts": 3,
    "num_local_experts": 3,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "embedding_size": 16,
    "emb_dim": 32,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "d_head": 8,
    "d_inner": 48,
    "num_layers": 2,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "n_embd": 32,
    "n_layer": 2,
    "n_layers": 2,
    "n_head": 4,
    "n_heads": 4,
    "n_positions": 64,
    "n_inner": 48,
    "n_ctx": 64,
    "rotary_dim": 4,
    "dim": 32,
    "hidden_dim": 48,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_dim": 48,
    "ffn_hidden_size": 48,
    "word_embed_proj_dim": 32,
    "image_size": 32,
    "patch_size": 8,
    "num_channels": 3,
    "mask_ratio": 0.0,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "mamba_d_state": 4,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "state_size": 4,
    "use_mamba_kernels": False,
    "attention_dropout": 0.0,
}
TASKS = ("CAUSAL_LM", "MASKED_LM", "SEQ_TO_SEQ_CAUSAL_LM", "IMAGE_CLASSIFICATION", "SEQUENCE_CLASSIFICATION")
HEADS = ("peak", "collapsed", "saturated", "flat", "dead", "overflow")  # of random weights, not of an architecture
CONFIRMED = {  # the reproducer of a bug of theirs, in transformers 5.22.2
    ("fsmt", "cache_differs"): "tests/judged/confirmed/fsmt_prefill.py",
    ("moshi", "cache_differs"): "tests/judged/confirmed/moshi_window.py",
    ("nemotron_h", "cache_differs"): "tests/judged/confirmed/nemotron_h_step.py",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="model types that contain this")
    parser.add_argument("--how", choices=HOW, help="one way alone")
    parser.add_argument("-o", dest="path", type=Path, default=ROOT / "build" / "swept.json", help="the results")
    parser.add_argument("--run", nargs="+", metavar="TYPE:CLASS:HOW", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        run(asked.run)
        return 0
    asked.path.parent.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    missing = [
        one for one in architectures() if asked.only in one.split(":")[0] and (asked.how or "") in one.split(":")[2]
    ]
    begun = time.monotonic()
    while missing:
        for title, result in process(missing[:40]):
            results[title] = result
            asked.path.write_text(json.dumps(results, indent=1))
            words = (
                "; ".join(one.split(",", 1)[0] for one in result["said"])
                if result["state"] == "accused"
                else "; ".join(result["said"])
            )
            print(f"{time.monotonic() - begun:6.0f} s  {result['state']:10} {title:64} {words[:120]}", flush=True)
        missing = [title for title in missing if title not in results]
    return report(results, bool(asked.only))


def architectures() -> list[str]:
    """A model of each type, with the first task that it has, twice."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for task in TASKS:
        for kind, names in getattr(modeling_auto, f"MODEL_FOR_{task}_MAPPING_NAMES").items():
            name = names if isinstance(names, str) else names[0]
            found.setdefault(kind, name)
    return [f"{kind}:{name}:{how}" for kind, name in found.items() for how in HOW]


def built(kind: str, name: str, how: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """The model, and a batch for it."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made = CONFIG_MAPPING[kind]
    known = {*made().to_dict(), *getattr(made, "attribute_map", {})}
    config = made(**{key: value for key, value in SIZES.items() if key in known})
    if how != "padded":
        config._attn_implementation = how
    if "is_decoder" in known and (
        "CausalLM" in name or "LMHead" in name
    ):  # BERT's kind sees the future without it, as it warns
        config.is_decoder = True
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in getattr(transformers, name)(config).parameters())
    if size > 5e6:
        raise ValueError(f"its fields leave it at {size / 1e6:.0f} M parameters")
    torch.manual_seed(0)
    model = getattr(transformers, name)(config).eval()
    draw = torch.Generator().manual_seed(3)
    if model.main_input_name == "pixel_values":
        side = getattr(config, "image_size", 32)
        return model, {
            "pixel_values": torch.randn(2, 3, *([side] * 2 if isinstance(side, int) else side), generator=draw)
        }
    batch = {
        "input_ids": torch.randint(3, 99, (2, 12), generator=draw),
        "attention_mask": torch.ones(2, 12, dtype=torch.long),
    }
    if how == "padded":
        batch["attention_mask"][1, -4:] = 0
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = torch.randint(3, 99, (2, 9), generator=draw)
    return model, batch


def process(titles: list[str]) -> Any:
    """Some models in one process; one that ends it is *not run*, and the rest runs in the next."""
    command = [sys.executable, "-W", "ignore", __file__, "--run", *titles]
    own = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0, env={**os.environ, **own}
    ) as child:
        assert child.stdout is not None
        for number, title in enumerate(titles):
            ready = select.select([child.stdout], [], [], LIMIT + (60 if number else 300))[0]
            answer = child.stdout.readline() if ready else b""
            if not answer:
                child.kill()
                yield title, {"state": "not run", "said": ["its process ended"]}
                return
            yield title, json.loads(answer)


def run(titles: list[str]) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    from judged.judging import accuses, called, said, scanned

    def late(*_: Any) -> None:
        raise TimeoutError(f"took longer than {LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    for title in titles:
        signal.alarm(LIMIT)
        try:
            model, batch = built(*title.split(":"))
            with torch.no_grad():
                called(model, batch)
        except Exception as error:
            result = {"state": "left out", "said": [f"{type(error).__name__}: {str(error)[:160]}"]}
        else:
            try:
                found = scanned(lambda model=model: model, lambda batch=batch: batch)
                bad = [one for one in found["findings"] if one["name"] not in HEADS and accuses(one)]
                raised = [found["line"]] * found["line"].startswith("the scan raised")
                state = (
                    "accused" if bad or raised else "not judged" if found["line"].startswith("not judged") else "passed"
                )
                result = {"state": state, "said": said(bad) + raised, "line": found["line"]}
            except Exception as error:
                result = {"state": "not run", "said": [f"{type(error).__name__}: {str(error)[:160]}"]}
        signal.alarm(0)
        print(json.dumps(result), file=answers, flush=True)


def report(results: dict[str, dict[str, Any]], part: bool) -> int:
    judged = {title: one for title, one in results.items() if one["state"] != "left out"}
    kinds = {title.split(":")[0] for title in judged}
    print(f"\n{len(judged)} models of {len(kinds)} architectures; {len(results) - len(judged)} left out")
    open_ = 0
    for title, one in judged.items():
        if one["state"] in ("passed", "not judged"):
            continue
        kind, name, how = title.split(":")
        for words in one["said"]:
            fault = words.split(" ", 1)[-1].split(",")[0]
            known = CONFIRMED.get((kind, fault))
            open_ += known is None
            print(f"\n{title}: {words}")
            print(
                f"  confirmed: {known}" if known else f'  to confirm: model, batch = built("{kind}", "{name}", "{how}")'
            )
    if not part and len(kinds) < LEAST:
        print(f"fewer than {LEAST} architectures ran")
    print(f"\n{open_} accusations to confirm")
    return 1 if open_ or (not part and len(kinds) < LEAST) else 0


if __name__ == "__main__":
    sys.exit(main())
