"""Every condition of every rule is tested: each is changed, and some recipe must notice.

Risk: a rule with a condition that is wrong, or a new one without a mutation, which the rules' own tests do not see.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest

from nemo_rl_moe.recipe import rules
from nemo_rl_moe.recipe.compose import FileCache
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.model_shape import model_shape
from nemo_rl_moe.recipe.rules.registry import RULES, Context
from tests.unit.recipes.mutations import MUTATIONS, VALID
from tests.unit.recipes.mutations.base import write_tiny_model, written
from tests.unit.recipes.rule_mutants import findings, mutants, rules_outside_the_table
from tests.unit.recipes.writing import CONFIGS

MODULES = [
    importlib.import_module(f"{rules.__name__}.{info.name}")
    for info in pkgutil.iter_modules(rules.__path__)
    if info.name not in ("registry", "divisors")
]


# Changes that no recipe can notice, with the reason. One that some recipe notices must go from here.
SAME = {
    "replay.py: without 'source'": "the schema knows one source",
    "replay.py: replay.source == 'logprob' -> True": "the schema knows one source",
}


def context_of(path: Path, cache: FileCache, overrides: tuple[str, ...] = ()) -> Context:
    loaded = load_recipe(path, overrides, cache=cache, check=False)
    return Context(loaded.recipe, loaded.tree, path, model_shape(loaded.recipe.policy))


@pytest.fixture(scope="module")
def contexts(tmp_path_factory) -> list[tuple[str, Context]]:
    """Every mutation's recipe with the rule that it breaks, the valid ones, and every shipped recipe."""
    root, cache = tmp_path_factory.mktemp("cwd"), FileCache()
    write_tiny_model(root)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        for number, mutation in enumerate([*MUTATIONS, *VALID]):
            folder = root / str(number)
            folder.mkdir()
            found.append((mutation.rule, context_of(written(folder, mutation)[0], cache, mutation.overrides)))
        found += [("", context_of(path, cache)) for path in sorted(CONFIGS.rglob("*.yaml"))]
        yield found


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__.rpartition(".")[2])
def test_each_condition_decides_about_some_recipe(contexts, module):
    own = [rule for rule in RULES if rule.check.__module__ == module.__name__]
    own += rules_outside_the_table(vars(module))
    names = {rule.name for rule in own}
    # Recipes that break this module's rules come first, as most mutants fall to them.
    ordered = [context for _, context in sorted(contexts, key=lambda item: item[0] not in names)]
    right = [findings(own, context) for context in ordered]
    survivors = [
        mutant
        for mutant in mutants(module)
        if all(findings(mutant.rules, context) == known for context, known in zip(ordered, right, strict=True))
    ]
    unknown = [f"{mutant.place}: {mutant.change}" for mutant in survivors if mutant.name not in SAME]
    assert not unknown, "no recipe notices:\n" + "\n".join(unknown)
    file = Path(module.__file__).name
    assert {mutant.name for mutant in survivors} == {name for name in SAME if name.startswith(f"{file}:")}
