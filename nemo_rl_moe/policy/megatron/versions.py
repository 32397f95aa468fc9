"""megatron-core 0.16 to 0.19: what has another name in another version, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema.policy import MegatronConfig


@dataclass(frozen=True)
class Names:
    """Fields of TransformerConfig as one version calls them.

    Attributes:
        num_sms: streaming multiprocessors of each backend of the flex dispatcher.
        pad_uneven: megatron-core's own padding of unequal token counts, a collective and a wait in every MoE layer;
            None where the version has none.
    """

    num_sms: dict[str, str]
    pad_uneven: str | None = None


_EACH_BACKEND = {"hybridep": "moe_hybridep_num_sms", "deepep": "moe_deepep_num_sms"}
_BOTH_BACKENDS = {"hybridep": "moe_flex_dispatcher_num_sms", "deepep": "moe_flex_dispatcher_num_sms"}
VERSIONS: dict[tuple[int, int], Names] = {
    (0, 16): Names(_EACH_BACKEND),
    (0, 17): Names(_EACH_BACKEND),
    (0, 18): Names(_EACH_BACKEND),
    (0, 19): Names(_BOTH_BACKENDS, pad_uneven="moe_hybridep_pad_uneven_dispatch_inputs"),
}


def installed_version() -> tuple[int, int]:
    """Major and minor version of megatron-core.

    Raises:
        UserError: it is in no row of the table.
    """
    import megatron.core

    text = megatron.core.__version__
    major, minor = (int(part) for part in text.split(".")[:2])
    if (major, minor) not in VERSIONS:
        first, last = (".".join(map(str, version)) for version in (min(VERSIONS), max(VERSIONS)))
        raise UserError(f"megatron-core {text} is installed, expected {first} to {last}")
    return major, minor


def dispatcher_settings(cfg: MegatronConfig, version: tuple[int, int]) -> dict[str, Any]:
    """Arguments of TransformerConfig that choose how tokens reach their experts; the recipe's keys alone decide."""
    kind, backend = cfg.moe_token_dispatcher_type, cfg.moe_flex_dispatcher_backend
    settings: dict[str, Any] = {"moe_token_dispatcher_type": kind}
    if kind != "flex" or backend is None:
        return settings
    names = VERSIONS[version]
    settings["moe_flex_dispatcher_backend"] = backend
    if cfg.moe_hybridep_num_sms is not None and backend == "hybridep":
        settings[names.num_sms[backend]] = cfg.moe_hybridep_num_sms
    if names.pad_uneven is not None:
        # Never: row lengths are equal before the forward pass, by prepadding or by plan (prepadding.py). A collective
        # in each layer would also run beside the gathering of expert parameters, in another order on each rank.
        settings[names.pad_uneven] = False
    return settings
