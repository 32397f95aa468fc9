"""One command: run, validate, plan, config, compare, report, watch, bench, doctor.

Exit codes: 0 done, 1 the run failed, 2 the user's input is wrong, 130 interrupted. Imports are made inside the
commands: `validate` must answer on a bare machine, without torch and Ray, in about a second.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from nemo_rl_moe import interrupts
from nemo_rl_moe.errors import RunFailed, UserError
from nemo_rl_moe.printable import printable

EXIT_DONE, EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 0, 1, 2, interrupts.EXIT_INTERRUPTED


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    arguments = _parse(argv)
    try:
        return arguments.command(arguments)
    except UserError as error:
        # It may quote a name or a value from a file that anyone wrote.
        print(printable(str(error)), file=sys.stderr)
        return EXIT_USER
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe (such as `head`) has seen enough. A run, however, did not get to its end.
        failed = arguments.command is _run
        sys.stderr.close()
        return EXIT_FAILED if failed else EXIT_DONE
    except RunFailed as error:
        print(f"failed: {error}", file=sys.stderr)
        return EXIT_FAILED
    except Exception:
        traceback.print_exc()
        return EXIT_FAILED


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses a command line. Overrides may stand after an option, where argparse takes no more of them by itself."""
    argv = sys.argv[1:] if argv is None else list(argv)
    parser = _parser(bench=argv[:1] == ["bench"])
    arguments, rest = parser.parse_known_args(argv)
    if rest and (not hasattr(arguments, "overrides") or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides += rest
    return arguments


def _parser(*, bench: bool) -> argparse.ArgumentParser:
    """The commands. Those of `bench` import its models (0.4 s), so they are there only when asked for."""
    parser = argparse.ArgumentParser(prog="nemo-rl-moe", description="GRPO post-training of mixture-of-experts models")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    run = commands.add_parser("run", help="run a recipe")
    _recipe_arguments(run)
    run.add_argument("--resume", action="store_true", help="go on from the newest complete checkpoint of the same run")
    run.add_argument("--dry-run", action="store_true", help="print the plan and start nothing")
    run.set_defaults(command=_run)

    validate = commands.add_parser("validate", help="check recipes; every problem at once")
    validate.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="recipe files or folders of them")
    _json_argument(validate)
    validate.set_defaults(command=_validate)

    plan = commands.add_parser("plan", help="placement and arithmetic of a recipe, without starting anything")
    _recipe_arguments(plan)
    _json_argument(plan)
    plan.set_defaults(command=_plan)

    doctor = commands.add_parser("doctor", help="what is installed and what the machine offers, with fixes")
    doctor.add_argument("--workers", action="store_true", help="ask the nodes of the Ray cluster too")
    _json_argument(doctor)
    doctor.set_defaults(command=_doctor)

    _config_commands(commands.add_parser("config", help="look into recipes"))
    _compare_command(commands.add_parser("compare", help="runs against a baseline, with what differs between them"))
    _report_command(commands.add_parser("report", help="one run: numbers, and a page with curves and samples to read"))
    _watch_command(commands.add_parser("watch", help="a live view of a run, in the terminal"))
    benches = commands.add_parser("bench", help="predict and measure speed")
    if bench:
        _bench_commands(benches)
    return parser


def _config_commands(config: argparse.ArgumentParser) -> None:
    commands = config.add_subparsers(required=True, metavar="COMMAND")
    show = commands.add_parser("show", help="the resolved recipe, schema defaults included")
    _recipe_arguments(show)
    _json_argument(show)
    show.set_defaults(command=_config_show)

    why = commands.add_parser("why", help="where a value came from, and what it overrode")
    why.add_argument("recipe", type=Path, metavar="RECIPE")
    why.add_argument("key", metavar="KEY", help="dotted path")
    why.add_argument("overrides", nargs="*", metavar="OVERRIDE")
    _json_argument(why)
    why.set_defaults(command=_config_why)

    diff = commands.add_parser("diff", help="difference of two resolved recipes")
    diff.add_argument("a", type=Path, metavar="A")
    diff.add_argument("b", type=Path, metavar="B")
    _json_argument(diff)
    diff.set_defaults(command=_config_diff)

    minimize = commands.add_parser("minimize", help="a recipe without the keys that equal what it inherits")
    minimize.add_argument("recipe", type=Path, metavar="RECIPE")
    minimize.add_argument("--check", action="store_true", help="print nothing; exit 2 when keys could go")
    _json_argument(minimize)
    minimize.set_defaults(command=_config_minimize)


def _compare_command(compare: argparse.ArgumentParser) -> None:
    from nemo_rl_moe.compare.command import add_arguments

    add_arguments(compare)
    _json_argument(compare)
    compare.set_defaults(command=_compare)


def _report_command(report: argparse.ArgumentParser) -> None:
    from nemo_rl_moe.compare.report_command import add_arguments

    add_arguments(report)
    _json_argument(report)
    report.set_defaults(command=_report)


def _watch_command(watch: argparse.ArgumentParser) -> None:
    from nemo_rl_moe.compare.watch.command import add_arguments

    add_arguments(watch)
    watch.set_defaults(command=_watch)


def _bench_commands(bench: argparse.ArgumentParser) -> None:
    from nemo_rl_moe.bench.commands import add_commands
    from nemo_rl_moe.bench.placement.command import add_arguments

    commands = bench.add_subparsers(required=True, metavar="COMMAND")
    add_commands(commands)
    placement = commands.add_parser("placement", help="step time of sync and of async at every split, simulated")
    _recipe_arguments(placement)
    add_arguments(placement)
    _json_argument(placement)
    placement.set_defaults(command=_bench_placement)


def _recipe_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="YAML recipe")
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="a.b=1, +a.b=1 (add), ++a.b=1, ~a.b (delete)")


def _json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout and nothing else")


def _run(arguments: argparse.Namespace) -> int:
    with interrupts.handled():
        return _run_recipe(arguments)


def _run_recipe(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.recipe.load import load_recipe, refuse_unsupported

    loaded = load_recipe(arguments.recipe, arguments.overrides)
    for warning in loaded.warnings:
        if warning.severity == "warning":
            print(warning, file=sys.stderr)
    if arguments.dry_run:
        from nemo_rl_moe.recipe.plan_report import print_plan

        print_plan(loaded, as_json=False)
        return EXIT_DONE
    refuse_unsupported(loaded)
    from nemo_rl_moe.loops.run import run_recipe

    return run_recipe(loaded, resume=arguments.resume)


def _validate(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.recipe.commands import validate

    return EXIT_DONE if validate(arguments.paths, as_json=arguments.json) else EXIT_USER


def _plan(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.recipe.load import load_recipe
    from nemo_rl_moe.recipe.plan_report import print_plan

    print_plan(load_recipe(arguments.recipe, arguments.overrides), as_json=arguments.json)
    return EXIT_DONE


def _doctor(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.doctor import doctor

    return doctor(as_json=arguments.json, workers=arguments.workers)


def _compare(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.compare.command import run

    run(arguments)
    return EXIT_DONE


def _report(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.compare.report_command import run

    run(arguments)
    return EXIT_DONE


def _watch(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.compare.watch.command import run

    run(arguments)
    return EXIT_DONE


def _bench_placement(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.bench.placement.command import run

    run(arguments)
    return EXIT_DONE


def _config_show(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.recipe.commands import show

    show(arguments.recipe, arguments.overrides, as_json=arguments.json)
    return EXIT_DONE


def _config_why(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.recipe.commands import why

    why(arguments.recipe, arguments.overrides, arguments.key, as_json=arguments.json)
    return EXIT_DONE


def _config_diff(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.recipe.commands import diff

    diff(arguments.a, arguments.b, as_json=arguments.json)
    return EXIT_DONE


def _config_minimize(arguments: argparse.Namespace) -> int:
    from nemo_rl_moe.recipe.minimize import minimize_command

    clean = minimize_command(arguments.recipe, check=arguments.check, as_json=arguments.json)
    return EXIT_DONE if clean else EXIT_USER
