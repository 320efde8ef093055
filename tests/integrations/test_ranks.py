"""Callbacks in real trainers on two processes: rows and clips are those of one process with both batches; replicas stay equal."""

from pathlib import Path

import pytest

import forked

RANK = """
import os, sys, logging, warnings
import torch
from torch import distributed
from torch.distributed.fsdp import fully_shard

rank, folder, trainer, tests, port = int(argv[0]), argv[1], argv[2], argv[3], argv[4]
os.environ.update(
    RANK=str(rank), LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port
)
os.chdir(folder)
sys.path.insert(0, tests)
warnings.simplefilter("ignore")
logging.disable(logging.INFO)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
from close import in_float64
from integrations.trained import RATE, Tiny, data, optimizer_of, plain

TAU = 3.0


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)


def huggingface(wrapped, **options):
    from accelerate import Accelerator
    from transformers import Trainer, TrainingArguments
    from attemper.integrations import HuggingFaceCallback

    model = Tiny()
    if wrapped == "fsdp":  # accelerate itself shards on GPUs only
        shard(model)
        Accelerator.prepare_model = lambda self, given, *rest, **more: given
    settings = {
        **{"output_dir": folder, "per_device_train_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1},
        **{"max_grad_norm": 0.0, "report_to": "none", "save_strategy": "no", "disable_tqdm": True, "use_cpu": True},
        **{"train_sampling_strategy": "sequential", "dataloader_pin_memory": False, "ddp_backend": "gloo"},
    }
    optimizer = optimizer_of(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    made = Trainer(model, TrainingArguments(**settings), train_dataset=data(), optimizers=(optimizer, constant))
    if wrapped == "ddp":
        callback = HuggingFaceCallback.attach(made, **options)
    else:
        callback = HuggingFaceCallback(**options)
        made.add_callback(callback)
    made.train()
    return model, callback


def lightning(wrapped, **options):
    import pytorch_lightning
    from pytorch_lightning.strategies import DDPStrategy, ModelParallelStrategy
    from torch.utils.data import DataLoader
    from attemper.integrations import LightningCallback

    class Lit(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Tiny()

        def configure_model(self):
            if wrapped == "fsdp":
                shard(self.inner)

        def training_step(self, batch, index):
            return self.inner(**batch)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    sizes = {"data_parallel_size": 2, "tensor_parallel_size": 1, "process_group_backend": "gloo"}
    strategy = ModelParallelStrategy(**sizes) if wrapped == "fsdp" else DDPStrategy(process_group_backend="gloo")
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    callback, module = LightningCallback(**options), Lit()
    made = pytorch_lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy=strategy, callbacks=[callback], use_distributed_sampler=False, **off
    )
    mine = [item for place, item in enumerate(data()) if place // 2 % 2 == rank]
    made.fit(module, DataLoader(mine, 2))
    return module.inner, callback


# one process, before there are two: a step is the batches of both
told = {}
expected, record = plain(
    2,
    start=1 if trainer == "huggingface" else 0,
    every=2,
    clip=TAU,
    log=lambda metrics, step: told.update({step: metrics}),
)
clips = {step: metrics["attemper/clipped"] for step, metrics in told.items()}
assert sum(clips.values()) > 3
for wrapped in ("ddp", "fsdp"):
    seen, path = {}, f"{folder}/{wrapped}.jsonl"
    options = {"every": 2, "clip": TAU, "path": path, "log": lambda metrics, step: seen.update({step: metrics})}
    model, callback = (huggingface if trainer == "huggingface" else lightning)(wrapped, **options)
    found = callback.record.to_dicts()
    for one, other in zip(found, record.to_dicts(), strict=True):
        assert one.pop("layer").removeprefix("inner.") == other.pop("layer")
        assert all(one[name] == in_float64(other[name], 10.0) if isinstance(one[name], float) else True for name in one)
        assert (one["step"], one["head"], one["rows"]) == (other["step"], other["head"], other["rows"])
    if rank == 0:  # the others log nothing
        assert {step: metrics["attemper/clipped"] for step, metrics in seen.items()} == clips
    else:
        assert not seen
    assert callback.record.notes == []
    state = model.state_dict()
    for name, weight in expected.state_dict().items():
        now = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        assert now.flatten().tolist() == [in_float64(x, 10.0) for x in weight.flatten().tolist()], name
        both = [torch.empty_like(now) for _ in range(2)]
        distributed.all_gather(both, now.contiguous())
        assert torch.equal(*both), name  # to the bit
    distributed.barrier()
    if rank == 0:
        import attemper

        assert repr(attemper.Record.read(path).to_dicts()) == repr(callback.record.to_dicts())
distributed.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("trainer", "package"),
    [
        ("huggingface", "accelerate"),
        pytest.param("lightning", "pytorch_lightning", marks=pytest.mark.exhaustive),  # importing it takes seconds
    ],
)
def test_two_ranks_are_one_process(trainer, package, tmp_path, free_port):
    pytest.importorskip(package, reason=f"needs the package {package}")
    words = [tmp_path, trainer, Path(__file__).parents[1], free_port]
    forked.run(RANK, [(rank, *words) for rank in range(2)], tmp_path)
