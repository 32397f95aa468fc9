"""Checkpoints of a run: complete under their name or not there at all."""

from __future__ import annotations

import math
import re
import shutil
from pathlib import Path

from nemo_rl_moe import folders
from nemo_rl_moe.disk import CannotWrite, free_space, is_full, writing
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.loops.components import Run
from nemo_rl_moe.loops.saved_state import STATE_FILE, TRAINER, SavedState, read_state, saved_metrics, write_state
from nemo_rl_moe.recipe.schema import Recipe

_NAME, _NAMES = re.compile(r"step_(\d+)"), "step_*"


def checkpoint_root(recipe: Recipe, run_dir: Path) -> Path:
    """Folder that holds the run's `step_<n>` folders."""
    own = recipe.checkpointing.checkpoint_dir
    return Path(own) if own else run_dir / "checkpoints"


def save_if_due(run: Run, step: int, metrics: dict[str, float]) -> None:
    """Saves when the recipe says so, then drops what retention no longer keeps.

    Args:
        metrics: of the step as far as they are known. The checkpoint keeps them: retention ranks by one, and `resume`
            logs what a process killed right after the save did not.
    """
    last = step == run.recipe.grpo.max_num_steps
    if last or step % run.recipe.checkpointing.save_period == 0:
        save_at_end(run, step, metrics)


def save_at_end(run: Run, step: int, metrics: dict[str, float]) -> None:
    """Saves the step unless it is saved already, and applies retention."""
    saved = [s for s, _ in complete_checkpoints(checkpoint_root(run.recipe, run.run_dir))]
    if not run.recipe.checkpointing.enabled or step in saved:
        return
    with run.timer.timed("checkpointing"):
        save(run, step, metrics)
        _retain(run)


def save(run: Run, step: int, metrics: dict[str, float]) -> Path:
    """Writes `step_<n>` under a temporary name and renames it when everything is on disk.

    Raises:
        CannotWrite: the disk is full or gone. Nothing of the checkpoint is left on it.
    """
    root = checkpoint_root(run.recipe, run.run_dir)
    final = root / f"step_{step}"
    folders.remove_leftovers(root, _NAMES)
    partial = folders.partial(final)
    try:
        with writing(partial):
            partial.mkdir(parents=True)
            _fill(partial, run, step, metrics)
            folders.put_in_place(partial, final)
    except Exception as error:
        # Megatron and safetensors report a full disk each in their own words. Asked before room is made again.
        why = str(error) if isinstance(error, CannotWrite) else None
        if is_full(root):
            why = f"the disk is full ({free_space(root)})"
        shutil.rmtree(partial, ignore_errors=True)
        if why is None:
            raise
        raise CannotWrite(f"checkpoint of step {step}: {why}; {_newest(root)}") from error
    return final


def _fill(folder: Path, run: Run, step: int, metrics: dict[str, float]) -> None:
    run.policy.save(str(folder / TRAINER))
    if run.recipe.checkpointing.save_hf:
        run.policy.save_hf(str(folder / "hf"))
        run.data.tokenizer.save_pretrained(folder / "hf")
    write_state(folder, step=step, weight_version=run.weight_version, loader=run.data_state, metrics=metrics)


def _newest(root: Path) -> str:
    found = complete_checkpoints(root)
    return f"the newest complete one is {found[-1][1]}" if found else "there is no complete one yet"


def complete_checkpoints(root: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints, oldest first."""
    named = [(match, p) for p in root.glob(_NAMES) if (match := _NAME.fullmatch(p.name))]
    return sorted((int(match[1]), p) for match, p in named if (p / STATE_FILE).exists())


def refuse_foreign(recipe: Recipe, root: Path) -> None:
    """A new run must not mix its checkpoints with those of an earlier one in a folder outside the run directory.

    Raises:
        UserError: the folder holds checkpoints.
    """
    found = complete_checkpoints(root)
    if recipe.checkpointing.enabled and recipe.checkpointing.checkpoint_dir and found:
        raise UserError(
            f"checkpointing.checkpoint_dir: {root} holds checkpoints of an earlier run (the newest is "
            f"{found[-1][1].name}); go on from it with --resume, or name an empty folder"
        )


def newest(root: Path) -> tuple[Path, SavedState]:
    """The newest complete checkpoint, of which there must be one, and what it says.

    Raises:
        UserError: it is damaged.
    """
    step, path = complete_checkpoints(root)[-1]
    return path, read_state(path, step)


def resume(run: Run, path: Path, state: SavedState) -> None:
    """Goes on from a checkpoint."""
    run.policy.load(str(path / TRAINER))
    run.data.loader.load_state_dict(state.loader)
    run.data_state = state.loader
    run.weight_version = state.weight_version
    run.start_step = state.step + 1
    run.tracker.restore(state.step, state.metrics)
    run.tracker.event(f"resuming after step {state.step} from {path}")


def _retain(run: Run) -> None:
    """Keeps the best k by the metric (ties: the newer), or the newest k; the newest is always kept."""
    cfg = run.recipe.checkpointing
    if cfg.keep_top_k is None:
        return
    found = complete_checkpoints(checkpoint_root(run.recipe, run.run_dir))
    ranked = sorted(found, key=lambda item: (_rank(item[1], cfg.metric_name, cfg.higher_is_better), item[0]))
    keep = {path for _, path in ranked[-cfg.keep_top_k :]} | {found[-1][1]}
    for _, path in found:
        if path not in keep:
            folders.remove(path)


def _rank(path: Path, metric: str | None, higher_is_better: bool) -> float:
    if metric is None:
        return 0.0
    value = saved_metrics(path).get(metric)
    if value is None or math.isnan(value):
        return -math.inf
    return value if higher_is_better else -value
