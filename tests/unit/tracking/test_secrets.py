"""Which names are secret, and what is left of texts that hold one."""

from __future__ import annotations

import pytest

from nemo_rl_moe.tracking.secrets import Redactor, is_secret_name


@pytest.mark.parametrize("name", ["HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "db_password", "APIKEYS"])
def test_these_5_names_hold_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize("name", ["TOKENIZERS_PARALLELISM", "OMP_NUM_THREADS", "KEYBOARD", "PATH"])
def test_these_4_names_do_not(name: str) -> None:
    assert not is_secret_name(name)


def test_the_longer_of_two_overlapping_secrets_is_removed_whole() -> None:
    redactor = Redactor({"A_TOKEN": "abcdef", "B_TOKEN": "abcdef-123"}, {})
    assert redactor.text("use abcdef-123 or abcdef") == "use <redacted> or <redacted>"


def test_a_secret_of_5_characters_is_too_common_to_be_replaced_in_texts() -> None:
    assert Redactor({"A_KEY": "false"}, {}).text("shuffle: false") == "shuffle: false"


def test_a_nested_map_of_worker_environments_is_redacted_and_the_input_is_not_changed() -> None:
    plan = {"environment": {"policy": {"HF_TOKEN": "x", "OMP_NUM_THREADS": "2"}}, "answer_key": "answer"}
    assert Redactor({}, {}).tree(plan) == {
        "environment": {"policy": {"HF_TOKEN": "<redacted>", "OMP_NUM_THREADS": "2"}},
        "answer_key": "answer",
    }
    assert plan["environment"] == {"policy": {"HF_TOKEN": "x", "OMP_NUM_THREADS": "2"}}
