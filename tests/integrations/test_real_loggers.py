"""The real loggers, each where it is installed (CONTRIBUTING.md says how): what they kept is read back; none uses a network."""

import sqlite3

import numpy as np
import pytest
import torch
from torch import nn

from attemper.integrations import monitor
from attemper.integrations.loggers import open_runs

STEPS = [0, 2, 4]
NAMES = ("attemper/peak", "attemper/peak/attention", "attemper/peak/attention/head_1")
pytestmark = pytest.mark.filterwarnings("ignore")


class Large(nn.Module):
    """Logits that cause an alert."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x, need_weights=False)[0]


def trained(log):
    """A loop that logs by `log`; the metrics of each measured step."""
    torch.manual_seed(0)
    model, seen = Large(), {}
    with monitor(
        model,
        every=2,
        layers=True,
        heads=True,
        pictures=2,
        log=[log, lambda metrics, step: seen.update({step: metrics})],
    ) as watching:
        for _ in range(5):
            model(40 * torch.randn(2, 12, 16)).square().mean().backward()
            watching.step()
    assert list(seen) == STEPS
    assert {*NAMES} <= {*seen[0]}
    return seen


@pytest.fixture
def nothing_failed(caplog):
    yield
    assert not [record.getMessage() for record in caplog.records if "failed at step" in record.getMessage()]


def records(content, block=2**15, head=7):
    """The records of W&B's file: LevelDB's log format, in which a record may be in parts and none crosses a block."""
    at, parts = head, b""
    while at + head <= len(content):
        if block - at % block < head:
            at += block - at % block
        length, kind = int.from_bytes(content[at + 4 : at + 6], "little"), content[at + 6]
        parts += content[at + head : at + head + length]
        at += head + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.usefixtures("nothing_failed")
def test_wandb(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    wandb = pytest.importorskip("wandb", reason="needs the package wandb")
    from wandb.proto import wandb_internal_pb2

    run = wandb.init(project="attemper", mode="offline", dir=tmp_path, settings={"console": "off"})
    assert [type(one).__name__ for one in open_runs()] == ["WandbTarget"]
    run.log({"loss": 1.0}, step=100)  # the trainer's own counter is ahead
    seen = trained(wandb)
    wandb.finish()
    wandb.teardown()  # its service has written the file when it has ended
    (file,) = tmp_path.glob("wandb/offline-run*/*.wandb")
    rows, axes, alerts = [], {}, []
    for content in records(file.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(content)
        if record.WhichOneof("record_type") == "history":
            rows.append({one.key or "/".join(one.nested_key): one.value_json for one in record.history.item})
        elif record.WhichOneof("record_type") == "metric":
            axes[record.metric.name or record.metric.glob_name] = record.metric.step_metric
        elif record.WhichOneof("record_type") == "alert":
            alerts.append((record.alert.title, record.alert.level))
    for name in (*NAMES, "attemper/level"):
        found = {int(row["attemper/step"]): float(row[name]) for row in rows if name in row}
        assert found == {step: metrics[name] for step, metrics in seen.items()}
    assert axes["attemper/*"] == "attemper/step"
    assert [int(row["attemper/step"]) for row in rows if any("heads/peak" in name for name in row)] == [0, 4]
    assert alerts
    assert all(title.startswith("attemper critical: large logits") for title, _ in alerts)
    assert len(list(tmp_path.glob("wandb/offline-run*/files/media/images/attemper/heads/*.png"))) == 2


@pytest.mark.usefixtures("nothing_failed")
def test_mlflow(tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow = pytest.importorskip("mlflow", reason="needs the package mlflow-skinny")
    mlflow.set_tracking_uri(f"file:{tmp_path / 'store'}")
    with mlflow.start_run() as run:
        assert [type(one).__name__ for one in open_runs()] == ["MetricsTarget"]
        seen = trained(mlflow)
    client = mlflow.MlflowClient()
    for name, kept in zip(
        NAMES, ("attemper/peak", "attemper/peak.attention", "attemper/peak.attention.head_1"), strict=True
    ):
        found = {one.step: one.value for one in client.get_metric_history(run.info.run_id, kept)}
        assert found == {step: metrics[name] for step, metrics in seen.items()}
    images = [one.path for one in client.list_artifacts(run.info.run_id, "images") if one.path.endswith(".png")]
    assert len(images) == 2


@pytest.mark.usefixtures("nothing_failed")
@pytest.mark.parametrize("given", ["module", "run"])
def test_trackio(given, tmp_path, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    trackio = pytest.importorskip("trackio", reason="needs the package trackio")
    storage = pytest.importorskip("trackio.sqlite_storage")
    for module in (storage, pytest.importorskip("trackio.utils")):
        if hasattr(module, "TRACKIO_DIR"):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path)
    run = trackio.init(project="attemper", name=given, embed=False)
    assert [type(one).__name__ for one in open_runs()] == ["TrackioTarget"]
    seen = trained(trackio if given == "module" else run)
    trackio.finish()
    rows = storage.SQLiteStorage.get_logs("attemper", given)
    for name in NAMES:
        assert {row["step"]: row[name] for row in rows if name in row} == {
            step: metrics[name] for step, metrics in seen.items()
        }
    assert [row["step"] for row in rows if "attemper/heads/peak" in row] == [0, 4]
    with sqlite3.connect(next(tmp_path.glob("*.db"))) as store:
        titles = [title for (title,) in store.execute("select title from alerts where run_name = ?", (given,))]
    assert titles
    assert all(title.startswith("attemper critical: large logits") for title in titles)


@pytest.mark.usefixtures("nothing_failed")
def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs the package tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        seen = trained(writer)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    for name in NAMES:
        found = {one.step: one.value for one in read.Scalars(name)}
        assert found == {step: np.float32(metrics[name]) for step, metrics in seen.items()}
    assert [one.step for one in read.Images("attemper/heads/peak")] == [0, 4]
    assert read.Tags()["tensors"] == ["attemper/alerts/text_summary"]
