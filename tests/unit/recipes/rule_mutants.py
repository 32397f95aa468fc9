"""Rules with one condition changed: what a set of recipes must be able to tell from the rules themselves.

Each mutant is a module of `recipe/rules` in which one condition holds always or never, or one comparison has moved its
edge by one (`>` for `>=`). A mutant that finds the same in every recipe has a condition that no recipe tests.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_rl_moe.recipe.rules.registry import RULES, Context, Rule

EDGES: dict[type, type[ast.cmpop]] = {ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Lt: ast.LtE, ast.LtE: ast.Lt}


@dataclass(frozen=True)
class Mutant:
    """A module's rules with one condition changed, and where and how."""

    place: str
    change: str
    rules: tuple[Rule, ...]


def mutants(module: types.ModuleType) -> Iterator[Mutant]:
    """Every mutant of a module of rules."""
    assert module.__file__ is not None
    with open(module.__file__, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    for number, change in enumerate(_changes(tree)):
        mutated = copy.deepcopy(tree)
        twin = _changes(mutated)[number]
        twin.apply()
        name = f"{module.__name__.rpartition('.')[2]}.py:{change.line}"
        yield Mutant(name, change.text, tuple(_rules_of(mutated, module)))


@dataclass
class _Change:
    """Puts another expression or operator into one place of the tree."""

    parent: Any
    field: str
    index: int | None
    new: Any
    line: int
    text: str

    def apply(self) -> None:
        if self.index is None:
            setattr(self.parent, self.field, self.new)
        else:
            getattr(self.parent, self.field)[self.index] = self.new


def _changes(tree: ast.Module) -> list[_Change]:
    found = []
    for function in tree.body:
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                found += [*_conditions(node), *_edges(node)]
    return found


def _conditions(node: ast.AST) -> Iterator[_Change]:
    """Conditions that decide: of `if`, of `a if b else c`, of comprehensions, and each part of `and` and `or`."""
    places: list[tuple[str, int | None, ast.expr]] = []
    if isinstance(node, ast.If | ast.IfExp):
        places.append(("test", None, node.test))
    elif isinstance(node, ast.comprehension):
        places += [("ifs", index, test) for index, test in enumerate(node.ifs)]
    elif isinstance(node, ast.BoolOp):
        places += [("values", index, value) for index, value in enumerate(node.values)]
    for field, index, test in places:
        # The other constant makes the whole `and` or `or` constant, which is the change of what is around it.
        values = [isinstance(node.op, ast.And)] if isinstance(node, ast.BoolOp) else [True, False]
        for value in values:
            constant = ast.copy_location(ast.Constant(value), test)
            yield _Change(node, field, index, constant, test.lineno, f"{ast.unparse(test)} -> {value}")


def _edges(node: ast.AST) -> Iterator[_Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            other = EDGES.get(type(operator))
            if other is not None:
                yield _Change(node, "ops", index, other(), node.lineno, f"{ast.unparse(node)} -> {other.__name__}")


def _rules_of(tree: ast.Module, module: types.ModuleType) -> list[Rule]:
    """The rules that a module's tree defines; the table of rules is left as it was."""
    before = len(RULES)
    try:
        exec(compile(ast.fix_missing_locations(tree), str(module.__file__), "exec"), {"__name__": module.__name__})
        return RULES[before:]
    finally:
        del RULES[before:]


def findings(rules: Sequence[Rule], context: Context) -> Any:
    """What the rules find in a recipe; of rules that fail, the error."""
    try:
        return [(rule.name, finding) for rule in rules for finding in rule.check(context)]
    except Exception as error:
        return repr(error)
