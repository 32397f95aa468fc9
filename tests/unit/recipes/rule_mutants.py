"""Rules with one condition changed: what a set of recipes must be able to tell from the rules themselves.

Each mutant is a module of `recipe/rules` in which one condition holds always or never, or one comparison has moved its
edge by one (`>` for `>=`). A mutant that finds the same in every recipe has a condition that no recipe tests.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_moe.recipe.rules.registry import RULES, Context, Rule

EDGES: dict[type, type[ast.cmpop]] = {ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt}


@dataclass(frozen=True)
class Mutant:
    """A module's rules with one condition changed, and where and how."""

    file: str
    line: int
    change: str
    rules: tuple[Rule, ...]

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    @property
    def name(self) -> str:
        """File and change, which stay when lines move."""
        return f"{self.file}: {self.change}"


def mutants(module: types.ModuleType) -> Iterator[Mutant]:
    """Every mutant of a module of rules."""
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for number, change in enumerate(_changes(tree)):
        mutated = copy.deepcopy(tree)
        twin = _changes(mutated)[number]
        twin.apply()
        file = f"{module.__name__.rpartition('.')[2]}.py"
        yield Mutant(file, change.line, change.text, tuple(_rules_of(mutated, module)))


@dataclass
class _Change:
    """Puts another expression or operator into one place of the tree."""

    parent: Any
    field: str
    index: int | None
    new: Any
    line: int
    text: str
    more: dict[str, Any] = field(default_factory=dict)

    def apply(self) -> None:
        for name, new in self.more.items():
            setattr(self.parent, name, new)
        if self.index is None:
            setattr(self.parent, self.field, self.new)
        else:
            getattr(self.parent, self.field)[self.index] = self.new


def _changes(tree: ast.Module) -> list[_Change]:
    found = []
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                found += [*_conditions(node), *_edges(node), *_alternatives(node)]
    return found


def _conditions(node: ast.AST) -> Iterator[_Change]:
    """Conditions that decide: of `if`, of `a if b else c`, of comprehensions, and each part of `and` and `or`."""
    places: list[tuple[str, int | None, ast.expr]] = []
    if isinstance(node, ast.If | ast.IfExp):
        places.append(("test", None, node.test))
    elif isinstance(node, ast.comprehension):
        places += [("ifs", index, test) for index, test in enumerate(node.ifs)]
    elif isinstance(node, ast.BoolOp) and not _is_fallback(node):
        places += [("values", index, value) for index, value in enumerate(node.values)]
    for name, index, test in places:
        # The other constant makes the whole `and` or `or` constant, which is the change of what is around it.
        values = [isinstance(node.op, ast.And)] if isinstance(node, ast.BoolOp) else [True, False]
        for value in values:
            constant = ast.copy_location(ast.Constant(value), test)
            yield _Change(node, name, index, constant, test.lineno, f"{ast.unparse(test)} -> {value}")


def _is_fallback(node: ast.BoolOp) -> bool:
    """`x or ()` and `x or None`, which decide nothing: what is empty stands for null."""
    return ast.unparse(node.values[-1]) in ("()", "[]", "{}", "None")


def _alternatives(node: ast.AST) -> Iterator[_Change]:
    """Literals of several items that are gone through or looked up in, each without one of its items."""
    literal = None
    if isinstance(node, ast.For | ast.comprehension):
        literal = node.iter
    elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
        literal = node.comparators[0]
    elif isinstance(node, ast.Assign):
        literal = node.value if isinstance(node.value, ast.Dict) else None
    if isinstance(literal, ast.Tuple | ast.List):
        for index, item in enumerate(literal.elts):
            rest = literal.elts[:index] + literal.elts[index + 1 :]
            yield _Change(literal, "elts", None, rest, item.lineno, f"without {ast.unparse(item)}")
    elif isinstance(literal, ast.Dict):
        for index, key in enumerate(literal.keys):
            keys, values = ([x for i, x in enumerate(part) if i != index] for part in (literal.keys, literal.values))
            assert key is not None
            yield _Change(literal, "keys", None, keys, key.lineno, f"without {ast.unparse(key)}", {"values": values})


def _edges(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            other = EDGES.get(type(operator))
            if other is not None:
                yield _Change(node, "ops", index, other(), node.lineno, f"{ast.unparse(node)} -> {other.__name__}")


def _rules_of(tree: ast.Module, module: types.ModuleType) -> list[Rule]:
    """The rules that a module's tree defines; the table of rules is left as it was."""
    before, names = len(RULES), {"__name__": module.__name__}
    try:
        exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), names)
        return [*RULES[before:], *rules_outside_the_table(names)]
    finally:
        del RULES[before:]


def rules_outside_the_table(names: dict[str, Any]) -> list[Rule]:
    """Rules that a module holds by name, as those of `run` alone."""
    return [value for value in names.values() if isinstance(value, Rule)]


def findings(rules: Sequence[Rule], context: Context) -> Any:
    """What the rules find in a recipe; of rules that fail, the error."""
    try:
        return [(rule.name, finding) for rule in rules for finding in rule.check(context)]
    except Exception as error:
        return repr(error)
