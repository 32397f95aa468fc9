"""A tokenizer that lacks something the loops need must say so before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from nemo_rl_moe.data.tokenizer import load_tokenizer
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema import PolicyConfig
from tools.make_tiny_moe import Settings, make_tokenizer


def policy(folder: Path | str, **settings: Any) -> PolicyConfig:
    return PolicyConfig(model_name=str(folder), generation={}, **settings)


def without(folder: Path, *names: str) -> Path:
    tokenizer = make_tokenizer(Settings())
    for name in names:
        setattr(tokenizer, name, None)
    tokenizer.save_pretrained(folder)
    return folder


def test_the_tiny_tokenizer_loads_with_end_token_1_and_padding_0(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(policy(tokenizer_dir))
    assert (tokenizer.eos_token, tokenizer.eos_token_id, tokenizer.pad_token_id) == ("<|im_end|>", 1, 0)


def test_the_tokenizers_own_name_wins_over_the_models(tokenizer_dir: Path) -> None:
    assert len(load_tokenizer(policy("nowhere", tokenizer={"name": str(tokenizer_dir)}))) == 512


def test_a_missing_model_names_the_key_and_the_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=r"policy.model_name: '/no/such/folder' is neither a folder here nor a model"):
        load_tokenizer(policy("/no/such/folder"))
    with pytest.raises(UserError, match=r"policy.tokenizer.name: the folder '.*' holds no tokenizer"):
        load_tokenizer(policy("m", tokenizer={"name": str(tmp_path)}))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ("chat_template", "has no chat template; set policy.tokenizer.chat_template"),
        ("eos_token", "has no end token"),
        (
            "pad_token",
            "has no padding token; set policy.tokenizer.pad_token to one of its tokens, such as '<|im_end|>'",
        ),
    ],
)
def test_a_tokenizer_without_what_the_loops_need_is_refused(tmp_path: Path, missing: str, message: str) -> None:
    with pytest.raises(UserError) as error:
        load_tokenizer(policy(without(tmp_path, missing)))
    assert message in str(error.value)


def test_the_recipe_can_give_the_template_and_the_padding_token(tmp_path: Path) -> None:
    folder = without(tmp_path, "chat_template", "pad_token")
    settings = {"chat_template": "{{ messages[0]['content'] }}!", "pad_token": "<|im_end|>"}
    tokenizer = load_tokenizer(policy(folder, tokenizer=settings))
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi!"
    assert tokenizer.pad_token_id == 1
    assert len(tokenizer) == 512


def test_a_padding_token_outside_the_vocabulary_is_refused_instead_of_growing_it(tokenizer_dir: Path) -> None:
    with pytest.raises(UserError, match=r"policy.tokenizer.pad_token: '<pad>' is not in the tokenizer's vocabulary"):
        load_tokenizer(policy(tokenizer_dir, tokenizer={"pad_token": "<pad>"}))


def test_code_in_the_model_folder_does_not_run_without_trust_remote_code(tmp_path: Path) -> None:
    proof = tmp_path / "ran"
    folder = tmp_path / "model"
    make_tokenizer(Settings()).save_pretrained(folder)
    (folder / "own_tokenizer.py").write_text(
        f"open({str(proof)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizerFast\n"
        "class OwnTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": [None, "own_tokenizer.OwnTokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match="trust_remote_code"):
        load_tokenizer(policy(folder))
    assert not proof.exists()
    assert isinstance(load_tokenizer(policy(folder, trust_remote_code=True)), PreTrainedTokenizerFast)
    assert proof.exists()
