"""Results of training runs, published or one's own, and the machines that they are from: two forms of YAML file."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from nemo_rl_moe.bench.flops.count import ModelFlops, UnknownFamily, model_flops, training_flops_per_token
from nemo_rl_moe.bench.flops.models import find_model
from nemo_rl_moe.bench.typed_file import read_typed
from nemo_rl_moe.errors import UserError
from nemo_rl_moe.recipe.schema.base import Section
from nemo_rl_moe.recipe.source import Node, Problem, RecipeError, nearest

_FOLDER = Path(__file__).parent


class System(Section):
    """A machine."""

    gpu: Literal["h100", "h200", "gh200", "b200", "gb200", "b300", "gb300"]
    """Its GPU."""
    gpus_per_node: PositiveInt
    """GPUs of a node."""
    nvlink_domain: PositiveInt
    """GPUs that reach one another over NVLink."""
    network_gbit: PositiveFloat
    """Gbit/s of a GPU's share of its node's network cards, each way."""
    nvlink_gbyte: PositiveFloat
    """GB/s of a GPU to all others of its domain, each way."""
    power: PositiveFloat | None = None
    """Watts that it may take."""
    rated_power: PositiveFloat | None = None
    """Watts that it is built for."""
    power_is_of: str | None = None
    """What takes them."""
    source: str = Field(min_length=1)
    """Where all this is from."""


class Systems(Section):
    """A file of machines."""

    systems: dict[str, System]
    """By name."""


class SourceOf(Section):
    """Where results are from."""

    title: str = Field(min_length=1)
    """Document."""
    url: str = Field(min_length=1)
    """Where it is."""
    revision: str = Field(min_length=1)
    """Version or date, as pages change."""
    caveats: list[str] = Field(default_factory=list)
    """What holds for all its results."""


class Layout(Section):
    """How a run is spread over its GPUs."""

    tp: PositiveInt = 1
    """Tensor parallelism."""
    pp: PositiveInt = 1
    """Pipeline parallelism."""
    vpp: PositiveInt = 1
    """Virtual pipeline stages on a rank."""
    cp: PositiveInt = 1
    """Context parallelism."""
    ep: PositiveInt = 1
    """Expert parallelism."""
    etp: PositiveInt = 1
    """Tensor parallelism of each expert."""


class Result(Section):
    """One throughput that was measured or claimed. What is not stated is null."""

    id: str = Field(min_length=1)
    """Name in this table."""
    model: str
    """Published model, or the name alone where its config is not public."""
    system: str
    """Machine."""
    gpus: PositiveInt | None = None
    """GPUs of the run."""
    precision: Literal["bf16", "fp8", "mxfp8", "nvfp4"] | None = None
    """Number format of the matrix products."""
    layout: Layout = Field(default_factory=Layout)
    """Parallel layout."""
    global_batch: PositiveInt | None = None
    """Sequences of a step."""
    micro_batch: PositiveInt = 1
    """Sequences of a micro-batch."""
    sequence: PositiveInt | None = None
    """Tokens of a sequence."""
    mtp_layers: int = Field(0, ge=0)
    """Multi-token-prediction layers that were trained along."""
    dispatcher: Literal["alltoall", "allgather", "deepep", "hybridep"] | None = None
    """How tokens reached their experts."""
    a2a_overlap: bool | None = None
    """Whether the experts' all-to-all ran beside the computation of another micro-batch."""
    recompute: list[str] | None = None
    """Modules recomputed in backward."""
    cuda_graphs: list[str] | None = None
    """Parts under CUDA graphs."""
    routing: Literal["forced", "natural"] = "forced"
    """Whether the router was forced to balance its load."""
    dropless: bool = True
    """Whether every token reached its experts."""
    tflops: PositiveFloat | list[PositiveFloat]
    """Model TFLOP/s a GPU; a list is a range."""
    tokens_per_second: PositiveFloat | None = None
    """Tokens a second and GPU."""
    step_seconds: PositiveFloat | None = None
    """Seconds of a step."""
    memory_peak_gib: PositiveFloat | None = None
    """Largest allocated memory of a GPU."""
    source: str
    """Key of the file's sources."""
    at: str | None = None
    """Where in the source."""
    caveats: list[str] = Field(default_factory=list)
    """What must be said with the number."""

    @property
    def speed_range(self) -> tuple[float, float]:
        """Lowest and highest TFLOP/s a GPU."""
        values = self.tflops if isinstance(self.tflops, list) else [self.tflops]
        return min(values), max(values)


class ResultsFile(Section):
    """A file of results."""

    sources: dict[str, SourceOf]
    """Where they are from."""
    results: list[Result] = Field(min_length=1)
    """The results."""

    @model_validator(mode="after")
    def _ranges(self) -> ResultsFile:
        if any(isinstance(result.tflops, list) and len(result.tflops) != 2 for result in self.results):
            raise ValueError("tflops: a range is a list of two numbers")
        return self


def read_results(path: Path) -> ResultsFile:
    """Reads a file of results.

    Raises:
        UserError: every problem at once with its line: types, a source or system that is not there, an id used twice.
    """
    typed, root = read_typed(path, ResultsFile, "results")
    problems = list(_wrong_names(typed, root))
    if problems:
        raise RecipeError(problems)
    return typed


def _wrong_names(typed: ResultsFile, root: Node) -> Iterator[Problem]:
    seen: set[str] = set()
    for index, result in enumerate(typed.results):
        for key, value, known in (
            ("source", result.source, list(typed.sources)),
            ("system", result.system, list(systems())),
        ):
            if value not in known:
                source = nearest(root, ("results", index, key)).source
                message = f"{value!r} is none of the {key}s, expected one of {', '.join(known) or 'none given'}"
                yield Problem(key, f"results[{index}].{key}", source, value, message)
        if result.id in seen:
            source = nearest(root, ("results", index, "id")).source
            yield Problem("id", f"results[{index}].id", source, result.id, f"{result.id!r} is used twice")
        seen.add(result.id)


@cache
def published() -> tuple[dict[str, Result], dict[str, SourceOf]]:
    """Published results by id, and their sources, from the files beside this module."""
    files = [read_results(path) for path in sorted((_FOLDER / "published").glob("*.yaml"))]
    results = {result.id: result for file in files for result in file.results}
    return results, {name: source for file in files for name, source in file.sources.items()}


@cache
def systems() -> dict[str, System]:
    """Machines by name."""
    return read_typed(_FOLDER / "systems.yaml", Systems, "systems")[0].systems


def result_flops(result: Result) -> ModelFlops | None:
    """Count of the result's model; None where its config is not known here."""
    try:
        return model_flops(find_model(result.model)[1], result.mtp_layers)
    except (UserError, UnknownFamily):
        return None


def flops_per_token(result: Result) -> float | None:
    """Training FLOPs of a token of the result's run; None where model or sequence are not known."""
    count = result_flops(result)
    return None if count is None or result.sequence is None else training_flops_per_token(count, result.sequence)
