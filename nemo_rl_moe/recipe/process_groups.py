"""The trainer's process groups: which ranks talk to one another, in megatron-core's order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nemo_rl_moe.recipe.plan import PolicyRank

# A group holds the ranks that differ in these coordinates only. Dense layers are laid out over TP, CP, DP and PP,
# experts over ETP, EP, expert-DP and PP; both views cover the same ranks.
_DENSE, _EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "edp", "pp")
_GROUPS = {
    "TP": (_DENSE, {"tp"}),
    "CP": (_DENSE, {"cp"}),
    "DP": (_DENSE, {"dp"}),
    "DP x CP": (_DENSE, {"dp", "cp"}),
    "PP": (_DENSE, {"pp"}),
    "EP": (_EXPERT, {"ep"}),
    "ETP": (_EXPERT, {"etp"}),
    "expert DP": (_EXPERT, {"edp"}),
}


@dataclass(frozen=True)
class ProcessGroups:
    """All groups of one kind.

    Args:
        name: what they split or copy.
        size: ranks in each.
        ranks: the ranks of each group in its order; groups in order of their first rank.
    """

    name: str
    size: int
    ranks: list[list[int]]


def process_groups(ranks: Sequence[PolicyRank]) -> list[ProcessGroups]:
    """The groups of a trainer, from its ranks' coordinates."""
    found = []
    for name, (view, varying) in _GROUPS.items():
        fixed = [axis for axis in view if axis not in varying]
        groups: dict[tuple[int, ...], list[int]] = {}
        for rank in ranks:
            groups.setdefault(tuple(getattr(rank, axis) for axis in fixed), []).append(rank.rank)
        members = sorted(groups.values())
        found.append(ProcessGroups(name, len(members[0]), members))
    return found
