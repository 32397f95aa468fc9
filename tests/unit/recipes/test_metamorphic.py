"""Ways of writing the same recipe. Risk: a refactoring of forty recipes that changes one of them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.compose import FileCache, compose
from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.minimize import minimized, redundant_keys
from tests.unit.recipes.writing import CONFIGS, PERFORMANCE, TINY, write

KEYS = st.sampled_from(["a", "b", "c", "d"])
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.sampled_from(["x", "y", "k:\n  l:\nm:\n", 1.0, 0.0])
    | st.lists(st.integers(0, 3))
    | st.lists(st.sampled_from([0, 1, True, False, 1.0, {"x": 1}, {"x": True}]), max_size=2)
)
TREES = st.recursive(SCALARS, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)
MAPS = st.dictionaries(KEYS, TREES, max_size=4)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class Plain(yaml.SafeDumper):
    """No aliases for values that come twice."""

    def ignore_aliases(self, data) -> bool:
        return True


def dump(path: Path, data: dict) -> Path:
    path.write_text(yaml.dump(data, Dumper=Plain, sort_keys=False))
    return path


class Bare(Plain):
    """Nulls as bare keys and texts of several lines as blocks, the way people write them."""

    def represent_bare(self, _) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:null", "")

    def represent_text(self, text: str) -> yaml.Node:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Bare.add_representer(type(None), Bare.represent_bare)
Bare.add_representer(str, Bare.represent_text)


def plain(path: Path) -> dict:
    return compose(path).root.plain()


def merged(older, newer):
    """The merge in three lines, written a second time."""
    if isinstance(older, dict) and isinstance(newer, dict):
        return {
            k: merged(older[k], newer[k]) if k in older and k in newer else newer.get(k, older.get(k))
            for k in older | newer
        }
    return newer


def split(data: dict, chooser: random.Random) -> tuple[dict, dict]:
    """Parent and child that together say `data`: each leaf goes to one of them, or to both with another value above."""
    parent: dict = {}
    child: dict = {}
    for key, value in data.items():
        if isinstance(value, dict) and value and chooser.random() < 0.8:
            parent[key], child[key] = split(value, chooser)
        elif chooser.random() < 0.5:
            parent[key] = value
        else:
            child[key] = value
            if chooser.random() < 0.3:
                parent[key] = "overridden"
    return parent, child


def shuffled(data, chooser: random.Random):
    if not isinstance(data, dict):
        return data
    items = list(data.items())
    chooser.shuffle(items)
    return {key: shuffled(value, chooser) for key, value in items}


@QUICK
@given(MAPS, MAPS, MAPS)
def test_three_generations_merge_as_the_plain_rule_says(tmp_path, top, middle, bottom):
    dump(tmp_path / "top.yaml", top)
    dump(tmp_path / "middle.yaml", {"defaults": "top.yaml"} | middle)
    path = dump(tmp_path / "bottom.yaml", {"defaults": ["middle.yaml"]} | bottom)
    assert plain(path) == merged(merged(top, middle), bottom)


@QUICK
@given(MAPS, MAPS, st.integers(0, 9))
def test_order_of_keys_does_not_matter(tmp_path, top, bottom, seed):
    chooser = random.Random(seed)
    dump(tmp_path / "top.yaml", top)
    path = dump(tmp_path / "bottom.yaml", {"defaults": "top.yaml"} | bottom)
    before = plain(path)
    dump(tmp_path / "top.yaml", shuffled(top, chooser))
    dump(path, shuffled({"defaults": "top.yaml"} | bottom, chooser))
    assert plain(path) == before


@QUICK
@given(MAPS, st.integers(0, 9))
def test_split_into_parent_and_child_is_the_same_recipe(tmp_path, data, seed):
    parent, child = split(data, random.Random(seed))
    dump(tmp_path / "parent.yaml", parent)
    assert plain(dump(tmp_path / "child.yaml", {"defaults": "parent.yaml"} | child)) == data


@QUICK
@given(MAPS, MAPS, st.sampled_from([False, None]), st.sampled_from([Bare, Plain]))
def test_minimizing_changes_nothing_and_leaves_nothing_to_minimize(tmp_path, top, bottom, braces, dumper):
    dump(tmp_path / "top.yaml", top)
    path = tmp_path / "bottom.yaml"
    data = {"defaults": "top.yaml"} | bottom
    path.write_text(yaml.dump(data, Dumper=dumper, sort_keys=False, default_flow_style=braces))
    before = plain(path)
    text, _ = minimized(path)
    path.write_text(text)
    # As text: to Python 1, 1.0 and True are equal.
    assert repr(plain(path)) == repr(before)
    assert redundant_keys(compose(path), path) == []


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["grpo-qwen3-235b-16n4g", "grpo-qwen3-30ba3b-4n4g-async-1off"])
def test_shipped_recipe_split_at_random_is_the_same_recipe(tmp_path, name, seed):
    source = PERFORMANCE / f"{name}.yaml"
    parent, child = split(shuffled(compose(source).root.plain(), random.Random(seed)), random.Random(seed))
    dump(tmp_path / "parent.yaml", parent)
    path = dump(tmp_path / f"{name}.yaml", {"defaults": "parent.yaml"} | child)
    assert load_recipe(path).recipe == load_recipe(source).recipe


def test_no_shipped_recipe_repeats_what_it_inherits():
    cache = FileCache()
    repeated = {
        str(path.relative_to(CONFIGS)): [item.path for item in redundant_keys(compose(path, cache), path)]
        for path in sorted(CONFIGS.rglob("*.yaml"))
    }
    assert {name: keys for name, keys in repeated.items() if keys} == {}


def test_minimize_keeps_comments_and_drops_maps_that_became_empty(tmp_path):
    write(tmp_path, "top.yaml", "a: {x: 1}\nb: 2\nl: [1, 2]\n")
    path = write(
        tmp_path,
        "bottom.yaml",
        """
        # why this recipe exists
        defaults: top.yaml
        a: # section
          x: 1
        b: 3 # kept
        l:
          - 1
          - 2
        """,
    )
    assert minimized(path)[0] == "# why this recipe exists\ndefaults: top.yaml\nb: 3 # kept\n"


@pytest.mark.parametrize(
    "kept",
    [
        "b:\n",
        "b: # nothing\n",
        "a:\n  y:\n",
        "a:\n  y:\nb:\n",
        "t: |\n  Solve:\n  The last line:\n",
        "t: |\n  Solve:\n\nb:\n",
        "t: >-\n  Rules:\n    first:\na:\n  z:\n    w:\n",
        "l:\n  -\n  - k:\n",
        "t: 'one:\n\n  two:'\nb: 3\n",
    ],
)
def test_minimize_keeps_bare_nulls_and_text_with_colons(tmp_path, kept):
    write(tmp_path, "top.yaml", "a: {x: 1, y: 2, z: {w: 3}}\nb: 2\nl: [1, 2]\nt: old\nr: 5\n")
    path = tmp_path / "bottom.yaml"
    path.write_text("defaults: top.yaml\nr:\n  5\n" + kept)
    text, redundant = minimized(path)
    assert [item.path for item in redundant] == [("r",)]
    assert text == "defaults: top.yaml\n" + kept


def test_minimize_keeps_a_map_that_drops_the_inherited_one(tmp_path):
    write(tmp_path, "top.yaml", "a: {x: 1, y: 2}\n")
    path = write(tmp_path, "bottom.yaml", "defaults: top.yaml\na:\n  _override_: true\n  x: 1\n")
    assert redundant_keys(compose(path), path) == []


def test_recipe_without_parents_has_nothing_to_minimize():
    base = TINY.parents[2] / "grpo_moe_cpu.yaml"
    assert redundant_keys(compose(base), base) == []


@pytest.mark.parametrize(
    ("body", "line", "what"),
    [
        ("a: &a {x: 1}\nb: *a\n", 3, "aliases"),
        ("a:\n  <<: {x: 2}\n  x: 1\n", 3, "a merged map"),
        ("b: 2\n? a\n: x: 1\n  y: 2\n", 3, "an explicit key"),
    ],
)
def test_recipe_whose_lines_hang_together_is_not_minimized(tmp_path, body, line, what):
    write(tmp_path, "top.yaml", "a: {x: 1}\nb: 2\n")
    path = tmp_path / "bottom.yaml"
    path.write_text("defaults: top.yaml\n" + body)
    with pytest.raises(UserError, match=rf"bottom.yaml:{line}: uses YAML {what}"):
        minimized(path)


@pytest.mark.parametrize("value", ["1", "1.0", "true", "[1]", "[1.0]", "[true]", "[{x: 1}]", "[{x: true}]"])
@pytest.mark.parametrize("inherited", ["1", "1.0", "true", "[1]", "[1.0]", "[true]", "[{x: 1}]", "[{x: true}]"])
def test_minimize_keeps_a_value_of_another_type(tmp_path, value, inherited):
    write(tmp_path, "top.yaml", f"a: {inherited}\n")
    path = write(tmp_path, "bottom.yaml", f"defaults: top.yaml\na: {value}\n")
    assert (minimized(path)[1] != []) == (value == inherited)
