"""What differs between two runs besides the thing that is compared: treatment, logging, or confounder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from nemo_rl_moe.compare.run_data import RunData, leaves
from nemo_rl_moe.errors import UserError

Kind = Literal["treatment", "logging", "confounder"]
Verdict = Literal["matched", "not matched", "not known to be matched"]
ABSENT = object()

_MEGATRON, _VLLM = "policy.megatron_cfg", "policy.generation.vllm_cfg"
# One idea each, which people compare with all else equal. Keys of no family, such as batch sizes and seeds, are what
# has to be equal. In NeMo-RL's names, which are ours too where we have the key.
FAMILIES: dict[str, tuple[str, ...]] = {
    "dispatcher": (
        *(f"{_MEGATRON}.{key}" for key in ("moe_token_dispatcher_type", "moe_flex_dispatcher_backend")),
        *(f"{_MEGATRON}.{key}" for key in ("moe_hybridep_*", "hybridep_*", "moe_enable_deepep", "moe_deepep_*")),
        f"{_MEGATRON}.moe_shared_expert_overlap",
        *(f"{_MEGATRON}.env_vars.{name}" for name in ("*HYBRID_EP*", "NVLINK_DOMAIN_SIZE", "USE_MNNVL")),
        f"{_MEGATRON}.env_vars.NUM_OF_TOKENS_PER_CHUNK_COMBINE_API",
    ),
    "placement": ("grpo.async_grpo.*", "policy.generation.colocated.*", f"{_VLLM}.async_engine"),
    "precision": (
        "policy.precision",
        f"{_MEGATRON}.fp8_cfg.*",
        f"{_MEGATRON}.pipeline_dtype",
        f"{_VLLM}.precision",
        f"{_VLLM}.kv_cache_dtype",
        f"{_VLLM}.quantization*",
        f"{_VLLM}.use_deep_gemm",
        f"{_VLLM}.is_mx",
    ),
    "parallelism": (
        f"{_MEGATRON}.*_parallel_size",
        f"{_MEGATRON}.sequence_parallel",
        f"{_MEGATRON}.num_layers_*",
        f"{_VLLM}.*_parallel_size",
    ),
    "micro-batches": (
        "policy.train_micro_batch_size",
        "policy.logprob_batch_size",
        "policy.sequence_packing.*",
        "policy.dynamic_batching.*",
        "policy.make_sequence_length_divisible_by",
    ),
    "recomputation": (f"{_MEGATRON}.activation_checkpointing", f"{_MEGATRON}.recompute_*"),
    "kernels": (
        f"{_MEGATRON}.*fusion",
        f"{_MEGATRON}.moe_grouped_gemm",
        f"{_MEGATRON}.cuda_graph_impl",
        f"{_VLLM}.enforce_eager",
    ),
}
# What changes where and how long something is kept, and no number that is compared.
_LOGGING = (
    "logger.*",
    "checkpointing.checkpoint_dir",
    "cluster.timeouts.*",
    "cluster.placement_timeout_s",
    "host.name",
    "host.system",
)


@dataclass(frozen=True)
class Difference:
    """A key whose value differs; `ABSENT` on a side that lacks it."""

    key: str
    before: Any
    after: Any
    kind: Kind
    family: str | None = None


@dataclass(frozen=True)
class Differences:
    """All that differs between two runs.

    Attributes:
        config: of the resolved configurations; None when one of them is not known.
        environment: of versions, host, devices and code; None when one of them is not known.
        treatment: families or patterns that are compared; empty when nothing differs but logging.
        verdict: whether the pair may be called matched.
        why: one sentence for the heading.
    """

    config: list[Difference] | None
    environment: list[Difference] | None
    treatment: list[str]
    verdict: Verdict
    why: str

    def of_kind(self, kind: Kind) -> list[Difference]:
        """Differences of configuration and environment of one kind."""
        return [d for d in [*(self.config or []), *(self.environment or [])] if d.kind == kind]


def differences(base: RunData, run: RunData, treatment: Sequence[str] = ()) -> Differences:
    """Classifies what differs.

    Args:
        base: the baseline.
        run: what is compared with it.
        treatment: families, or patterns of dotted keys, that are meant to differ. Empty: the one family that differs
            is taken; of more than one, none is.
    """
    config = _changed(base.config, run.config)
    environment = _changed(base.environment, run.environment)
    found = [*(config or {}), *(environment or {})]
    families = list(dict.fromkeys(f for key in found if not _matches(key, _LOGGING) and (f := family_of(key))))
    chosen = list(treatment) or (families if len(families) == 1 else [])
    patterns = [pattern for name in chosen for pattern in FAMILIES.get(name, (name,))]

    def classify(changed: Mapping[str, tuple[Any, Any]] | None) -> list[Difference] | None:
        if changed is None:
            return None
        return [
            Difference(key, before, after, _kind(key, patterns), family_of(key))
            for key, (before, after) in changed.items()
        ]

    classified = classify(config), classify(environment)
    verdict, why = _judge(*classified, chosen, families, base, run)
    return Differences(*classified, chosen, verdict, why)


def check_treatment(names: Sequence[str]) -> None:
    """Raises a UserError for a name that is neither a family nor a dotted key."""
    bad = [name for name in names if name not in FAMILIES and "." not in name and "*" not in name]
    if bad:
        families = ", ".join(FAMILIES)
        raise UserError(f"--treatment {bad[0]}: expected one of {families}, or a dotted key such as grpo.seed")


def family_of(key: str) -> str | None:
    """The family of a dotted key; None when it has none."""
    return next((name for name, patterns in FAMILIES.items() if _matches(key, patterns)), None)


def _kind(key: str, treatment: Sequence[str]) -> Kind:
    if _matches(key, treatment):
        return "treatment"
    return "logging" if _matches(key, _LOGGING) else "confounder"


def _matches(key: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(key, p) or fnmatchcase(key, f"{p}.*") for p in patterns)


def _changed(before: Mapping[str, Any] | None, after: Mapping[str, Any] | None) -> dict[str, tuple[Any, Any]] | None:
    if before is None or after is None:
        return None
    left, right = dict(leaves(before)), dict(leaves(after))
    pairs = {key: (left.get(key, ABSENT), right.get(key, ABSENT)) for key in dict.fromkeys([*left, *right])}
    # An empty map on one side and its keys on the other is one difference, told by the keys.
    empty = {key for key, pair in pairs.items() if pair[0] in ({}, ABSENT) and pair[1] in ({}, ABSENT)}
    return {key: pair for key, pair in pairs.items() if key not in empty and not _same(*pair)}


def _same(before: Any, after: Any) -> bool:
    # 1 and True are equal in Python and different in a recipe; 1 and 1.0 are the same in both.
    return before == after and isinstance(before, bool) == isinstance(after, bool)


def _judge(
    config: list[Difference] | None,
    environment: list[Difference] | None,
    chosen: Sequence[str],
    families: Sequence[str],
    base: RunData,
    run: RunData,
) -> tuple[Verdict, str]:
    confounders = [d.key for d in [*(config or []), *(environment or [])] if d.kind == "confounder"]
    if confounders and not chosen and len(families) > 1:
        return "not matched", f"differs in {' and '.join(families)}; say which is compared with --treatment"
    if confounders:
        more = f" and {len(confounders) - 3} more" if len(confounders) > 3 else ""
        also = "also " * any(d.kind == "treatment" for d in [*(config or []), *(environment or [])])
        return "not matched", f"{also}differs in {', '.join(confounders[:3])}{more}"
    if config is None:
        lacking = [each.name for each in (base, run) if each.config is None]
        return "not known to be matched", f"no configuration of {' and '.join(lacking)}"
    treated = [d.key for d in [*config, *(environment or [])] if d.kind == "treatment"]
    if not treated:
        return "matched", "no difference but logging: what is shown below is the spread between equal runs"
    keys = f"{len(treated)} key{'s'[: len(treated) > 1]}"
    unknown = "" if environment is not None else "; the environment is not known"
    return "matched", f"differs in {', '.join(chosen)} only ({keys}){unknown}"
