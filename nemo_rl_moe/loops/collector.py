"""Keeps the generators busy while the driver trains: admits prompts, sends them out, scores what comes back."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any

from nemo_rl_moe.cluster.worker_group import WorkerFailed
from nemo_rl_moe.data.prompt import Prompt
from nemo_rl_moe.generation.dispatcher import Answer, Dispatcher
from nemo_rl_moe.generation.generator import first_samples
from nemo_rl_moe.limits import COLLECTOR_END_S, COLLECTOR_POLL_S
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.replay_buffer import PromptGroup, ReplayBuffer
from nemo_rl_moe.loops.rollout import Rollouts, sampling_spec, score

Group = PromptGroup["Draw", Rollouts]


class Draw:
    """A prompt as a step drew it: with the step, and the number of its first response there."""

    __slots__ = ("first_sample", "prompt", "step")

    def __init__(self, prompt: Prompt, step: int, first_sample: int) -> None:
        self.prompt, self.step, self.first_sample = prompt, step, first_sample


class TrajectoryCollector:
    """A thread of the driver's process between the data, the generators, the verifiers and the replay buffer.

    A thread, not an actor: it waits nearly all of the time, and samples that come back are in the process that trains
    on them, so nothing is sent twice and no further process can die.

    Args:
        run: the run; its loader, verifiers and generator are the collector's until `close`, except that the driver may
            validate.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        cfg = run.recipe.grpo
        self._first_step, self._first_version = run.start_step, run.weight_version
        last = run.weight_version + cfg.max_num_steps - run.start_step
        self._buffer: ReplayBuffer[Draw, Rollouts] = ReplayBuffer(
            cfg.async_grpo.max_trajectory_age_steps, run.weight_version, last
        )
        self._dispatcher: Dispatcher[Group] = Dispatcher(run.generator, run.recipe)
        # Nothing runs ahead at age 0, so a step's prompts go out as the sync loop sends them, for the same bits.
        self._together = cfg.async_grpo.max_trajectory_age_steps == 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="trajectory-collector", daemon=True)

    def take(self) -> Rollouts | None:
        """Waits for the samples of the present step, in the order of the data; None when the data has ended.

        Raises:
            Exception: whatever ended the collector.
        """
        taken = self._buffer.take(timeout_s=None)
        if taken is None:
            return None
        groups, self._run.data_state = taken
        rollouts = Rollouts.concat([g.result for g in groups if g.result is not None], {})
        self._check_age(rollouts)
        return rollouts

    def settle(self) -> None:
        """Waits for all samples under way, unless the recipe updates weights in flight or ends running requests."""
        ahead = self._run.recipe.grpo.async_grpo
        if not ahead.in_flight_weight_updates and ahead.running_requests == "wait":
            self._buffer.settle()

    def advance(self) -> None:
        """The generators hold the weights of the step just trained: prompts for a further step may go out."""
        self._run.generator.step_done()
        self._buffer.advance()

    def close(self) -> None:
        """Ends the thread; what is under way is left to the workers' end."""
        self._stopped.set()
        self._buffer.end()  # wakes the thread if it waits for room
        self._thread.join(COLLECTOR_END_S)

    def __enter__(self) -> TrajectoryCollector:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _work(self) -> None:
        try:
            while not self._stopped.is_set():
                self._admit()
                self._send()
                if not len(self._dispatcher):
                    self._buffer.wait_for_room(COLLECTOR_POLL_S)
                    continue
                with self._run.timer.phase("generation"):
                    answers = self._dispatcher.collect(COLLECTOR_POLL_S)
                for answer in answers:
                    self._take_in(answer)
        except BaseException as error:
            self._buffer.fail(error)

    def _admit(self) -> None:
        """Draws prompts for every step that the bound on age allows."""
        run = self._run
        while (target := self._buffer.next_target()) is not None:
            with run.timer.phase("data"):
                prompts = next(run.data.loader, None)
            if prompts is None:
                self._buffer.end()
                return
            step = self._first_step + target - self._first_version
            first = first_samples(prompts, run.recipe.grpo.num_generations_per_prompt)
            draws = [Draw(p, step, int(number)) for p, number in zip(prompts, first, strict=True)]
            # What a checkpoint of that step resumes from: prompts drawn ahead for later steps are drawn again.
            self._buffer.admit(draws, mark=run.data.loader.state_dict())

    def _send(self) -> None:
        groups = self._buffer.pending()
        whole = self._together and len(groups) == self._run.recipe.grpo.num_prompts_per_step
        for group in groups:
            self._buffer.begin(group)
        if whole:
            prompts = [group.item.prompt for group in groups]
            self._dispatcher.send_together(groups, prompts, self._spec(groups[0]))
            return
        for group in groups:
            self._dispatcher.send(group, group.item.prompt, self._spec(group), group.item.first_sample)

    def _take_in(self, answer: Answer[Group]) -> None:
        group = answer.tag
        if isinstance(answer.outcome, WorkerFailed):
            self._run.generator.replace(answer.outcome)
            self._buffer.retry(group)
            return
        rollouts = score(self._run, [group.item.prompt], answer.outcome, self._spec(group).n)
        self._buffer.finish(group, rollouts)

    def _spec(self, group: Group) -> Any:
        return sampling_spec(self._run, group.item.step)

    def _check_age(self, rollouts: Rollouts) -> None:
        """The buffer's promise, checked where it matters against what the engines say they sampled with."""
        age = self._run.weight_version - int(rollouts.batch.sample_values["weight_versions"].min())
        if not 0 <= age <= self._buffer.max_age:
            raise RuntimeError(f"a sample of age {age} reached a step, the bound is {self._buffer.max_age}")
