"""Risk: a misspelled or mistyped key that a run ignores."""

from __future__ import annotations

from nemo_rl_moe.recipe.load import load_recipe
from tests.unit.recipes.writing import TINY, problems_of, write


def child(tmp_path, text: str):
    return write(tmp_path, "child.yaml", f"defaults: {TINY}\n" + text)


def test_every_problem_is_reported_at_once_with_its_line(tmp_path):
    path = child(
        tmp_path,
        "grpo:\n  num_prompt_per_step: 8\n  max_num_steps: 0\npolicy:\n  precision: float16\nloss: {}\n",
    )
    shown = [str(p).split("child.yaml")[1] for p in problems_of(path)]
    assert sorted(shown) == [
        ":3: grpo.num_prompt_per_step: unknown key; did you mean grpo.num_prompts_per_step?",
        ":4: grpo.max_num_steps: found 0, expected more than 0",
        ":6: policy.precision: found 'float16', expected 'float32' or 'bfloat16'",
        ":7: loss: unknown key; did you mean loss_fn?",
    ]


def one(tmp_path, text: str) -> str:
    problems = problems_of(child(tmp_path, text))
    assert len(problems) == 1
    return str(problems[0]).split("child.yaml")[1]


def test_types_are_not_bent(tmp_path):
    assert one(tmp_path, "grpo: {seed: '3'}\n") == ":2: grpo.seed: found '3', expected an integer"
    assert one(tmp_path, "grpo: {seed: true}\n") == ":2: grpo.seed: found true, expected an integer"
    assert one(tmp_path, "grpo: {seed: 3.0}\n") == ":2: grpo.seed: found 3.0, expected an integer"
    assert one(tmp_path, "data: {shuffle: 1}\n") == ":2: data.shuffle: found 1, expected true or false"
    assert one(tmp_path, "logger: [1]\n") == ":2: logger: found [1], expected a map"
    assert one(tmp_path, "grpo: {seed: null}\n") == ":2: grpo.seed: found null, expected an integer"


def test_an_integer_is_a_number_and_null_is_named_where_it_is_allowed(tmp_path):
    assert load_recipe(child(tmp_path, "policy: {max_grad_norm: 2}\n")).recipe.policy.max_grad_norm == 2.0
    assert ", or null" in one(tmp_path, "cluster: {segment_size: x}\n")


def test_no_number_is_infinite_or_nan(tmp_path):
    assert one(tmp_path, "policy: {generation: {temperature: .inf}}\n").endswith("found inf, expected a finite number")
    assert one(tmp_path, "loss_fn: {ratio_clip_min: .nan}\n").endswith("found nan, expected a finite number")


def test_environment_variables_must_be_text(tmp_path):
    text = one(tmp_path, "policy: {megatron_cfg: {env_vars: {USE_MNNVL: 1}}}\n")
    assert text == ":2: policy.megatron_cfg.env_vars.USE_MNNVL: found 1, expected text (quote it)"


def test_key_of_another_section_says_where_it_belongs(tmp_path):
    assert one(tmp_path, "grpo: {gpus_per_node: 4}\n").startswith(":2: grpo.gpus_per_node: unknown key; there is ")


def test_missing_section_and_mandatory_marker_are_told_apart(tmp_path):
    path = write(tmp_path, "a.yaml", "policy:\n  model_name: ???\n  generation: {}\nenv: {}\n")
    texts = [str(p) for p in problems_of(path)]
    assert any(t.endswith("a.yaml:2: policy.model_name: the value is ???: it must be set") for t in texts)
    assert any(t.endswith("data: the key is missing and has no default") for t in texts)
    assert len(texts) == 2


def test_null_section_means_the_schema_default(tmp_path):
    recipe = load_recipe(child(tmp_path, "policy: {megatron_cfg: {optimizer: null}}\n")).recipe
    assert recipe.policy.megatron_cfg.optimizer.lr == 5.0e-6


def test_resolved_recipe_holds_every_key_and_validates_to_itself():
    loaded = load_recipe(TINY)
    assert type(loaded.recipe).model_validate(loaded.resolved) == loaded.recipe
    assert loaded.resolved["loss_fn"]["ratio_clip_min"] == 0.2
    assert loaded.name == "grpo-tiny-moe-cpu"
    assert [p.name for p in loaded.files] == ["grpo_moe_cpu.yaml", "grpo-tiny-moe-cpu.yaml"]


def test_bad_override_interpolation_and_type_are_reported_together(tmp_path):
    path = child(tmp_path, "grpo:\n  val_period: ${nowhere}\ndata: {shuffle: 1}\n")
    rules = [problem.rule for problem in problems_of(path, "grpo.sed=1")]
    assert rules == ["unknown key", "interpolation", "type"]
