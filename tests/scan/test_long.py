"""A scan of 8,192 tokens holds no n × n matrix: measured as peak memory over that of the model alone, in a fresh process."""

import json
import subprocess
import sys

import pytest

SCAN = """
import json, resource, torch, transformers, attemper
sizes = {"num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4}
config = transformers.LlamaConfig(**sizes, intermediate_size=256, vocab_size=100, max_position_embeddings=8192)
model = transformers.LlamaModel(config).eval()
batch = {"input_ids": torch.randint(3, 100, (1, 8192)), "use_cache": False}
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
with torch.no_grad():
    model(**batch)
alone = peak()
found = attemper.scan(model, batch)
print(json.dumps({"over": peak() - alone, "heads": len(found.heads), "size": len(json.dumps(found.to_dict(True)))}))
"""


@pytest.mark.exhaustive
def test_8192_tokens_fit():
    done = subprocess.run([sys.executable, "-c", SCAN], capture_output=True, text=True, timeout=600, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["heads"] == 16
    assert found["over"] < 512  # MiB; one layer's weights alone would be 8 · 8192² · 4 bytes = 2048
    assert found["size"] < 4e6  # what a report would carry
