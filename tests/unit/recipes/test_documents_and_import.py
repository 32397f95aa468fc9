"""The generated page is current; a NeMo-RL recipe is converted without losing a key in silence."""

from __future__ import annotations

import ast
import copy
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from nemo_rl_moe.recipe.load import load_recipe
from nemo_rl_moe.recipe.rule_names import READING_RULES
from nemo_rl_moe.recipe.rules import RULES
from nemo_rl_moe.recipe.rules.runtime import RUN_RULE
from nemo_rl_moe.recipe.schema_walk import sections
from tests.unit.recipes.writing import write

REPO = Path(__file__).resolve().parents[3]

BASE = """
grpo:
  num_prompts_per_step: 64
  num_generations_per_prompt: 32
  max_rollout_turns: 1
  val_start_at: -1
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn: {reference_policy_kl_penalty: 0.01, force_on_policy_ratio: true, use_cispo: false}
checkpointing: {enabled: false, metric_name: "val:accuracy", keep_top_k: 3, checkpoint_dir: results/x}
policy:
  model_name: Qwen/Qwen3-30B-A3B
  train_global_batch_size: ${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}
  train_micro_batch_size: 1
  generation_batch_size: 32
  max_total_sequence_length: 4096
  optimizer: null
  dtensor_cfg: {enabled: false, tensor_parallel_size: 1}
  dynamic_batching: {enabled: false}
  sequence_packing: {enabled: true, algorithm: modified_first_fit_decreasing, sequence_length_round: 64}
  megatron_cfg:
    enabled: true
    expert_model_parallel_size: 8
    pipeline_dtype: bfloat16
    moe_per_layer_logging: false
    optimizer: {lr: 3.0e-7, min_lr: 3.0e-8, clip_grad: 1.0}
    env_vars: null
  generation:
    backend: vllm
    port_range_low: 3000
    max_new_tokens: ${policy.max_total_sequence_length}
    top_k: null
    vllm_cfg: {tensor_parallel_size: 1, precision: bfloat16}
data:
  max_input_seq_length: 1024
  default: {env_name: math, processor: math_hf_data_processor, prompt_file: null}
  train: {dataset_name: OpenMathInstruct-2, split_validation_size: 0.05}
  validation: null
env:
  math: {num_workers: 8, math_verify_impl: hf_math_verify}
logger: {log_dir: logs, wandb_enabled: true, monitor_gpus: true}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""
CHILD = """
defaults: base.yaml
grpo:
  num_prompts_per_step: 32
  mystery_knob: 7
policy:
  generation:
    vllm_cfg:
      quantization_ignored_layer_kws: [q_proj]
      precision: fp8
"""


def convert(path: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, REPO / "tools/import_nemo_rl_recipe.py", path]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def converted(tmp_path) -> subprocess.CompletedProcess:
    write(tmp_path, "base.yaml", BASE)
    return convert(write(tmp_path, "child.yaml", CHILD))


def test_converted_recipe_loads_and_keeps_the_numbers(converted, tmp_path):
    assert converted.returncode == 0 and "to do" not in converted.stderr
    recipe = load_recipe(write(tmp_path, "out.yaml", converted.stdout)).recipe
    assert (recipe.grpo.num_prompts_per_step, recipe.policy.train_global_batch_size) == (32, 1024)
    assert recipe.policy.megatron_cfg.optimizer.lr == 3e-7
    assert recipe.policy.generation.max_new_tokens == 4096
    assert recipe.checkpointing.metric_name == "validation/accuracy"
    assert recipe.policy.generation.vllm_cfg.quantization_ignore_patterns == ["q_proj"]
    assert (recipe.cluster.gpu_type, recipe.env["math"].verifier) == ("h100", "math_verify")
    assert recipe.data.train.path == "data/OpenMathInstruct-2/train.jsonl"


@pytest.mark.parametrize(
    "text",
    [
        "child.yaml:4: dropped grpo.mystery_knob = 7: there is no such key",
        "base.yaml:16: dropped policy.dtensor_cfg.enabled: only the Megatron trainer exists here",
        "base.yaml:8: changed checkpointing.metric_name: val:accuracy is validation/accuracy",
        "renamed policy.generation.vllm_cfg.quantization_ignored_layer_kws",
        "dropped data.train.split_validation_size: rows are in a file",
        "guessed cluster.gpu_type h100 from 8 GPUs on a node",
        "dropped grpo.max_rollout_turns = 1: there is no such key",
    ],
)
def test_what_was_dropped_changed_or_guessed_is_said(converted, text):
    assert text in converted.stderr


def test_every_key_of_the_input_is_in_the_output_or_in_the_notes(converted, tmp_path):
    kept = yaml.safe_load(converted.stdout)

    def present(tree, keys) -> bool:
        return not keys or (isinstance(tree, dict) and keys[0] in tree and present(tree[keys[0]], keys[1:]))

    from nemo_rl_moe.recipe.compose import compose
    from nemo_rl_moe.recipe.source import dotted, leaves

    silent = [
        dotted(keys)
        for keys, node in leaves(compose(tmp_path / "child.yaml").root)
        if not present(kept, [key for key in keys if isinstance(key, str)])
        and dotted(keys).partition("[")[0] not in converted.stderr
    ]
    # Only what is switched off there may go without a word.
    assert silent == ["loss_fn.use_cispo", "policy.megatron_cfg.moe_per_layer_logging"]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("grpo:", "sft:", "no grpo section"),
        ("backend: vllm", "backend: sglang", "policy.generation.backend is 'sglang', expected vllm"),
        ("    enabled: true\n    expert", "    enabled: false\n    expert", "expected a Megatron policy"),
    ],
)
def test_other_kinds_of_recipe_are_refused(tmp_path, old, new, message):
    text = BASE.replace(old, new, 1).replace("${grpo.num_prompts_per_step}", "1").replace(
        "${grpo.num_generations_per_prompt}", "1"
    )  # fmt: skip
    done = convert(write(tmp_path, "base.yaml", text))
    assert done.returncode == 2 and message in done.stderr


@pytest.fixture(scope="module")
def importer():
    spec = importlib.util.spec_from_file_location("importer", REPO / "tools/import_nemo_rl_recipe.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["importer"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["importer"]


def import_in_process(importer, monkeypatch, capsys, path: Path) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["import", str(path)])
    code = importer.main()
    return code, *capsys.readouterr()


def flat_base() -> dict:
    return yaml.safe_load(BASE.replace("${mul:${grpo.num_prompts_per_step},${grpo.num_generations_per_prompt}}", "1"))


ODD = [None, {}, [], 3, "text", True, [{"x": 1}], {"odd": None}, {"a.b": [1]}, {"a[": 2}]


def test_odd_values_in_place_of_a_section_never_end_in_a_traceback(tmp_path, importer, monkeypatch, capsys):
    """Every section and every key in one, each replaced by each odd value."""
    base = flat_base()
    spots = [(name,) for name in base]
    spots += [(name, key) for name in base for key in base[name]]
    for spot in spots:
        for odd in ODD:
            data = copy.deepcopy(base)
            node = data
            for key in spot[:-1]:
                node = node[key]
            node[spot[-1]] = odd
            path = tmp_path / "odd.yaml"
            path.write_text(yaml.safe_dump(data))
            code, out, err = import_in_process(importer, monkeypatch, capsys, path)
            assert (code, bool(out), bool(err)) in {(0, True, True), (2, False, True)}, (spot, odd)


@pytest.mark.parametrize(
    ("section", "odd", "code", "message"),
    [
        ("env", {}, 0, "LINE: env names no environment"),
        ("env", None, 0, "LINE: env names no environment"),
        ("env", {"math": 3}, 0, "dropped env.math = 3: expected a map"),
        ("env", {"a.b": {"num_workers": 2}}, 0, "guessed env.a.b.verifier: ???"),
        ("data", [], 2, "LINE: data: found [], expected a map"),
        ("data", {"train": [{"dataset_name": "x"}]}, 0, "dropped data.train = [{'dataset_name': 'x'}]: expected one"),
        ("cluster", 3, 2, "LINE: cluster: found 3, expected a map"),
        ("cluster", {"gpus_per_node": [8]}, 0, "to do: cluster.gpus_per_node: found [8], expected an integer"),
        ("logger", "text", 2, "LINE: logger: found 'text', expected a map"),
        ("loss_fn", True, 2, "LINE: loss_fn: found true, expected a map"),
        ("grpo", None, 2, "no grpo section"),
        ("policy", None, 2, "policy.megatron_cfg.enabled is not true"),
        ("policy", [1], 2, "LINE: policy: found [1], expected a map"),
    ],
)
def test_odd_section_is_named_with_its_line(tmp_path, importer, monkeypatch, capsys, section, odd, code, message):
    path = tmp_path / "in.yaml"
    path.write_text(yaml.safe_dump(flat_base() | {section: odd}, sort_keys=False))
    line = 1 + [text.split(":")[0] for text in path.read_text().splitlines()].index(section)
    found = import_in_process(importer, monkeypatch, capsys, path)
    assert found[0] == code and message.replace("LINE", f"in.yaml:{line}") in found[2], found


def test_configuration_page_is_current():
    command = [sys.executable, REPO / "tools/make_config_docs.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_every_key_has_a_docstring_and_every_rule_a_reason():
    for path, section in sections():
        assert section.__doc__, path
        for name, field in section.model_fields.items():
            assert field.description and field.description.endswith("."), f"{path}.{name}"
    assert all(rule.reason.endswith(".") for rule in RULES)
    assert len({rule.name for rule in RULES}) == len(RULES)


def named_in_code() -> set[str]:
    """Rule names that the code gives to problems outside the table of rules: literals handed on as `rule`."""
    found = set()
    for path in (REPO / "nemo_rl_moe/recipe").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "func", None)
            called = getattr(name, "id", None) or getattr(name, "attr", None)
            if called in ("Problem", "_error", "_problem", "Rule") and node.args:
                found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return found


def test_every_name_that_a_problem_can_have_is_listed_once_with_its_reason():
    listed = [line.split(" | ")[0].removeprefix("| ") for line in rule_rows()]
    names = [rule.name for rule in RULES] + sorted(READING_RULES) + [RUN_RULE.name]
    assert sorted(listed) == sorted(names) and len(set(names)) == len(names)
    assert {name for name in named_in_code() if name in names} == {*READING_RULES, RUN_RULE.name}
    unlisted = named_in_code() - set(names)
    assert unlisted == set(), unlisted


def rule_rows() -> list[str]:
    """The rows of every table of rules in docs/configuration.md."""
    rows, inside = [], False
    for line in (REPO / "docs/configuration.md").read_text().splitlines():
        inside = line.startswith("| rule | reason") or (inside and line.startswith("|"))
        if inside and not line.startswith(("| rule | reason", "|---")):
            rows.append(line)
    return rows
