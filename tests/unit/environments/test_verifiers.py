"""What counts as right. Each row is a rule stated in docs/environments.md; a silent change of it changes rewards."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nemo_rl_moe.environments.base import ScoreRequest
from nemo_rl_moe.environments.pool import VerifierPool
from nemo_rl_moe.environments.verifiers import last_boxed, load_verifier
from nemo_rl_moe.recipe.schema import EnvConfig

RULES = [
    # (dataset's answer, response, reward)
    ("42", "The answer is 42", 1.0),
    ("42", "42", 1.0),
    ("42", r"So it is \boxed{42}.", 1.0),
    ("42", "I first got 41, then 42", 1.0),
    ("42", "It is 42, not 41", 0.0),
    ("42", "The answer is 41 or 42", 0.0),
    ("42", "", 0.0),
    ("42", "no idea", 0.0),
    # Boxes: the last complete one is the answer, and nothing outside of it counts.
    ("42", r"\boxed{41}, no: \boxed{42}", 1.0),
    ("42", r"\boxed{42}, no: \boxed{41}", 0.0),
    ("42", r"\boxed{42} wait, \boxed{", 1.0),
    ("42", r"\boxed{41}. The answer is 42", 0.0),
    ("42", r"\boxed{41, 42}", 0.0),
    ("42", r"\boxed{}", 0.0),
    # Number formats.
    ("1000", "1,000", 1.0),
    ("1,000", r"\boxed{1000}", 1.0),
    ("0.5", r"\boxed{\frac{1}{2}}", 1.0),
    (r"\frac{1}{2}", "0.5", 1.0),
    ("2", r"\boxed{4/2}", 1.0),
    ("2", r"\boxed{\sqrt{4}}", 1.0),
    ("-5", "5", 0.0),
    ("1/3", "0.333", 0.0),
    (r"50\%", r"\boxed{50\%}", 1.0),
    (r"50\%", "0.5", 0.0),
    (r"50\%", r"\boxed{50}", 0.0),
    # Equations, sets, intervals, words.
    ("x=3", "3", 1.0),
    ("3", r"\boxed{x=3}", 1.0),
    ("x=3", r"\boxed{x=4}", 0.0),
    (r"\{1,2\}", r"\boxed{\{2,1\}}", 1.0),
    ("[1,2)", r"\boxed{[1,2]}", 0.0),
    ("A", r"\boxed{A}", 1.0),
    ("A", r"\boxed{B}", 0.0),
    # An answer that math-verify cannot parse is compared as text: never right by default.
    ("???", "42", 0.0),
    ("???", r"\boxed{???}", 1.0),
]


@pytest.fixture(scope="module")
def verify() -> Any:
    return load_verifier("math_verify")


@pytest.mark.parametrize(("answer", "response", "reward"), RULES)
def test_math_verify_grades_as_documented(verify: Any, answer: str, response: str, reward: float) -> None:
    assert verify(response, {"answer": answer}) == reward


def test_42_is_right_from_a_thread_too(verify: Any) -> None:
    rewards = []
    thread = threading.Thread(target=lambda: rewards.append(verify(r"\boxed{42}", {"answer": "42"})))
    thread.start()
    thread.join(30)
    assert rewards == [1.0]


def test_an_empty_answer_is_an_error_not_a_reward(verify: Any) -> None:
    with pytest.raises(ValueError, match="the dataset's answer '' is nothing that math-verify can parse"):
        verify("42", {"answer": ""})


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"a \boxed{1} b", "1"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{1} \boxed{2}", "2"),
        (r"\boxed{1} \boxed{2", "1"),
        (r"\boxed{", None),
        (r"\boxed 3", None),
        ("", None),
    ],
)
def test_the_last_complete_box_is_found_with_its_braces_balanced(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


def test_a_power_tower_is_killed_at_the_limit_and_its_neighbours_are_graded() -> None:
    responses = [r"\boxed{42}", r"\boxed{9^{9^{9^{9}}} \cdot \sqrt{9^{9^{9^{9}}}}}", r"\boxed{42}"]
    config = EnvConfig(verifier="math_verify", num_workers=1, timeout_s=8.0)
    with VerifierPool({"math": config}) as pool:
        result = pool.score([ScoreRequest("math", i, "?", r, {"answer": "42"}) for i, r in enumerate(responses)])
    assert result.rewards.tolist() == [1.0, 0.0, 1.0]
    assert (result.errors, result.timeouts) == (0, 1)


def entry(answer: str) -> dict[str, Any]:
    return {"question": "4 - 1 =", "answer": answer, "metadata": {}}


@pytest.mark.parametrize(("response", "reward"), [("3", 1.0), ("3\n", 1.0), ("4", 0.0), ("", 0.0), ("x 3", 1 / 3)])
def test_reasoning_gym_rows_get_the_tasks_own_score(response: str, reward: float) -> None:
    verify = load_verifier("reasoning_gym")
    metadata = {"task": "chain_sum", "task_config": {"max_terms": 2}, "entry": entry("3")}
    assert verify(response, metadata) == pytest.approx(reward)


def test_the_reasoning_gym_verifier_refuses_rows_of_another_kind() -> None:
    with pytest.raises(ValueError, match="scores reasoning_gym rows only"):
        load_verifier("reasoning_gym")("3", {"answer": "3"})
