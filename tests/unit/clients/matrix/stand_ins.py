"""Folders in the place of what clients' programs take from the hub, where libraries look first."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from unit.clients.small_models import llama

WORDS = [f"w{number}" for number in range(40)]
CAUSAL, CLASSIFIER, TEXTS, PAIRS = "causal", "classifier", "texts", "pairs"
HUB_LLAMA = "hf-internal-testing/tiny-random-LlamaForCausalLM"
HUB_GPT2 = "sshleifer/tiny-gpt2"
HUB_DATA, HUB_METRIC = "nyu-mll/glue", "glue"
HEADS = {"num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}

CARD = """---
configs:
- config_name: mrpc
  data_files:
  - split: train
    path: mrpc/train.jsonl
  - split: validation
    path: mrpc/validation.jsonl
---
"""
METRIC = '''"""The share of right answers, as the hub's metric of this name has it."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        whole = datasets.Value("int64")
        features = datasets.Features({"predictions": whole, "references": whole})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        right = sum(a == b for a, b in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
'''


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    words = {word: number for number, word in enumerate(["[PAD]", "[EOS]", "[UNK]", *WORDS])}
    core = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "[PAD]", "eos_token": "[EOS]", "unk_token": "[UNK]"}
    return PreTrainedTokenizerFast(tokenizer_object=core, **tokens)


def causal(vocabulary: int = len(WORDS) + 3) -> LlamaForCausalLM:
    """A small model, from torch's current random state."""
    return LlamaForCausalLM(llama(32, vocabulary, **HEADS))


def said(start: int, length: int) -> str:
    """Words that count up."""
    return " ".join(WORDS[(start + number) % len(WORDS)] for number in range(length))


def pairs_of_words() -> Iterable[dict[str, str]]:
    """What is asked, and a good and a bad answer."""
    for start in range(64):
        good, bad = said(start + 4, 4), said(start, 4)
        yield {"prompt": said(start, 4), "chosen": good, "rejected": bad}


def write_lines(file: Path, entries: Iterable[Mapping[str, Any]]) -> None:
    """One line of JSON each."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(entry) + "\n" for entry in entries), encoding="utf-8")


def sentences(count: int) -> Iterable[dict[str, Any]]:
    """Pairs of sentences, the last word of which says the label."""
    for number in range(count):
        label = number * 5 // 3 % 2
        # The last two words are kept for the label.
        first, second = (
            " ".join(WORDS[(factor * number + place) % 38] for place in range(3 + number % several))
            for factor, several in ((7, 5), (11, 3))
        )
        told = f"{second} {WORDS[38 + label]}"
        yield {"sentence1": first, "sentence2": told, "label": label, "idx": number}


def write_models(out: Path) -> None:
    """Those of the hub, and two that a program's command line can name."""
    torch.manual_seed(0)
    # The programs' rate is 2e-5, which moves small weights alone in a few steps.
    small = llama(32, len(WORDS) + 3, initializer_range=0.002, **HEADS)
    made = {CLASSIFIER: LlamaForSequenceClassification(small)}
    for name, model in {**made, CAUSAL: causal(), HUB_LLAMA: causal(300)}.items():
        model.save_pretrained(out / name)
        tokenizer().save_pretrained(out / name)
    tiny = transformers.GPT2Config(
        vocab_size=64, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    transformers.GPT2LMHeadModel(tiny).save_pretrained(out / HUB_GPT2)


def teach_wrong(out: Path, steps: int) -> None:
    """Move the classifier away from the labels, by about the steps that a program needs back."""
    model = LlamaForSequenceClassification.from_pretrained(out / CLASSIFIER)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-5)
    entries = list(sentences(64))
    pairs = [[entry[f"sentence{number}"] for entry in entries] for number in (1, 2)]
    batch = tokenizer()(*pairs, padding=True, return_tensors="pt")
    wrong = torch.tensor([1 - entry["label"] for entry in entries])
    asked = {name: batch[name] for name in ("input_ids", "attention_mask")}
    for _ in range(steps):
        optimizer.zero_grad()
        model(**asked, labels=wrong).loss.backward()
        optimizer.step()
    model.save_pretrained(out / CLASSIFIER)


def write_data(out: Path) -> None:
    """Data sets, and a metric."""
    for split, count in (("train", 256), ("validation", 64)):
        write_lines(out / HUB_DATA / "mrpc" / f"{split}.jsonl", sentences(count))
    (out / HUB_DATA / "README.md").write_text(CARD, encoding="utf-8")
    (out / HUB_METRIC).mkdir()
    (out / HUB_METRIC / f"{HUB_METRIC}.py").write_text(METRIC, encoding="utf-8")
    write_lines(out / TEXTS / "train.jsonl", ({"text": said(start, 12)} for start in range(64)))
    write_lines(out / PAIRS / "train.jsonl", pairs_of_words())
