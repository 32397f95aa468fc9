"""Risk: YAML that is read differently from how it looks."""

from __future__ import annotations

import pytest

from nemo_rl_moe.recipe.source import RecipeError, find
from nemo_rl_moe.recipe.yaml_file import read_yaml
from tests.unit.recipes.writing import write


def read(tmp_path, text: str):
    return read_yaml(write(tmp_path, "a.yaml", text), "a.yaml")


def error(tmp_path, text: str) -> str:
    with pytest.raises(RecipeError) as caught:
        read(tmp_path, text)
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-7", 3e-7),
        ("3.0e-7", 3e-7),
        ("1_000", 1000),
        ("010", 8),
        ("0x1F", 31),
        ("-5", -5),
        (".5", 0.5),
        ("1.", 1.0),
        ("true", True),
        ("null", None),
        ("~", None),
        ("1:30", "1:30"),
        ("00:03:45:00", "00:03:45:00"),
        ("2024-01-02", "2024-01-02"),
        ("'1'", "1"),
        ("1e3x", "1e3x"),
        ("=", "="),
        ("08", "08"),
    ],
)
def test_scalar_is_read_with_its_type(tmp_path, text, value):
    found = read(tmp_path, f"v: {text}\n").plain()["v"]
    assert found == value and type(found) is type(value)


def test_keys_are_taken_as_written_even_when_yaml_reads_them_as_booleans(tmp_path):
    assert read(tmp_path, "on: 1\n2: x\n").plain() == {"on": 1, "2": "x"}


def test_lines_are_those_of_the_keys(tmp_path):
    root = read(tmp_path, "a:\n  b:\n    - x\n    - y\n# comment\nc: 1\n")
    lines = [find(root, path).source.line for path in [("a",), ("a", "b"), ("a", "b", 1), ("c",)]]
    assert lines == [1, 2, 4, 6]


def test_two_duplicate_keys_are_both_reported_with_the_first_line(tmp_path):
    text = error(tmp_path, "a: 1\nb:\n  c: 1\n  c: 2\na: 3\n")
    assert "a.yaml:4: b.c: the key stands twice, first in line 3" in text
    assert "a.yaml:5: a: the key stands twice, first in line 1" in text


def test_tab_in_the_indentation_names_its_line(tmp_path):
    assert error(tmp_path, "a:\n\tb: 1\n") == "a.yaml:2: tab in the indentation, expected spaces"


def test_tab_inside_a_value_is_text(tmp_path):
    assert read(tmp_path, 'a: "x\ty"\n').plain() == {"a": "x\ty"}


@pytest.mark.parametrize(("text", "found"), [("- 1\n- 2\n", "a list"), ("hello\n", "'hello'")])
def test_root_that_is_no_map_is_refused(tmp_path, text, found):
    assert error(tmp_path, text) == f"a.yaml:1: the root is {found}, expected a map"


def test_empty_file_is_an_empty_map(tmp_path):
    assert read(tmp_path, "# nothing\n").plain() == {}


def test_anchor_alias_and_merge_key_follow_yaml(tmp_path):
    root = read(tmp_path, "a: &a {x: 1, y: 2}\nb: *a\nc:\n  <<: *a\n  y: 3\nd:\n  <<: [{x: 5}, *a]\n")
    assert root.plain() == {"a": {"x": 1, "y": 2}, "b": {"x": 1, "y": 2}, "c": {"x": 1, "y": 3}, "d": {"x": 5, "y": 2}}


def test_merge_key_on_a_scalar_and_a_python_tag_are_refused(tmp_path):
    text = error(tmp_path, "a:\n  <<: 3\nb: !!python/name:os.system x\n")
    assert "a.yaml:2: a: '<<' expects a map" in text and "a.yaml:3: b: the tag" in text


def test_alias_inside_its_own_anchor_is_refused(tmp_path):
    assert "a.yaml:1: a.x: an alias inside its own anchor has no end" in error(tmp_path, "a: &a {x: *a}\n")


def test_syntax_error_names_its_line(tmp_path):
    assert error(tmp_path, "a: 1\nb: [1, 2\nc: 3\n").startswith("a.yaml:3: not valid YAML: ")


def test_file_that_is_not_text_is_refused(tmp_path):
    path = tmp_path / "a.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RecipeError, match="cannot read the recipe"):
        read_yaml(path, "a.yaml")
