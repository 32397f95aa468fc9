"""What the benchmarks run: a model folder and prompts of exact lengths, the same files for every framework.

How long a response is must not depend on how a framework is told to stop, so the length is built into the weights.
The first dimensions of the residual stream hold a token's *class*: embeddings write them, no layer reads or changes
them, and the output layer reads them after the last norm. Prompt tokens are of class 0; a token of class k is followed
by one of class k + 1, up to the last class. There the response goes on with the same class, or ends with a fixed
chance. So every sampler that draws from the plain softmax gives lengths of the same distribution:
`min_response_tokens` plus a geometric variable, cut at `max_new_tokens`. All other weights are random, as they would
be in a freshly initialised model, and all of the network runs for every token.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from nemo_rl_moe.folders import put_in_place

STAMP = "workload.json"
PAD, END, UNKNOWN = 0, 1, 2
_SPECIAL = 3
_PROMPT_WORDS = 128
_TOKENS_OF_MIDDLE_CLASS = 16
# Log-odds against a token of the wrong class: about one in e^20 tokens.
_WRONG_CLASS = 20.0
# Size of the class in an embedding, in norms of the rest.
_CLASS_HEIGHT = 4.0


@dataclass(frozen=True)
class Workload:
    """One model, its prompts and its step.

    Attributes:
        end_probability: chance that a response ends after each token past the first `min_response_tokens`; 0 never
            ends one before `max_new_tokens`.
        min_response_tokens: shortest response, the end token included.
        prompt_tokens: exact length of every prompt.
        num_prompts, group_size: prompts in a step, and responses to each.
    """

    name: str
    vocab_size: int = 512
    hidden_size: int = 64
    moe_intermediate_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    end_probability: float = 0.0
    min_response_tokens: int = 1
    max_new_tokens: int = 32
    prompt_tokens: int = 64
    num_prompts: int = 8
    group_size: int = 8
    seed: int = 0

    @property
    def samples(self) -> int:
        """Responses in one step."""
        return self.num_prompts * self.group_size

    @property
    def num_classes(self) -> int:
        """Token classes: 0 is the prompt's, and the end token only follows the last."""
        return max(2, self.min_response_tokens) if self.end_probability else 2

    def digest(self) -> str:
        """Hex SHA-256 of all settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


FIXED = Workload("fixed-0.3M")
_LARGE = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "moe_intermediate_size": 256,
    "num_layers": 6,
    "num_heads": 8,
    "num_kv_heads": 4,
    "num_experts": 16,
    "min_response_tokens": 8,
    "max_new_tokens": 256,
}
# Means of about 70 and 138 tokens; in the second nearly a quarter runs into the limit.
VARIED = Workload("varied-20M", end_probability=1 / 64, **_LARGE)
VARIED_LONG = Workload("varied-long-20M", end_probability=1 / 170, **_LARGE)
# About as much work in generation as in training, on one core each.
BALANCED = Workload(
    "balanced-2M",
    hidden_size=128,
    moe_intermediate_size=128,
    num_layers=4,
    max_new_tokens=128,
    num_prompts=4,
)
# The same model with lengths that differ: what a step of a placement waits for is then its longest response.
BALANCED_VARIED = replace(
    BALANCED, name="balanced-varied-2M", min_response_tokens=8, max_new_tokens=256, end_probability=1 / 96
)
WORKLOADS = {w.name: w for w in (FIXED, VARIED, VARIED_LONG, BALANCED, BALANCED_VARIED)}


def make(workload: Workload, root: Path) -> Path:
    """Makes `<root>/<name>` with `model/` and `prompts.jsonl` unless it is there. Returns the folder."""
    folder = root / workload.name
    stamp = folder / STAMP
    if stamp.is_file() and json.loads(stamp.read_text())["digest"] == workload.digest():
        return folder
    root.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{workload.name}-", dir=root))
    try:
        count = _make_model(workload, partial / "model")
        _make_prompts(workload, partial / "prompts.jsonl")
        (partial / STAMP).write_text(
            json.dumps({"digest": workload.digest(), "parameters": count, "workload": asdict(workload)}, indent=1)
        )
        put_in_place(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def parameters(folder: Path) -> int:
    """Number of the model's parameters."""
    return json.loads((folder / STAMP).read_text())["parameters"]


def _make_prompts(workload: Workload, path: Path, rows: int = 512) -> None:
    """Each word is one token, so a prompt of n words has n tokens whatever splits it."""
    draw = random.Random(workload.seed)
    with path.open("w") as file:
        for _ in range(rows):
            words = [f"w{_SPECIAL + draw.randrange(_PROMPT_WORDS)}" for _ in range(workload.prompt_tokens)]
            file.write(json.dumps({"problem": " ".join(words), "answer": "0"}) + "\n")


def _make_model(workload: Workload, folder: Path) -> int:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

    words = ["<pad>", "<end>", "<unk>", *(f"w{i}" for i in range(_SPECIAL, workload.vocab_size))]
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner,
        pad_token="<pad>",
        eos_token="<end>",
        unk_token="<unk>",
        # The bare text, so that a chat and a plain prompt have the same tokens.
        chat_template="{% for message in messages %}{{ message['content'] }}{% endfor %}",
        model_max_length=4096,
    )
    torch.manual_seed(workload.seed)
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=workload.vocab_size,
            hidden_size=workload.hidden_size,
            intermediate_size=2 * workload.hidden_size,
            moe_intermediate_size=workload.moe_intermediate_size,
            num_hidden_layers=workload.num_layers,
            num_attention_heads=workload.num_heads,
            num_key_value_heads=workload.num_kv_heads,
            head_dim=workload.head_dim,
            num_experts=workload.num_experts,
            num_experts_per_tok=workload.num_experts_per_tok,
            norm_topk_prob=True,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=PAD,
            dtype="float32",
        )
    )
    with torch.no_grad():
        _build_lengths_in(model, workload)
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(p.numel() for p in model.parameters())


def token_classes(workload: Workload) -> list[int]:
    """Class of each token id: the prompt's words first, then a few for each step to the last class, which has the rest.

    Special tokens are of the last class, since the end token may only follow it.
    """
    last = workload.num_classes - 1
    middle = [k for k in range(1, last) for _ in range(_TOKENS_OF_MIDDLE_CLASS)]
    classes = [last] * _SPECIAL + [0] * _PROMPT_WORDS + middle
    return classes + [last] * (workload.vocab_size - len(classes))


def _build_lengths_in(model: Any, workload: Workload) -> None:
    """Writes the classes into the random weights (see the top of the file)."""
    import torch

    classes, count = torch.tensor(token_classes(workload)), workload.num_classes
    last, inner, head = count - 1, model.model, model.lm_head.weight
    embeddings = inner.embed_tokens.weight
    # Seen by the last norm: large against the rest, so that a class counts the same whatever the layers add.
    height = _CLASS_HEIGHT * embeddings.norm(dim=1).mean()
    embeddings[:, :count] = torch.nn.functional.one_hot(classes, count) * height
    for layer in inner.layers:
        layer.self_attn.o_proj.weight[:count] = 0
        layer.mlp.experts.down_proj[:, :count] = 0
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            # What the layers see is free of the class, at the size it would have without it. Else all tokens of a
            # class would go to the same experts.
            norm.weight[:count] = 0
            norm.weight[count:] = (1 + _CLASS_HEIGHT**2) ** 0.5
    words = torch.nonzero(classes == last).flatten()
    words = words[words >= _SPECIAL]
    seen = inner(input_ids=words[None, :64]).last_hidden_state[0, :, last].mean()
    allowed = classes[None, :] == (torch.arange(count) + 1).clamp(max=last)[:, None]
    log_odds = torch.where(allowed, 0.0, -_WRONG_CLASS)
    log_odds[:, :_SPECIAL] = -_WRONG_CLASS
    head[:, :count] = log_odds.T / seen
    if workload.end_probability:
        odds = workload.end_probability / (1 - workload.end_probability)
        log_odds[last, END] = math.log(len(words) * odds)
        for _ in range(3):
            head[END, last] = log_odds[last, END] / seen
            # The random rest of the logits adds to the chance of the other words, so the first guess is a bit off.
            chance = model(input_ids=words[torch.randint(len(words), (4, 256))]).logits.softmax(-1)[..., END].mean()
            log_odds[last, END] += math.log(odds / (chance / (1 - chance)))
