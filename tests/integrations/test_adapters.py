"""The adapters for axolotl, torchtitan and Megatron, each with the real package, which `make integrations` installs."""

import importlib
import importlib.metadata
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import attemper
import packed
from attemper.errors import InputError, MissingExtra
from close import in_float32, in_float64
from integrations.trained import Tiny, batches
from judge import assert_as_exact

ADAPTERS = {"axolotl": "AttemperPlugin", "torchtitan": "AttentionMetrics", "megatron": "measure_core_attention"}
PACKAGES = {"megatron": "megatron-core"}
pytestmark = pytest.mark.filterwarnings("default")  # of packages of others


def adapter(name):
    try:
        importlib.metadata.version(PACKAGES.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"needs the package {PACKAGES.get(name, name)}; make integrations has an environment with it")
    return getattr(importlib.import_module(f"attemper.integrations.{name}"), ADAPTERS[name])


@pytest.mark.parametrize("name", ADAPTERS)
def test_an_adapter_is_short_and_says_what_it_needs(name):
    path = Path(attemper.__file__).parent / "integrations" / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 100
    try:
        importlib.metadata.version(PACKAGES.get(name, name))
    except importlib.metadata.PackageNotFoundError:
        if name == "megatron":  # needs it when a hook runs
            return
        with pytest.raises(MissingExtra, match=rf"{ADAPTERS[name]} needs {name}\. Type pip install {name}\."):
            importlib.import_module(f"attemper.integrations.{name}")


def test_axolotl_finds_the_plugin_and_its_options(tmp_path):
    plugin_class = adapter("axolotl")
    import transformers
    from axolotl.integrations.base import PluginManager
    from axolotl.integrations.config import merge_input_args
    from axolotl.utils.dict import DictDefault

    path = tmp_path / "run.jsonl"
    cfg = DictDefault({"plugins": ["attemper.integrations.axolotl.AttemperPlugin"], "attemper": {"path": str(path)}})
    manager = PluginManager.get_instance()
    manager.register(cfg.plugins[0])
    plugin = manager.plugins[cfg.plugins[0]]
    assert type(plugin) is plugin_class
    plugin.register(cfg)
    for merged in merge_input_args():
        assert "attemper" in merged.model_fields

    settings = transformers.TrainingArguments(
        str(tmp_path),
        max_steps=4,
        logging_steps=2,
        per_device_train_batch_size=2,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
    )
    items = [{name: one[index] for name, one in batch.items()} for batch in batches() for index in range(2)]
    trainer = transformers.Trainer(Tiny(), settings, train_dataset=items)
    manager.post_trainer_create(cfg, trainer)
    trainer.train()
    manager.post_train(cfg, trainer.model)
    assert plugin.callback.record.steps == [2, 4]
    assert attemper.Record.read(path).steps == [2, 4]
    for wrong, says in (({"evry": 2}, "unknown option 'evry'"), ([1], "`attemper` must hold options")):
        with pytest.raises(InputError, match=says):
            plugin.register({"attemper": wrong})


def test_torchtitan_logs_attention_with_its_own_metrics(tmp_path, monkeypatch):
    metrics_class = adapter("torchtitan")
    from torchtitan.components import metrics as own
    from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig

    logged = {}

    class Logger:
        def log(self, metrics, step):
            logged[step] = metrics

        def close(self):
            pass

    class Dims:
        non_data_parallel_size = 1

    memory = SimpleNamespace(
        device_name="cpu", reset_peak_stats=lambda: None, get_peak_stats=lambda: own.DeviceMemStats(*[0.0] * 6)
    )
    monkeypatch.setattr(own, "build_device_memory_monitor", lambda: memory)  # it asks CUDA
    path = tmp_path / "run.jsonl"
    config = metrics_class.Config(
        log_freq=2, attention_path=str(path), attention_layers=True, disable_color_printing=True
    )
    metrics = config.build(parallel_dims=Dims(), dump_folder=str(tmp_path))
    assert type(metrics) is metrics_class
    metrics.logger, metrics.num_flops_per_token = Logger(), 1
    model = Tiny().train()
    group = ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.01})
    metrics.optimizers = OptimizersContainer.Config(param_groups=[group], implementation="for-loop").build(
        model_parts=[model]
    )
    metrics.model_parts = [model]
    for step, batch in zip(range(5, 11), batches(), strict=False):  # as after a checkpoint of step 4
        metrics.optimizers.zero_grad()
        should_log = metrics.should_log(step)
        metrics.data_loading_times.append(0.1)
        loss = model(**batch)["loss"]
        loss.backward()
        metrics.optimizers.step()
        if should_log:
            metrics.log(step, loss.item(), loss.item(), 1.0, extra_metrics={"n_tokens_seen": 1})
    metrics.close()
    assert sorted(logged) == [6, 8, 10]
    record = attemper.Record.read(path)
    assert record.steps == [6, 8, 10]
    assert record.logged[6]["loss"] == logged[6]["loss_metrics/global_avg_loss"]
    for step, numbers in logged.items():
        expected = attemper.integrations.summary(record, step, layers=True)
        assert numbers["n_tokens_seen"] == 1
        assert {name: value for name, value in numbers.items() if name.startswith("attemper/")} == in_float64(expected)
    with pytest.raises(InputError, match="`clip` must be a logit above 0"):
        metrics_class.Config(attention_clip=-1.0).build(parallel_dims=Dims(), dump_folder=str(tmp_path))


@pytest.fixture
def megatron(monkeypatch, free_port):
    """Megatron on one process without a GPU: it asks CUDA for the device of its buffers, and of its random numbers."""
    measure = adapter("megatron")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    from megatron.core import parallel_state, tensor_parallel

    store = torch.distributed.TCPStore("127.0.0.1", free_port, 1, True)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    monkeypatch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda: SimpleNamespace(fork=nullcontext))
    yield measure
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    packed.SEEN.clear()


def gpt(core=None):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    torch.manual_seed(0)
    sizes = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "init_method_std": 0.4,
    }
    plain = {
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "masked_softmax_fusion": False,
        "bias_dropout_fusion": False,
    }
    config = TransformerConfig(**sizes, **plain, use_cpu_initialization=True)
    spec = get_gpt_layer_local_spec()
    if core is not None:
        spec.submodules.self_attention.submodules.core_attention = core
    return GPTModel(config, spec, vocab_size=64, max_sequence_length=32)


def test_megatron_hands_q_and_k_to_a_kernel_that_no_op_shows(megatron):
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    class Fused(DotProductAttention):
        """Where TEDotProductAttention would be, with its arguments."""

        def forward(
            self,
            query,
            key,
            value,
            attention_mask,
            attn_mask_type,
            attention_bias=None,
            packed_seq_params=None,
            num_splits=None,
        ):
            if packed_seq_params is not None:
                offsets = packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv
                return packed.varlen(query, key, value, *offsets, 0, 0, causal=True).flatten(1).unsqueeze(1)
            q, k, v = (one.transpose(0, 1) for one in (query, key, value))
            return packed.dense(q, k, v, causal=attn_mask_type == AttnMaskType.causal).transpose(0, 1).flatten(2)

    ids = torch.randint(0, 64, (2, 9))
    inputs = ids, torch.arange(9).expand(2, 9), torch.ones(9, 9, dtype=torch.bool).triu(1)[None, None]
    own, fused = gpt(), gpt(Fused)
    fused.load_state_dict(own.state_dict())
    hooks = megatron(fused)
    assert (len(hooks), megatron(own)) == (2, [])
    with attemper.watch(own) as expected, attemper.watch(fused) as found:
        for watch, model in ((expected, own), (found, fused)):
            for _ in range(2):
                model(*inputs, labels=ids).mean().backward()
                watch.step()
    assert found.record.notes == []
    assert found.record.layers == [f"decoder.layers.{n}.self_attention.core_attention" for n in (0, 1)]
    infos = [(info.route, info.causal, info.heads, info.queries) for info in found.record.info.values()]
    assert infos == [("core_attention", True, 4, 9)] * 2
    for sign in ("entropy", "peak", "rows"):
        ours, theirs = (torch.tensor([row[sign] for row in one.record.to_dicts()]) for one in (found, expected))
        assert_as_exact(sign, ours, [theirs], theirs.double())

    packed.SEEN.clear()
    core, (q, k) = fused.decoder.layers[0].self_attention.core_attention, (torch.randn(9, heads, 8) for heads in (4, 2))
    offsets = torch.tensor([0, 3, 9], dtype=torch.int32)
    sequences = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=6, max_seqlen_kv=6)
    with attemper.watch(core) as watch:
        core(q, k, k, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=sequences)
    rows = watch.record.to_dicts()
    for sign, values in packed.SEEN[0].items():
        assert [row[sign] for row in rows] == in_float32(values, 9, 1.0), sign
    for hook in hooks:
        hook.remove()


def test_what_megatron_gives_that_cannot_be_measured_is_said(megatron):
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class Silent(DotProductAttention):
        def forward(self, query, key, value, attention_mask, attn_mask_type=None, attention_bias=None):
            return query.flatten(2)

    model = gpt(Silent)
    megatron(model)
    core, x = model.decoder.layers[0].self_attention.core_attention, torch.randn(5, 2, 4, 8)
    with (
        pytest.warns(UserWarning, match="Megatron's core attention with context .* or an attention_bias"),
        attemper.watch(core),
    ):
        core(x, x[:, :, :2], x[:, :, :2], None, attention_bias=torch.zeros(1))
    with pytest.raises(InputError, match="Linear has no module named core_attention"):
        megatron(nn.Linear(2, 2))
