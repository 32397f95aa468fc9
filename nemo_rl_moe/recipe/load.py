"""A recipe file to a checked Recipe: compose, override, resolve, type-check, rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nemo_rl_moe.recipe.compose import FileCache, compose, is_file, shown_path
from nemo_rl_moe.recipe.interpolation import resolve
from nemo_rl_moe.recipe.overrides import apply_overrides
from nemo_rl_moe.recipe.schema import Recipe
from nemo_rl_moe.recipe.schema_walk import keys_at
from nemo_rl_moe.recipe.source import Node, Problem, RecipeError, chain, split_dotted
from nemo_rl_moe.recipe.typing_errors import typed


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe that passed every check.

    Args:
        recipe: the typed recipe.
        path: the file that was asked for.
        files: every file that took part, parents before children, the recipe itself last.
        tree: the composed and resolved nodes, with the origin of each value; schema defaults are not in it.
        warnings: what is odd, but does not stop a run; notes too.
        overrides: the command line's overrides, in order.
    """

    recipe: Recipe
    path: Path
    files: list[Path]
    tree: Node = field(repr=False)
    warnings: list[Problem] = field(default_factory=list)
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The file's stem: the name of the run."""
        return self.path.stem

    @property
    def run_dir(self) -> Path:
        """Run directory: `logger.log_dir`, else `runs/<name>`."""
        return Path(self.recipe.logger.log_dir or f"runs/{self.name}")

    @property
    def resolved(self) -> dict[str, Any]:
        """Every key of the schema with its value, defaults included, as plain data (what config.yaml holds)."""
        return self.recipe.model_dump(mode="json")

    def why(self, key: str) -> list[Node]:
        """Every value that was ever given to a key, newest first; empty when only the schema's default counts."""
        return chain(self.tree, split_dotted(key))


def load_recipe(
    path: str | Path, overrides: Sequence[str] = (), *, cache: FileCache | None = None, check: bool = True
) -> LoadedRecipe:
    """Loads and checks a recipe.

    Args:
        path: YAML file of the recipe.
        overrides: command-line overrides in Hydra's grammar.
        cache: files composed so far, to share between recipes of one family.
        check: also check the rules between keys.

    Raises:
        RecipeError: (a UserError) every problem found, each with file and line, dotted path, value and expectation.
            Files that cannot be composed have no values to check, and wrong types none that rules could compare.
    """
    path = Path(path)
    if not is_file(path):
        raise RecipeError([Problem("file", "", None, str(path), f"no such recipe: {shown_path(path)}")])
    composed = compose(path, cache)
    problems: list[Problem] = []
    tree = apply_overrides(composed.root, overrides, keys_at, problems) if overrides else composed.root
    tree = resolve(tree, problems)
    recipe = typed(tree, problems)
    warnings: list[Problem] = []
    if check:
        from nemo_rl_moe.recipe.rules import check_rules

        found = check_rules(recipe, tree, path)
        errors = [problem for problem in found if problem.severity == "error"]
        if errors:
            raise RecipeError(errors)
        warnings = [problem for problem in found if problem.severity != "error"]
    return LoadedRecipe(recipe, path, composed.files, tree, warnings, tuple(overrides))


def refuse_unsupported(loaded: LoadedRecipe) -> None:
    """Refuses what `run` would ignore; validate and plan accept it, for the cluster that it is written for.

    Raises:
        RecipeError: every key of the recipe that this version does not act on.
    """
    from nemo_rl_moe.recipe.model_shape import model_shape
    from nemo_rl_moe.recipe.rules.registry import Context
    from nemo_rl_moe.recipe.rules.runtime import run_problems

    recipe = loaded.recipe
    problems = run_problems(Context(recipe, loaded.tree, loaded.path, model_shape(recipe.policy)))
    if problems:
        raise RecipeError(problems)
