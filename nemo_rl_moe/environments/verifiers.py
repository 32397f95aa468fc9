"""The verifiers: math-verify, reasoning-gym's own scores, and a user's function by its import path.

This module is loaded in verifier processes: it imports neither torch nor numpy.
"""

from __future__ import annotations

import functools
import importlib
import json
import logging
from collections.abc import Callable
from typing import Any

VerifyFunction = Callable[[str, dict[str, Any]], float]


def load_verifier(name: str) -> VerifyFunction:
    """The verify function of `math_verify`, `reasoning_gym` or `package.module:function`.

    Raises:
        ImportError, AttributeError, ValueError, TypeError: there is no such function, said in the message.
    """
    if name == "math_verify":
        return _math_verify()
    if name == "reasoning_gym":
        return _reasoning_gym()
    module_name, separator, attribute = name.partition(":")
    if not separator or not module_name or not attribute:
        raise ValueError("expected math_verify, reasoning_gym or package.module:function")
    target: Any = importlib.import_module(module_name)
    for part in attribute.split("."):
        target = getattr(target, part)
    if not callable(target):
        raise TypeError(f"{attribute} of {module_name} is a {type(target).__name__}, expected a function")
    return target


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced; None when there is none."""
    mark = "\\boxed{"
    start = text.rfind(mark)
    while start >= 0:
        depth = 1
        for position in range(start + len(mark), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[start + len(mark) : position]
        start = text.rfind(mark, 0, start)
    return None


def _math_verify() -> VerifyFunction:
    import math_verify

    # It warns at every first call that its own time limits are off. They are: see below.
    logging.getLogger("math_verify").setLevel(logging.ERROR)

    # Its limits use SIGALRM: outside a main thread they raise, and every answer would score 0. This process is killed
    # at the environment's time limit instead, which also ends a loop in C that a Python signal handler never sees.
    def parse(text: str) -> list[Any]:
        return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)

    @functools.lru_cache(maxsize=256)
    def parse_answer(answer: str) -> list[Any]:
        # In a box the answer may be bare LaTeX; without one, only plain numbers and expressions are recognised.
        return parse("\\boxed{" + answer + "}")

    def verify(response: str, metadata: dict[str, Any]) -> float:
        answer = str(metadata["answer"])
        gold = parse_answer(answer)
        if not gold:
            raise ValueError(f"the dataset's answer {answer!r} is nothing that math-verify can parse")
        boxed = last_boxed(response)
        given = parse(response) if boxed is None else parse("\\boxed{" + boxed + "}")
        return float(math_verify.verify(gold, given, timeout_seconds=None, raise_on_error=True))

    return verify


def _reasoning_gym() -> VerifyFunction:
    import reasoning_gym

    @functools.lru_cache(maxsize=64)
    def dataset(task: str, config: str) -> Any:
        # Scoring reads the settings, never the rows, so seed and size do not matter.
        return reasoning_gym.create_dataset(task, seed=0, size=1, **json.loads(config))

    def verify(response: str, metadata: dict[str, Any]) -> float:
        if "entry" not in metadata:
            raise ValueError("the reasoning_gym verifier scores reasoning_gym rows only (no entry in the metadata)")
        scorer = dataset(metadata["task"], json.dumps(metadata["task_config"], sort_keys=True))
        return float(scorer.score_answer(response, metadata["entry"]))

    return verify
