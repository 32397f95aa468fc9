"""Risk guarded: a validation whose numbers hide which environment failed, or that samples were never scored."""

from __future__ import annotations

import numpy as np

from nemo_rl_moe.batch import SequenceBatch
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.loops.rollout import Rollouts
from nemo_rl_moe.loops.validation import validation_metrics
from nemo_rl_moe.tracking.definitions import assert_known


def scored(envs: list[str], rewards: list[float], errors: int, timeouts: int) -> Rollouts:
    """Responses of one token to prompts of one token."""
    count = len(envs)
    batch = SequenceBatch(
        lengths=np.full(count, 2, dtype=np.int64),
        tokens=np.zeros(2 * count, dtype=np.int32),
        token_mask=np.tile([False, True], count),
        sample_values={"rewards": np.array(rewards, dtype=np.float32), "prompt_ids": np.arange(count)},
    )
    prompts = [Prompt(i, [1], "", env) for i, env in enumerate(envs)]
    counts = {"reward_errors": float(errors), "reward_timeouts": float(timeouts)}
    return Rollouts(prompts, batch, [""] * count, counts)


def test_two_batches_of_3_and_2_give_the_accuracy_of_each_environment_and_the_sum_of_failures() -> None:
    first = scored(["math", "math", "code"], [1.0, 0.0, 1.0], errors=1, timeouts=0)
    second = scored(["math", "code"], [1.0, 0.5], errors=2, timeouts=1)
    found = validation_metrics(Rollouts.concat([first, second], {}))
    assert found == {
        "validation/accuracy": 0.7,
        "validation/accuracy/math": 2 / 3,
        "validation/accuracy/code": 0.75,
        "validation/num_samples": 5.0,
        "validation/reward_errors": 3.0,
        "validation/reward_timeouts": 1.0,
    }
    assert_known(found)
