"""Every example runs as it is, in its short form: as a program, on two ranks, as tests of a model, as steps of a workflow."""

import logging
import os
import re
import runpy
import shlex
import sys
import warnings
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file, save_file

import folders
import forked

EXAMPLES = Path(__file__).parents[2] / "examples"
PRINTED = {
    "vitals.py": "Without the scale the logits spread 8.0 times as wide",
    "entropy_loss.py": "effective keys  64.0",
    "additive_and_dot.py": "which is not within 1: True",
    "from_scratch.py": "(theory: d_k = 64)",
    "swap_rule.py": "The first rule is what the model had: only rounding moved.",
    "scan_fault.py": "√d_model instead of √d_k: q·k is multiplied",
    "train_gpt.py": "to a loss 0.05 above its twin's: none",
    "nanogpt.py": "step  20  loss",
    "hf_trainer.py": "model.layers.1.self_attn      3",
    "lightning_trainer.py": "step   5  effective keys of every head",
}
STARTED_OTHERWISE = {"fsdp2_loop.py", "test_my_model.py", "scan_checkpoint.yml"}
LONG = {"train_gpt.py": 80}  # lines: it compares four treatments
THEIRS = {  # what trainers print and warn of on a machine without a GPU
    "hf_trainer.py": ("ignore:'pin_memory' argument",),
    "lightning_trainer.py": ("ignore:.*LeafSpec", "ignore:The 'train_dataloader' does not have many workers"),
}


def test_every_example_is_run_short_and_in_the_table():
    files = {path.name: path.read_text(encoding="utf-8") for path in EXAMPLES.iterdir() if path.is_file()}
    assert set(files) == {*PRINTED, *STARTED_OTHERWISE}
    assert {name for name, text in files.items() if text.count("\n") > LONG.get(name, 60)} == set()
    table = (EXAMPLES.parent / "docs/examples.md").read_text(encoding="utf-8")
    assert {name for name in files if f"(../examples/{name})" not in table} == set()


@pytest.mark.parametrize("name", PRINTED)
def test_an_example_runs(name, monkeypatch, capsys, tmp_path, attemper_command):
    for package in re.findall(r"^(?:from|import) (transformers|pytorch_lightning)\b", text(name), re.MULTILINE):
        pytest.importorskip(package, reason=f"needs the package {package}")
    for ignored in THEIRS.get(name, ()):
        action, _, message = ignored.partition(":")
        warnings.filterwarnings(action, message)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", [name, *(["--quick"] if "--quick" in text(name) else [])])
    monkeypatch.syspath_prepend(EXAMPLES)  # where Python looks first for what a program imports
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")  # warnings are errors here, as in all tests
    finally:
        logging.getLogger("attemper").setLevel(logging.NOTSET)  # an example may have silenced it
    printed = capsys.readouterr().out
    assert PRINTED[name] in printed
    assert max(map(len, (line for line in printed.splitlines() if not line.startswith("{'")))) <= 80
    for words in re.findall(r"attemper (\w+ [\w./]+)", printed):  # what it says to type next
        assert attemper_command(*words.split())[0] == 0


def text(name):
    return (EXAMPLES / name).read_text(encoding="utf-8")


TORCHRUN = """
import os, runpy, sys

rank, path, folder, port = argv
os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # two ranks of NCCL need two GPUs
os.chdir(folder)
sys.argv = [path, "--quick"]
runpy.run_path(path, run_name="__main__")
"""


def test_the_loop_with_fsdp2_on_two_ranks(tmp_path, free_port):
    """As torchrun starts it: rank 0 prints, and both ranks' rows are in its file."""
    import attemper

    forked.run(TORCHRUN, [(rank, EXAMPLES / "fsdp2_loop.py", tmp_path, free_port) for rank in range(2)], tmp_path)
    steps = re.findall(r"^step +(\d+)  largest logit", (tmp_path / "0.out").read_text(encoding="utf-8"), re.MULTILINE)
    assert steps == ["0", "10"]
    assert "step" not in (tmp_path / "1.out").read_text(encoding="utf-8")
    record = attemper.Record.read(tmp_path / "run.jsonl")
    assert record.steps == [0, 10]
    assert {row["rows"] for row in record.to_dicts()} == {2 * 8 * 31}  # of both ranks


TESTS = """
import pytest
raise SystemExit(pytest.main([argv[0], "-q", "-p", "no:cacheprovider", "-c", argv[1]]))
"""


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (("model", "model"), set()),
        (("is_causal=True", "is_causal=False"), {"test_no_output_depends_on_a_later_token"}),
        (("is_causal=True", "is_causal=True, scale=0.5"), {"test_every_layer_divides_by_the_root_of_d_k"}),
        (
            (".transpose(1, 2).flatten(2)", ".flatten(2).view(x.shape)"),
            {"test_heads_are_cut_and_joined_by_position", "test_no_output_depends_on_a_later_token"},
        ),
    ],
    ids=["right", "sees the future", "another scale", "heads joined across positions"],
)
def test_the_tests_of_a_model_pass_and_fail(change, wrong, tmp_path):
    path = tmp_path / "test_my_model.py"
    path.write_text(text(path.name).replace(*change), encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\n", encoding="utf-8")
    forked.run(TESTS, [(path, tmp_path / "pytest.ini")], tmp_path, expected=256 * bool(wrong))
    printed = (tmp_path / "0.out").read_text(encoding="utf-8")
    failed = set(re.findall(r"^FAILED \S+::(\w+)", printed, re.MULTILINE))
    assert failed - {"test_a_scan_finds_nothing"} == wrong, printed


@pytest.mark.parametrize("fault", [False, True], ids=["right", "with a fault"])
def test_the_workflow_passes_and_fails_on_a_checkpoint(fault, tmp_path, monkeypatch, attemper_command):
    """Its own command on a folder as it would be in a repository; the fault is 40 times the weights of q and k."""
    workflow = yaml.safe_load(text("scan_checkpoint.yml"))
    job = workflow["jobs"]["scan"]
    monkeypatch.chdir(tmp_path)
    folder = folders.save(tmp_path / job["env"]["CHECKPOINT"], "llama")
    if fault:
        weights = load_file(folder / "model.safetensors")
        larger = {name: 40 * one if re.search(r"[qk]_proj", name) else one for name, one in weights.items()}
        save_file(larger, folder / "model.safetensors", {"format": "pt"})
    commands = [shlex.split(step["run"]) for step in job["steps"] if "run" in step]
    assert commands[0] == ["pip", "install", "attemper[hf]"]
    (words,) = (words for words in commands if words[0] == "attemper")
    monkeypatch.setenv("CHECKPOINT", job["env"]["CHECKPOINT"])
    code, out, err = attemper_command(*map(os.path.expandvars, words[1:]))
    assert code == int(fault), out + err
    assert "<html" in Path("attention.html").read_text(encoding="utf-8")
    assert job["steps"][-1]["with"]["path"] == "attention.html"
