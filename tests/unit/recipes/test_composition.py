"""Risk: a recipe that silently runs with another value than the one its author wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_rl_moe.recipe.compose import compose
from nemo_rl_moe.recipe.interpolation import resolve
from nemo_rl_moe.recipe.source import RecipeError, chain, split_dotted
from tests.unit.recipes.writing import write


def plain(path: Path) -> dict:
    problems: list = []
    found = resolve(compose(path).root, problems).plain()
    assert problems == []
    return found


def error(path: Path) -> str:
    problems: list = []
    try:
        resolve(compose(path).root, problems)
    except RecipeError as caught:
        return str(caught)
    return "\n".join(map(str, problems))


def test_maps_merge_and_lists_replace(tmp_path):
    write(tmp_path, "base.yaml", "a: {x: 1, y: 2}\nl: [1, 2, 3]\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\na: {y: 5}\nl: [9]\n")
    assert plain(child) == {"a": {"x": 1, "y": 5}, "l": [9]}


def test_the_later_of_two_parents_wins_then_the_child(tmp_path):
    write(tmp_path, "p1.yaml", "a: 1\nb: 1\nc: 1\n")
    write(tmp_path, "p2.yaml", "b: 2\nc: 2\n")
    child = write(tmp_path, "child.yaml", "defaults: [p1.yaml, p2.yaml]\nc: 3\n")
    assert plain(child) == {"a": 1, "b": 2, "c": 3}


def test_in_a_diamond_the_later_parent_wins_with_what_it_inherited(tmp_path):
    write(tmp_path, "top.yaml", "lr: 1\nkept: 1\n")
    write(tmp_path, "left.yaml", "defaults: top.yaml\nlr: 2\nonly_left: 2\n")
    write(tmp_path, "right.yaml", "defaults: top.yaml\n")
    child = write(tmp_path, "child.yaml", "defaults: [left.yaml, right.yaml]\n")
    assert plain(child) == {"lr": 1, "kept": 1, "only_left": 2}


def test_parents_are_relative_to_the_file_that_names_them(tmp_path):
    write(tmp_path, "bases/deep/root.yaml", "a: 1\n")
    write(tmp_path, "bases/middle.yaml", "defaults: deep/root.yaml\nb: 2\n")
    child = write(tmp_path, "recipes/child.yaml", "defaults: ../bases/middle.yaml\n")
    assert plain(child) == {"a": 1, "b": 2}


def test_null_clears_a_map_and_a_grandchild_starts_afresh(tmp_path):
    write(tmp_path, "base.yaml", "opt: {lr: 1, wd: 2}\n")
    write(tmp_path, "middle.yaml", "defaults: base.yaml\nopt: null\n")
    child = write(tmp_path, "child.yaml", "defaults: middle.yaml\nopt: {lr: 3}\n")
    assert plain(tmp_path / "middle.yaml") == {"opt": None}
    assert plain(child) == {"opt": {"lr": 3}}


def test_override_marker_drops_the_inherited_map_three_levels_deep(tmp_path):
    write(tmp_path, "base.yaml", "a: {b: {c: {x: 1, y: 2}, d: 4}}\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\na: {b: {c: {_override_: true, z: 3}}}\n")
    assert plain(child) == {"a": {"b": {"c": {"z": 3}, "d": 4}}}


def test_override_marker_of_a_parent_does_not_reach_its_sibling(tmp_path):
    write(tmp_path, "p1.yaml", "s: {a: 1}\n")
    write(tmp_path, "root.yaml", "s: {b: 2}\n")
    write(tmp_path, "p2.yaml", "defaults: root.yaml\ns: {_override_: true, c: 3}\n")
    child = write(tmp_path, "child.yaml", "defaults: [p1.yaml, p2.yaml]\n")
    assert plain(child) == {"s": {"a": 1, "c": 3}}


@pytest.mark.parametrize(
    ("base", "found"),
    [("a: {}\n", "inherits nothing"), ("a: {s: null}\n", "inherits None"), ("a: {s: 3}\n", "inherits 3")],
)
def test_override_marker_on_nothing_is_an_error_with_its_line(tmp_path, base, found):
    write(tmp_path, "base.yaml", base)
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\na:\n  s:\n    _override_: true\n")
    assert "child.yaml:4: a.s._override_: drops an inherited map, but a.s " + found in error(child)


def test_override_marker_must_be_a_boolean_and_outside_lists(tmp_path):
    write(tmp_path, "base.yaml", "a: {x: 1}\nl: [{x: 1}]\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\na: {_override_: 1}\nl: [{_override_: true}]\n")
    text = error(child)
    assert "child.yaml:2: a._override_: expected true or false" in text
    assert "child.yaml:3: l[0]._override_: has no effect inside a list" in text


def test_mandatory_marker_never_replaces_a_value(tmp_path):
    write(tmp_path, "base.yaml", "a: 1\nb: ???\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\na: ???\nb: 2\n")
    assert plain(child) == {"a": 1, "b": 2}


def test_interpolation_follows_the_child_that_changes_its_source(tmp_path):
    write(tmp_path, "base.yaml", "a: 4\nb: ${mul:${a},2}\nc:\n  d: ${.e}\n  e: 7\ns: n${a}x\n")
    child = write(tmp_path, "child.yaml", "defaults: base.yaml\na: 5\n")
    assert plain(child) == {"a": 5, "b": 10, "c": {"d": 7, "e": 7}, "s": "n5x"}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("${add:1,2,3}", 6),
        ("${sub:5,7}", -2),
        ("${mul:2,3,4}", 24),
        ("${div:16,4}", 4),
        ("${div:1.0,4}", 0.25),
        ("${max:3,9,4}", 9),
        ("${min:3,9,4}", 3),
        ("${mul:2,${div:9,3}}", 6),
    ],
)
def test_resolver_gives_the_number_with_its_type(tmp_path, text, value):
    found = plain(write(tmp_path, "a.yaml", f"v: {text}\n"))["v"]
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("${div:5,2}", "div(5, 2) is not an integer (2.5)"),
        ("${div:1,0}", "div(1, 0): division by zero"),
        ("${add:1,x}", "add takes numbers, found 'x'"),
        ("${add:1,true}", "add takes numbers, found True"),
        ("${mul:3}", "mul takes two numbers or more, found 1"),
        ("${nowhere.at.all}", "'nowhere.at.all' not found"),
        ("${v}", "Recursive interpolation detected"),
        ("${w}", "Recursive interpolation detected"),
        ("${unset}", "refers to a value that is still ???"),
        ("${nope:1}", "Unsupported interpolation type nope"),
    ],
)
def test_unresolvable_interpolation_names_line_and_reason(tmp_path, text, reason):
    message = error(write(tmp_path, "a.yaml", f"unset: ???\nw: ${{v}}\nv: {text}\n"))
    assert "a.yaml:3: v: " in message
    assert reason in message


def test_two_dangling_interpolations_are_both_reported(tmp_path):
    message = error(write(tmp_path, "a.yaml", "x: ${no.one}\ny: ${no.two}\n"))
    assert "a.yaml:1: x: " in message and "a.yaml:2: y: " in message


def test_cycle_is_printed_as_the_chain_of_files(tmp_path):
    write(tmp_path, "a.yaml", "defaults: b.yaml\n")
    write(tmp_path, "b.yaml", "x: 1\ndefaults: [c.yaml]\n")
    write(tmp_path, "c.yaml", "defaults: a.yaml\n")
    message = error(tmp_path / "a.yaml")
    assert "c.yaml:1: defaults: the recipe inherits from itself: " in message
    names = [Path(part).name for part in message.split("itself: ")[1].split(" -> ")]
    assert names == ["a.yaml", "b.yaml", "c.yaml", "a.yaml"]


def test_missing_parent_names_the_line_and_the_folder(tmp_path):
    child = write(tmp_path, "sub/child.yaml", "x: 1\ndefaults:\n  - nope.yaml\n")
    message = error(child)
    assert "child.yaml:3: defaults: no such recipe: " in message and "sub/nope.yaml" in message


def test_defaults_that_are_no_file_name_are_refused(tmp_path):
    assert "a.yaml:1: defaults: found 3, expected a file name or a list" in error(
        write(tmp_path, "a.yaml", "defaults: 3\n")
    )


def test_chain_lists_every_value_newest_first_with_its_line(tmp_path):
    write(tmp_path, "top.yaml", "s:\n  lr: 1\n")
    write(tmp_path, "middle.yaml", "defaults: top.yaml\n\ns:\n  lr: 2\n")
    child = write(tmp_path, "child.yaml", "defaults: middle.yaml\ns: {lr: 3}\n")
    entries = chain(compose(child).root, split_dotted("s.lr"))
    assert [(Path(n.source.file).name, n.source.line, n.value) for n in entries] == [
        ("child.yaml", 2, 3),
        ("middle.yaml", 4, 2),
        ("top.yaml", 2, 1),
    ]


def test_chain_goes_through_null_and_override(tmp_path):
    write(tmp_path, "top.yaml", "s: {lr: 1}\n")
    write(tmp_path, "nulled.yaml", "defaults: top.yaml\ns: null\n")
    write(tmp_path, "again.yaml", "defaults: nulled.yaml\ns: {lr: 2}\n")
    child = write(tmp_path, "child.yaml", "defaults: again.yaml\ns: {_override_: true, lr: 3}\n")
    entries = chain(compose(child).root, ("s", "lr"))
    assert [n.value for n in entries] == [3, 2, None, 1]


def test_files_are_listed_once_parents_first(tmp_path):
    write(tmp_path, "top.yaml", "a: 1\n")
    write(tmp_path, "l.yaml", "defaults: top.yaml\n")
    write(tmp_path, "r.yaml", "defaults: top.yaml\n")
    child = write(tmp_path, "child.yaml", "defaults: [l.yaml, r.yaml]\n")
    assert [path.name for path in compose(child).files] == ["top.yaml", "l.yaml", "r.yaml", "child.yaml"]
