"""Where numbers go: each kind of logger is called as it wants to be, and none can stop a training."""

import json
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

from attemper.errors import InputError
from attemper.integrations import Alert, as_logger, monitor
from attemper.integrations.loggers import Loggers, open_runs
from watched import stack

METRICS = {"attemper/peak": 3.5, "attemper/level": 1.0}
ALERT = Alert("attemper error: large logits, step 7", "Step 7, layers.0 head 1.", "error", "error", ())
PIXELS = np.zeros((4, 5, 3), np.uint8)


def module(name, **members):
    found = types.ModuleType(name)
    found.__dict__.update(members)
    return found


class Run:
    """W&B's: its own counter, a step that must grow, titles below 64 characters."""

    __module__ = "wandb.sdk.wandb_run"

    def __init__(self):
        self.rows, self.axes, self.alerts = [], {}, []

    def define_metric(self, name, step_metric=None, hidden=None):
        self.axes[name] = step_metric

    def log(self, data, step=None, commit=None):
        assert step is None, "it drops what is behind its counter"
        self.rows.append(data)

    def alert(self, title, text, level):
        assert len(title) < 64
        assert level in ("INFO", "WARN", "ERROR")
        self.alerts.append((title, level))


def test_wandb_gets_a_step_of_its_own(monkeypatch):
    run = Run()
    wandb = module(
        "wandb", run=run, log=lambda *_: pytest.fail("not the module"), Image=lambda pixels: ("image", pixels.shape)
    )
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    for given in (run, wandb):
        run.rows.clear()
        to = as_logger(given)
        for step in (7, 5):  # a resumed run goes back
            to.log(METRICS, step)
        to.alert(ALERT, 7)
        to.image("attemper/heads/peak", PIXELS, 7)
        assert run.rows == [
            {**METRICS, "attemper/step": 7},
            {**METRICS, "attemper/step": 5},
            {"attemper/heads/peak": ("image", (4, 5, 3)), "attemper/step": 7},
        ]
    assert run.axes == {"attemper/step": None, "attemper/*": "attemper/step"}
    assert run.alerts == [(ALERT.title, "ERROR")] * 2
    wandb.run = None
    with pytest.raises(InputError, match=r"wandb has no open run. Call wandb.init\(\)"):
        as_logger(wandb).log(METRICS, 1)


def test_trackio_gets_step_and_alert(monkeypatch):
    seen = []
    trackio = module(
        "trackio",
        log=lambda metrics, step=None: seen.append((step, metrics)),
        alert=lambda title, text=None, level=None: seen.append((title, level)),
        AlertLevel=types.SimpleNamespace(WARN="warn", ERROR="error"),
    )
    monkeypatch.setitem(sys.modules, "trackio", trackio)
    to = as_logger(trackio)
    to.log(METRICS, 7)
    to.alert(ALERT, 7)
    to.image("name", PIXELS, 7)  # this version has no images
    assert seen == [(7, METRICS), (ALERT.title, "error")]


def test_mlflow_gets_names_that_it_takes():
    seen, allowed = [], re.compile(r"[A-Za-z0-9_\-. :/]{1,250}")
    mlflow = module(
        "mlflow",
        log_metrics=lambda metrics, step=None: seen.append((step, metrics)),
        log_image=lambda image, key=None, step=None: seen.append((step, key, image.shape)),
    )
    to = as_logger(mlflow)
    layer = {"attemper/peak/blocks.0": 2.5, "attemper/peak/blocks.0/cross": 1.5}
    to.log({**METRICS, **layer}, 7)
    to.image("attemper/heads/peak", PIXELS, 7)
    # a store of files cannot hold attemper/peak and attemper/peak/blocks.0
    named = {**METRICS, "attemper/peak.blocks.0": 2.5, "attemper/peak.blocks.0.cross": 1.5}
    assert seen == [(7, named), (7, "attemper.heads.peak", (4, 5, 3))]
    assert all(allowed.fullmatch(name) for name in named)


def test_a_wandb_logger_of_lightning_keeps_its_own_axis(monkeypatch):
    class WandbLogger:
        """Lightning's: numbers and images by trainer/global_step."""

        def __init__(self):
            self.experiment, self.rows = Run(), []

        def log_metrics(self, metrics, step=None):
            self.rows.append((step, metrics))

        def log_image(self, key, images, step=None):
            self.rows.append((step, key, [image.shape for image in images]))

    monkeypatch.setitem(sys.modules, "wandb", module("wandb", Image=lambda pixels: pytest.fail("not by the run")))
    logger = WandbLogger()
    to = as_logger(logger)
    to.log(METRICS, 7)
    to.alert(ALERT, 7)
    to.image("attemper/heads/peak", PIXELS, 7)
    assert logger.rows == [(7, METRICS), (7, "attemper/heads/peak", [(4, 5, 3)])]
    assert logger.experiment.axes == {}
    assert logger.experiment.rows == []
    assert logger.experiment.alerts == [(ALERT.title, "ERROR")]


def test_tensorboard_read_back(tmp_path):
    writers = pytest.importorskip("tensorboardX", reason="needs the package tensorboardX")
    with writers.SummaryWriter(str(tmp_path)) as writer:
        to = as_logger(writer)
        to.log(METRICS, 7)
        to.alert(ALERT, 7)
        to.image("attemper/heads/peak", PIXELS, 7)
    values = read_back(tmp_path)
    for name, number in METRICS.items():
        assert (values[name, 7].simple_value) == number
    image = values["attemper/heads/peak", 7].image
    assert (image.height, image.width) == (4, 5)
    assert any(tag.startswith("attemper/alerts") for tag, _ in values)


def test_every_head_in_tensorboard(tmp_path):
    writers = pytest.importorskip("tensorboardX", reason="needs the package tensorboardX")
    torch.manual_seed(0)
    model = stack()
    with (
        writers.SummaryWriter(str(tmp_path)) as writer,
        monitor(model, every=2, log=writer, signs=("entropy", "effective_keys"), heads=True) as watching,
    ):
        for _ in range(3):
            model(torch.randn(2, 9, 16))
            watching.step()
    values = read_back(tmp_path)
    for row in watching.record.to_dicts():
        for sign in ("entropy", "effective_keys"):
            kept = values[f"attemper/{sign}/{row['layer']}/head_{row['head']}", row["step"]].simple_value
            assert kept == torch.tensor(row[sign], dtype=torch.float32).item()
    assert len({tag for tag, _ in values if "/head_" in tag}) == 2 * 2 * 2


def read_back(folder):
    """What TensorBoard's file holds, by name and step."""
    from tensorboardX.proto import event_pb2

    (file,) = folder.iterdir()
    content, values = file.read_bytes(), {}
    while content:  # length, its checksum, the event, its checksum
        length = int.from_bytes(content[:8], "little")
        event = event_pb2.Event.FromString(content[12 : 12 + length])
        values |= {(value.tag, event.step): value for value in event.summary.value}
        content = content[16 + length :]
    return values


def test_other_loggers_by_their_methods(tmp_path):
    seen = []

    class Aim:
        def track(self, value, name=None, step=None):
            seen.append(("aim", name, value, step))

    class ClearML:
        def report_scalar(self, title, series, value, iteration):
            seen.append(("clearml", title, series, value, iteration))

    class Titan:
        def log(self, metrics, step):
            seen.append(("titan", metrics, step))

    for given in (Aim(), ClearML(), Titan(), lambda metrics, step: seen.append(("function", metrics, step))):
        to = as_logger(given)
        to.log({"attemper/peak": 3.5}, 7)
        to.alert(ALERT, 7)
        to.image("name", PIXELS, 7)
    assert seen == [
        ("aim", "attemper/peak", 3.5, 7),
        ("clearml", "attemper", "peak", 3.5, 7),
        ("titan", {"attemper/peak": 3.5}, 7),
        ("function", {"attemper/peak": 3.5}, 7),
    ]
    path = tmp_path / "log.jsonl"
    both = as_logger([path, lambda metrics, step: seen.append(step)])
    both.log(METRICS, 8)
    both.alert(ALERT, 8)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[0] == {"step": 8, **METRICS}
    assert lines[1]["level"] == "error"
    assert seen[-1] == 8


def test_runs_that_are_open_are_found_without_importing(monkeypatch):
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert open_runs() == []
    monkeypatch.setitem(sys.modules, "wandb", module("wandb", run=None))
    monkeypatch.setitem(sys.modules, "mlflow", module("mlflow", active_run=lambda: None))
    assert open_runs() == []
    monkeypatch.setitem(sys.modules, "wandb", module("wandb", run=Run()))
    active = module("mlflow", active_run=lambda: 1, log_metrics=lambda *_, **__: None)
    monkeypatch.setitem(sys.modules, "mlflow", active)
    assert [type(one).__name__ for one in open_runs()] == ["WandbLogger", "MetricsLogger"]


def test_a_target_that_raises_is_said_once_and_left_out_after_three(caplog):
    calls = []

    def broken(metrics, step):
        calls.append(step)
        if step != 2:
            raise OSError(28, "No space left on device")

    guarded = Loggers([as_logger(broken)])
    for step in range(9):
        guarded.log(METRICS, step)
        guarded.image("name", PIXELS, step)
    assert calls == [0, 1, 2, 3, 4, 5]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2
    assert "OSError: [Errno 28] No space left on device. The training goes on." in said[0]
    with pytest.raises(KeyboardInterrupt):  # Ctrl-C is no failure of a logger
        Loggers([as_logger(lambda metrics, step: (_ for _ in ()).throw(KeyboardInterrupt))]).log({}, 0)


FRESH = """
import sys, torch, attemper
for name in ("monitor", "as_logger", "summary", "alerts", "picture"):
    getattr(attemper.integrations, name)
others = {"wandb", "trackio", "mlflow", "tensorboardX", "transformers", "accelerate", "lightning", "pytorch_lightning"}
print(sorted(others & set(sys.modules)))
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in others:
            raise kinds[0](f"of {name}", name=name.split(".")[0])
kinds = [ModuleNotFoundError, ImportError]
sys.meta_path.insert(0, Missing())
while kinds:
    for name in ("HuggingFaceCallback", "LightningCallback"):
        try:
            getattr(attemper.integrations, name)
        except attemper.errors.MissingExtra as error:
            print(error)
    del kinds[0]
"""


BROKEN = (
    "{0} needs {1}, which is installed but cannot be imported: ImportError: of {1}. Reinstall it; "
    "python -c 'import {2}' shows the whole error."
)


def test_nothing_is_imported_that_was_not_asked_for_and_a_trainer_that_is_missing_is_named():
    done = subprocess.run([sys.executable, "-c", FRESH], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.splitlines() == [
        "[]",
        "HuggingFaceCallback needs transformers. Type pip install 'attemper[hf]'.",
        "LightningCallback needs Lightning. Type pip install lightning.",
        BROKEN.format("HuggingFaceCallback", "transformers", "transformers.trainer_callback"),
        BROKEN.format("LightningCallback", "lightning", "lightning.pytorch"),
    ]
