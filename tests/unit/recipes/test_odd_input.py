"""Input that nobody means to write. Risk: a traceback where a message with file and line belongs."""

from __future__ import annotations

import pytest

from nemo_rl_moe.cli import main
from nemo_rl_moe.recipe.source import dotted, split_dotted
from nemo_rl_moe.recipe.yaml_file import MAX_DEPTH
from tests.unit.recipes.writing import TINY, write

ODD_PATHS = ["a[b]", "a[", "a[0", "..", "", "a.[0]", ".grpo", "grpo.", "grpo..seed", "[0]", "]", "a[-1]", "a[1e3]",
             "a[²]", "a[0]b", "grpo[seed]", "a[" + "9" * 5000 + "]"]  # fmt: skip
KWARGS = "policy.generation.vllm_kwargs"


def outcome(capsys, *arguments) -> tuple[int, str]:
    """Exit code, and what was said on either stream."""
    code = main([str(argument) for argument in arguments])
    said = "".join(capsys.readouterr())
    assert "Traceback" not in said
    return code, said


@pytest.mark.parametrize("path", ODD_PATHS, ids=lambda path: path[:12])
def test_text_that_is_no_dotted_path_is_refused_by_every_command(capsys, path):
    code, said = outcome(capsys, "config", "why", TINY, path)
    assert code == 2 and "is no dotted path; expected keys joined by dots" in said
    for form in ("{}=1", "+{}=1", "++{}=1", "~{}"):
        for command in (["plan"], ["config", "show"], ["run"]):
            dry = ["--dry-run"] if command == ["run"] else []
            code, said = outcome(capsys, *command, TINY, form.format(path), *dry)
            assert code == 2 and f"command line '{form.format(path)}': " in said, form


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("grpo.seed[0]", "the schema has no such key"),
        ("policy.model_name[0]", "the schema has no such key"),
        ("env.arithmetik", "the recipe has no such key; did you mean env.arithmetic?"),
        ("env[0]", "the recipe has no such key"),
        (f"{KWARGS}.nothing", "the recipe has no such key"),
        (f"{KWARGS}.a[2]", "the recipe has no such key"),
    ],
)
def test_why_of_a_key_that_is_not_there_says_so(tmp_path, capsys, path, reason):
    recipe = write(tmp_path, "a.yaml", f"defaults: {TINY}\npolicy: {{generation: {{vllm_kwargs: {{a: [1, 2]}}}}}}\n")
    assert outcome(capsys, "config", "why", recipe, path) == (2, f"{path}: {reason}\n")


def test_why_of_a_deleted_key_of_one_under_null_and_of_a_list_item(capsys):
    code, said = outcome(capsys, "config", "why", TINY, "policy.generation.stop_strings[0]")
    assert (code, said) == (0, "policy.generation.stop_strings[0] = null\n  the schema's default\n")
    code, said = outcome(capsys, "config", "why", TINY, f"{KWARGS}.a[1]", f"+{KWARGS}.a=[3,4]")
    assert code == 0 and said.startswith(f"{KWARGS}.a[1] = 4\n  set at command line")


@pytest.mark.parametrize("path", [("a",), ("a", "b"), ("a", 0), ("a", 0, 12, "b c", 3)])
def test_split_is_the_inverse_of_dotted(path):
    assert split_dotted(dotted(path)) == path


@pytest.mark.parametrize("text", ["${", "${}", "${.}", "${..}", "${a[}", "${a.[0]}", "${grpo.}", "${grpo..seed}"])
@pytest.mark.parametrize("key", ["grpo.seed", f"{KWARGS}.x", "policy.generation.stop_strings"])
def test_malformed_interpolation_is_a_problem_beside_the_others(tmp_path, capsys, key, text):
    section, *middle, last = key.split(".")
    value = f"['{text}']" if last == "stop_strings" else f"'{text}'"
    inner = f"{last}: {value}"
    for name in reversed(middle):
        inner = f"{name}: {{{inner}}}"
    recipe = write(tmp_path, "a.yaml", f"defaults: {TINY}\n{section}:\n  {inner}\ncluster: {{num_nodes: x}}\n")
    code, said = outcome(capsys, "validate", recipe)
    assert code == 2
    assert f"a.yaml:3: {key}{'[0]' if last == 'stop_strings' else ''}: {text} does not resolve: " in said
    assert "a.yaml:4: cluster.num_nodes: found 'x', expected an integer" in said
    if key == "grpo.seed":
        code, said = outcome(capsys, "config", "show", TINY, f"grpo.seed='{text}'")
        assert code == 2 and f"{text} does not resolve" in said


SECTIONS = ["policy", "policy.megatron_cfg", "policy.megatron_cfg.env_vars", "policy.generation", KWARGS,
            "policy.hf_config_overrides", "loss_fn", "grpo", "grpo.async_grpo", "data", "data.train", "data.default",
            "env", "env.arithmetic", "logger", "cluster", "checkpointing"]  # fmt: skip
ODD_VALUES = ["null", "[]", "3", "text", "{}", "true", "[{a: 1}]", "???", "{_override_: true}", "{_override_: null}"]


@pytest.mark.parametrize("section", SECTIONS)
def test_odd_value_in_place_of_a_section_gives_a_message_with_its_line(tmp_path, capsys, section):
    *outer, last = section.split(".")
    head = "".join(f"{'  ' * depth}{name}:\n" for depth, name in enumerate(outer)) + "  " * len(outer) + f"{last}: "
    for value in ODD_VALUES:
        recipe = write(tmp_path, "a.yaml", f"defaults: {TINY}\n{head}{value}\n")
        for command in ("validate", "plan"):
            code, said = outcome(capsys, command, recipe)
            is_map = value in ("null", "{}", "???") or value.startswith("{_")
            assert code == 2 or is_map, value
            # Where the section's place holds nothing, the line is that of what is around it.
            assert code == 0 or f"a.yaml:{2 + len(outer)}: " in said or is_map, (value, said)


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 300, 900, 3000])
def test_nesting_without_end_is_refused_with_its_line(tmp_path, capsys, depth):
    texts = {
        "lists": "grpo: {seed: " + "[" * depth + "]" * depth + "}",
        "maps": "grpo:\n" + "".join(" " * i + "a:\n" for i in range(1, depth)),
        "merged maps": "grpo: " + "{<<: " * depth + "{}" + "}" * depth,
    }
    for name, text in texts.items():
        code, said = outcome(capsys, "validate", write(tmp_path, "a.yaml", f"defaults: {TINY}\n{text}\n"))
        assert code == 2 and ("nested deeper than 50 levels" in said or "nesting depth" in said), (name, said[-200:])
        assert "a.yaml:" in said
    for value in ("[" * depth + "1" + "]" * depth, "{a:" * depth + "1" + "}" * depth):
        code, said = outcome(capsys, "plan", TINY, f"grpo.seed={value}")
        assert code == 2 and "nested" in said
    code, said = outcome(capsys, "plan", TINY, f"++{KWARGS}" + ".a" * depth + "=1")
    assert code == 2 and "nested deeper than 50 levels" in said


def test_a_few_lines_of_aliases_that_stand_for_billions_of_values_are_refused_at_once(tmp_path, capsys):
    aliases = "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10))
    recipe = write(tmp_path, "a.yaml", f"defaults: {TINY}\na0: &a0 [1]\n{aliases}")
    code, said = outcome(capsys, "validate", recipe)
    assert code == 2 and "more than 100000 values, aliases written out" in said


def test_map_merged_into_itself_is_refused(tmp_path, capsys):
    recipe = write(tmp_path, "a.yaml", f"defaults: {TINY}\ngrpo: &g\n  <<: *g\n  seed: 1\n")
    code, said = outcome(capsys, "validate", recipe)
    assert code == 2 and "a.yaml:2: grpo: an alias inside its own anchor has no end" in said


def test_interpolations_nested_200_deep_are_a_problem(tmp_path, capsys):
    text = "1"
    for _ in range(200):
        text = "${mul:1," + text + "}"
    code, said = outcome(capsys, "validate", write(tmp_path, "a.yaml", f"defaults: {TINY}\ngrpo: {{seed: '{text}'}}\n"))
    assert code == 2 and "does not resolve" in said


@pytest.mark.parametrize("name", ["x" * 5000, '"a\\0b"', ".", "/dev/null/x"])
def test_parent_with_a_name_that_no_file_can_have_is_missing(tmp_path, capsys, name):
    code, said = outcome(capsys, "validate", write(tmp_path, "a.yaml", f"defaults: {name}\n"))
    assert code == 2 and "a.yaml:1: defaults: no such recipe" in said


def test_recipe_with_a_name_that_no_file_can_have_is_missing(capsys):
    for command in (["validate"], ["plan"], ["config", "show"], ["config", "minimize"]):
        assert outcome(capsys, *command, "x" * 5000)[0] == 2
    assert outcome(capsys, "config", "diff", "x" * 5000, TINY)[0] == 2
