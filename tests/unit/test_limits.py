"""Risk guarded: a wait whose limit nobody can find or change."""

from __future__ import annotations

import ast
from pathlib import Path

from nemo_rl_moe import limits

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGE = REPOSITORY / "nemo_rl_moe"


def is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float) and node.value > 0


def hidden_limits(file: Path) -> list[str]:
    """Numbers given as a timeout in a call, as a parameter's default, or to a constant in seconds."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.keyword) and "timeout" in (node.arg or "") and is_number(node.value):
            found.append(f"{file.name}:{node.value.lineno}")
        if isinstance(node, ast.arguments):
            every = [*node.posonlyargs, *node.args]
            pairs = [*zip(every[len(every) - len(node.defaults) :], node.defaults, strict=True)]
            pairs += zip(node.kwonlyargs, node.kw_defaults, strict=True)
            found += [f"{file.name}:{a.lineno}" for a, default in pairs if "timeout" in a.arg and is_number(default)]
        if isinstance(node, ast.Assign) and is_number(node.value):
            names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            found += [f"{file.name}:{node.lineno}" for n in names if n.isupper() and n.endswith(("_S", "TIMEOUT"))]
    return found


def test_every_time_limit_is_a_recipe_key_or_stands_in_limits_py() -> None:
    files = [f for f in PACKAGE.rglob("*.py") if f.name != "limits.py" and f.parent.name not in ("schema", "bench")]
    allowed = {
        # An age, not a wait.
        "shared_memory.py": "_LEFTOVER_AGE_S = 60.0",
    }
    found = [place for f in files if f.name not in allowed for place in hidden_limits(f)]
    assert found == []
    assert all(text in next(PACKAGE.rglob(name)).read_text() for name, text in allowed.items())


def test_every_constant_of_limits_py_is_in_the_architecture_page_with_its_value() -> None:
    page = (REPOSITORY / "docs/architecture.md").read_text()
    constants = {name: value for name, value in vars(limits).items() if name.isupper()}
    assert len(constants) == 10
    assert [name for name, value in constants.items() if f"`{name}` ({value:g})" not in page] == []
