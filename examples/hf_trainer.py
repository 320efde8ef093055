"""transformers.Trainer with one line more: attention in its logs, every head in a file, exploding heads clipped."""

import sys
import sysconfig
from pathlib import Path

import torch
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from attemper.integrations import HuggingFaceCallback

LENGTH = 64
tokenizer = ByT5Tokenizer()  # a token for each byte, so that there is nothing to download
text = (Path(sysconfig.get_paths()["stdlib"]) / "argparse.py").read_text(encoding="utf-8")
text = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
items = [{"input_ids": piece, "labels": piece} for piece in text.split(LENGTH)[:-1]]

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
    )
)
arguments = TrainingArguments(
    output_dir="checkpoints",
    max_steps=10 if "--quick" in sys.argv else 300,
    per_device_train_batch_size=8,
    learning_rate=1e-2,
    logging_steps=5,
    report_to="none",  # or "wandb", "mlflow", "trackio": the callback finds an open run by itself
    disable_tqdm=True,
    use_cpu="--quick" in sys.argv,
)
callback = HuggingFaceCallback(path="run.jsonl", clip=100)  # the line
trainer = Trainer(model, arguments, train_dataset=items, processing_class=tokenizer, callbacks=[callback])
trainer.train()
trainer.save_model("checkpoints/last")

last = callback.record.filter(steps=callback.record.steps[-1])
print(f"{'layer':26} head  largest logit  effective keys")
for row in last.to_dicts():
    print(f"{row['layer']:26} {row['head']:4}  {row['peak']:13.2f}  {row['effective_keys']:14.1f}")
print("Then: attemper report run.jsonl, and attemper scan checkpoints/last")
