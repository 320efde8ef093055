"""A scan of a packed batch: its documents are apart, and no experiment is made that would move them."""

import pytest
import torch
import transformers

import attemper
import packed
import zoo
from close import in_float32

LENGTHS = (12, 20, 9)


def model(implementation):
    torch.manual_seed(0)
    made = transformers.LlamaForCausalLM(zoo.config(transformers.LlamaConfig, num_key_value_heads=2))
    made.set_attn_implementation("sdpa")
    return packed.with_flash(made) if implementation == "flash" else made


def batch():
    """With a cache transformers' SDPA would have no mask between documents."""
    collate = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    found = collate([{"input_ids": torch.randint(3, 99, (length,)).tolist()} for length in LENGTHS])
    del found["labels"]
    return found | {"use_cache": False}


@pytest.mark.parametrize(
    ("implementation", "shown_by"), [("flash", "cu_seq_lens_q"), ("flash", "position_ids"), ("sdpa", "position_ids")]
)
def test_a_scan_of_a_packed_batch(implementation, shown_by):
    given, others = batch(), ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    given = {name: one for name, one in given.items() if (name in others) <= (shown_by == "cu_seq_lens_q")}
    with packed.flash_attention():
        scan = attemper.scan(model(implementation), given, deep=True)
        document = scan.to_dict()
    parts = given["input_ids"].split(list(LENGTHS), dim=1)
    apart = [attemper.scan(model("sdpa"), {"input_ids": part}).to_dict()["heads"] for part in parts]
    for head, *each in zip(document["heads"], *apart, strict=True):
        peak = max(one["peak"] for one in each)
        assert head["rows"] == sum(LENGTHS)
        assert head["peak"] == in_float32(peak, sum(LENGTHS), logit=peak)
        entropy = sum(one["entropy"] * one["rows"] for one in each) / sum(LENGTHS)
        assert head["entropy"] == in_float32(entropy, sum(LENGTHS), logit=peak, size=1.0)
    deep = [check for check in document["checks"] if check["deep"]]
    message = "the batch is packed: with other tokens its documents would begin elsewhere"
    (alone,) = (check for check in deep if check["name"] == "packed")
    assert (alone["state"], alone["message"][:32]) == ("passed", "3 documents in one row have the ")
    assert {(check["state"], check["message"]) for check in deep if check is not alone} == {("skipped", message)}
    assert "(pass one document for each item)" in document["verdict"]["line"]
    assert {check["state"] for check in document["checks"] if not check["deep"]} == {"passed", "skipped"}
    assert [one for one in document["findings"] if one["name"] in ("attention", "scale")] == []
    if implementation == "flash":
        assert "its input is packed; the weights of its first document are shown." in document["notes"][0]
        assert (scan.document["attention"][0]["queries"], scan.document["attention"][0]["keys"]) == (12, 12)
        assert all(head["text_distance"] is not None for head in document["heads"])
