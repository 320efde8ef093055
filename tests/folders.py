"""Model folders as people have them: small models of the zoo saved as safetensors, with a tokenizer that knows a few words."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn

import zoo

SENTENCES = "the dog chased the ball because it was fast . a cat sat on the mat and looked at one two three four"
WORDS = list(dict.fromkeys(SENTENCES.split()))
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"]
CLASSES = {
    "bert": transformers.BertModel,
    "gpt2": transformers.GPT2LMHeadModel,
    "llama": transformers.LlamaForCausalLM,
    "t5": transformers.T5ForConditionalGeneration,
    "vit": transformers.ViTForImageClassification,
    "whisper": transformers.WhisperForConditionalGeneration,
}


def tokenizer(framed: bool = True) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that knows whole lower-case words alone; with ``framed``, it puts [CLS] … [SEP] around them."""
    words = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    inner.decoder = decoders.WordPiece()
    if framed:
        inner.post_processor = processors.BertProcessing(("[SEP]", words["[SEP]"]), ("[CLS]", words["[CLS]"]))
    names = {
        "pad_token": "[PAD]",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "unk_token": "[UNK]",
        "mask_token": "[MASK]",
    }
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def save(folder: Path, name: str, with_tokenizer: bool = True, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model of the zoo as the class that people would use for it."""
    torch.manual_seed(0)
    config = zoo.make(name).model.config
    torch.manual_seed(0)
    model: nn.Module = CLASSES[name](config).to(dtype)
    level = transformers.utils.logging.is_progress_bar_enabled()
    transformers.utils.logging.disable_progress_bar()
    model.save_pretrained(folder)
    if level:
        transformers.utils.logging.enable_progress_bar()
    if with_tokenizer:
        tokenizer(framed=name in ("bert", "t5")).save_pretrained(folder)
    return folder
