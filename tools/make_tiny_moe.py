#!/usr/bin/env python3
"""Makes the tiny Qwen3 models that the CPU recipes train: real Hugging Face checkpoints, mixture of experts or dense.

    python tools/make_tiny_moe.py                  # models/tiny-moe-cpu: 0.31 million parameters, 8 experts
    python tools/make_tiny_moe.py --dense          # models/tiny-dense-cpu: 0.16 million parameters
    python tools/make_tiny_moe.py --all            # both
    python tools/make_tiny_moe.py --recipe FILE    # the one that a recipe trains

A model has a config, float32 safetensors and a byte-level BPE tokenizer of its own, made here from a fixed seed. A
random model never answers anything right, so reinforcement learning would have nothing to reinforce. A short
supervised warm-up therefore teaches it sums of two digits, then blurs what it knows: the last steps show the right
answer in `teacher_accuracy` of the cases and that of another sum otherwise. The model is left unsure, not ignorant,
and a recipe has something to sharpen. (Stopping the teaching early instead gives the same first reward, but the wrong
answers are then learned as firmly as the right ones, and GRPO gained only 0.06 in 100 steps.)
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
import time
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nemo_rl_moe.folders import put_in_place

# The libraries are imported where they are used: a call that finds the model there answers at once.
if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

STAMP = "tiny_moe.json"
PAD, END, START = "<|pad|>", "<|im_end|>", "<|im_start|>"
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# The tokenizer also learns from word problems: two-digit sums alone hold too few words for 512 tokens.
TOKENIZER_TASKS = ("chain_sum", "basic_arithmetic", "gsm_symbolic")


@dataclass(frozen=True)
class Settings:
    """All that the files depend on; its hash is the stamp that makes a second call return at once.

    Attributes:
        hidden_size, moe_intermediate_size: multiples of 32, which vLLM's CPU kernels need.
        num_experts: 0 makes a dense Qwen3, whose layers are twice as wide as the stream.
        task, task_config: reasoning-gym task of the warm-up, the one the recipe trains on.
        warmup_steps: AdamW steps of batch_size examples.
        blur_steps: how many of them, at the end, show wrong answers among the right ones.
        teacher_accuracy: share of right answers in those; the mean reward that a run starts with is near it.
        learning_rate: peak, reached linearly over the first tenth of the steps and followed by a linear decay to 0.
    """

    seed: int = 0
    vocab_size: int = 512
    hidden_size: int = 64
    moe_intermediate_size: int = 64
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    num_experts: int = 8
    num_experts_per_tok: int = 2
    task: str = "chain_sum"
    task_config: dict[str, Any] = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    warmup_steps: int = 300
    blur_steps: int = 50
    teacher_accuracy: float = 0.25
    batch_size: int = 64
    learning_rate: float = 3e-3

    def digest(self) -> str:
        """Hex SHA-256 of the settings."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()


def make_tokenizer(settings: Settings) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on reasoning-gym questions; every digit is a token of its own."""
    import reasoning_gym
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[PAD, END, START],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    # Often enough that each role is one token.
    texts = ["system\nuser\nassistant\n"] * 2000
    for task in TOKENIZER_TASKS:
        texts += [row["question"] for row in reasoning_gym.create_dataset(task, size=300, seed=settings.seed)]
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != settings.vocab_size:
        raise RuntimeError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, expected {settings.vocab_size}")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
    )


def make_model(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    """A float32 Qwen3 or Qwen3-MoE with untied embeddings, initialised from the seed."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(settings.seed)
    experts = {
        "moe_intermediate_size": settings.moe_intermediate_size,
        "num_experts": settings.num_experts,
        "num_experts_per_tok": settings.num_experts_per_tok,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    shape: dict[str, Any] = {
        "vocab_size": settings.vocab_size,
        "hidden_size": settings.hidden_size,
        "intermediate_size": 2 * settings.hidden_size,
        "num_hidden_layers": settings.num_layers,
        "num_attention_heads": settings.num_heads,
        "num_key_value_heads": settings.num_kv_heads,
        "head_dim": settings.head_dim,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        # Larger than a real model's 0.02: at width 64 that would leave router and attention almost uniform.
        "initializer_range": 0.08,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "dtype": "float32",
    }
    if settings.num_experts:
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts))
    return Qwen3ForCausalLM(Qwen3Config(**shape))


def warmup_examples(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer ids of every distinct problem among 3000 rows of the task, in a fixed order."""
    import reasoning_gym

    # Far from the seeds that recipes use: reasoning-gym draws row i from seed + i.
    dataset = reasoning_gym.create_dataset(settings.task, size=3000, seed=10_000_000, **settings.task_config)
    answers = {row["question"]: row["answer"] for row in dataset}
    examples = []
    for question, answer in answers.items():
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer([prompt, answer + END], add_special_tokens=False)["input_ids"]
        examples.append((ids[0], ids[1]))
    return examples


def collate(examples: list[tuple[list[int], list[int]]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and labels, int64 [examples, longest]; the label is -100 wherever there is no answer token."""
    import torch

    width = max(len(prompt) + len(answer) for prompt, answer in examples)
    ids = torch.full((len(examples), width), pad_id)
    labels = torch.full((len(examples), width), -100)
    for i, (prompt, answer) in enumerate(examples):
        end = len(prompt) + len(answer)
        ids[i, :end] = torch.tensor(prompt + answer)
        labels[i, len(prompt) : end] = torch.tensor(answer)
    return ids, labels


def warm_up(model: PreTrainedModel, settings: Settings, tokenizer: PreTrainedTokenizerFast) -> list[float]:
    """Next-token training on the answers. Returns the loss of each step in nats per answer token."""
    import torch

    examples = warmup_examples(settings, tokenizer)
    rng = random.Random(settings.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    losses = []
    model.train()
    for step in range(settings.warmup_steps):
        progress = (step + 1) / settings.warmup_steps
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * min(10 * progress, 1.0 - progress)
        batch = rng.choices(examples, k=settings.batch_size)
        if step >= settings.warmup_steps - settings.blur_steps:
            batch = [(p, a if rng.random() < settings.teacher_accuracy else rng.choice(examples)[1]) for p, a in batch]
        ids, labels = collate(batch, tokenizer.pad_token_id)
        # Padding is on the right of a causal model: no real token sees it, so no attention mask is needed.
        loss = model(input_ids=ids, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


def up_to_date(out: Path, settings: Settings) -> bool:
    """Whether `out` holds a model of exactly these settings."""
    stamp = out / STAMP
    return stamp.is_file() and json.loads(stamp.read_text()).get("digest") == settings.digest()


def make(out: Path, settings: Settings) -> bool:
    """Makes the model unless it is there. Returns True when it was made.

    The files appear by a rename, so that an interrupted call leaves no half model behind.
    """
    if up_to_date(out, settings):
        return False
    import torch
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    out.parent.mkdir(parents=True, exist_ok=True)
    threads = torch.get_num_threads()
    # One thread: the sums' order, and so the bits of the result, must not depend on the number of cores.
    torch.set_num_threads(1)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        tokenizer = make_tokenizer(settings)
        model = make_model(settings, tokenizer)
        losses = warm_up(model, settings, tokenizer)
        model.eval().save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        record = [round(loss, 4) for loss in losses]
        stamp = {"digest": settings.digest(), "settings": asdict(settings), "warmup_losses": record}
        (partial / STAMP).write_text(json.dumps(stamp, indent=1) + "\n")
        partial.chmod(0o755)
        put_in_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        torch.set_num_threads(threads)
    return True


MOE, DENSE = Path("models/tiny-moe-cpu"), Path("models/tiny-dense-cpu")
MODELS = {MOE: Settings(), DENSE: Settings(num_experts=0, num_experts_per_tok=0)}


def model_of(recipe: Path) -> Path | None:
    """The tiny model that a recipe trains; None when it trains another one, or is wrong, which `run` will say."""
    from nemo_rl_moe.errors import UserError
    from nemo_rl_moe.recipe.load import load_recipe

    try:
        name = Path(load_recipe(recipe, check=False).recipe.policy.model_name)
    except UserError:
        return None
    return name if name in MODELS else None


def make_and_tell(out: Path, settings: Settings) -> None:
    """Makes one model and prints what was done."""
    start = time.monotonic()
    if make(out, settings):
        print(f"{out}: made in {time.monotonic() - start:.0f} s")
    else:
        print(f"{out}: already there with these settings")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--dense", action="store_true", help="a dense model instead of a mixture of experts")
    which.add_argument("--all", action="store_true", help="both models, in their own folders")
    which.add_argument("--recipe", type=Path, help="the model of this recipe, if it is one of the two")
    parser.add_argument("--out", type=Path, help=f"folder of the model; {MOE} or {DENSE}")
    parser.add_argument("--seed", type=int, default=Settings.seed, help="seed of weights and warm-up")
    parser.add_argument("--warmup-steps", type=int, default=Settings.warmup_steps, help="0 leaves the weights random")
    args = parser.parse_args()
    if args.recipe is not None:
        wanted = model_of(args.recipe)
        names = [wanted] if wanted else []
    else:
        names = list(MODELS) if args.all else [DENSE if args.dense else MOE]
    for name in names:
        settings = replace(MODELS[name], seed=args.seed, warmup_steps=args.warmup_steps)
        make_and_tell(args.out if args.out and len(names) == 1 else name, settings)


if __name__ == "__main__":
    main()
