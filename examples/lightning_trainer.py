"""Lightning with one line more: attention goes to the trainer's logger beside the loss, and every head to a file."""

import sys
import sysconfig
from pathlib import Path

import pytorch_lightning
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader

from attemper.integrations import LightningCallback

WIDTH, LENGTH = 64, 32


class Model(pytorch_lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256)

    def training_step(self, text: Tensor, number: int) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        hidden = self.layers(self.bytes(text[:, :-1]) + self.places.weight, mask=causal, is_causal=True)
        loss = F.cross_entropy(self.head(hidden).mT, text[:, 1:])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 3e-3)


files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("a*.py"))  # the text of Python's own library, as bytes
text = torch.tensor(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.long)
torch.manual_seed(0)
callback = LightningCallback(path="run.jsonl")  # the line
trainer = pytorch_lightning.Trainer(
    max_steps=10 if "--quick" in sys.argv else 300,
    log_every_n_steps=5,
    accelerator="cpu",
    callbacks=[callback],
    logger=False,  # or yours: it gets attemper/peak and seven more numbers
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Model(), DataLoader(text.unfold(0, LENGTH + 1, LENGTH + 1), batch_size=16, shuffle=True))

for step in callback.record.steps:
    rows = callback.record.filter(steps=step).to_dicts()
    keys = " ".join(f"{row['effective_keys']:4.1f}" for row in rows)
    print(f"step {step:3}  effective keys of every head  {keys}")
