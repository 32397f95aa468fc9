"""The pool's promise: whatever a verifier does to its process, every sample gets a score and the run goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from nemo_rl_moe.environments.base import ScoreRequest, VerifierError
from nemo_rl_moe.environments.pool import VerifierPool
from nemo_rl_moe.errors import PhaseTimeout, UserError
from nemo_rl_moe.recipe.schema import EnvConfig

MODULE = "tests.unit.environments.sample_verifiers"
REPOSITORY = Path(__file__).resolve().parents[3]


def requests(responses: Sequence[str], env: str = "obey") -> list[ScoreRequest]:
    return [ScoreRequest(env, i, f"problem {i}", r, {"answer": "1"}) for i, r in enumerate(responses)]


def config(function: str = "obey", **settings) -> EnvConfig:
    return EnvConfig(verifier=f"{MODULE}:{function}", **({"num_workers": 2, "timeout_s": 20.0} | settings))


@pytest.fixture(scope="module")
def pool() -> Iterator[VerifierPool]:
    with VerifierPool(
        {"obey": config(), "brief": config(timeout_s=0.3), "strict": config(on_error="fail", timeout_s=2.0)}
    ) as shared:
        yield shared


def wait_until(condition: Callable[[], bool], limit_s: float = 10.0) -> bool:
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_500_scores_come_back_in_the_order_of_their_requests(pool: VerifierPool) -> None:
    wanted = np.random.default_rng(0).integers(0, 1000, 500)
    result = pool.score(requests([str(x) for x in wanted]))
    assert result.rewards.dtype == np.float32
    np.testing.assert_array_equal(result.rewards, wanted.astype(np.float32))
    assert (result.errors, result.timeouts, result.messages) == (0, 0, [])


def test_no_requests_give_no_scores(pool: VerifierPool) -> None:
    assert pool.score([]).rewards.shape == (0,)


def test_one_call_scores_samples_of_two_environments(pool: VerifierPool) -> None:
    mixed = [r for pair in zip(requests(["1", "2"]), requests(["3", "hang"], "brief"), strict=True) for r in pair]
    result = pool.score(mixed)
    assert result.rewards.tolist() == [1.0, 3.0, 2.0, 0.0]
    assert result.timeouts == 1


@pytest.mark.parametrize(
    ("response", "message"),
    [
        ("raise no luck", "the verifier raised ValueError: no luck"),
        ("sys-exit 1", "the verifier raised SystemExit: 1"),
        ("exit", "its process died (exited with code 3)"),
        ("segfault", "its process died (killed by SIGSEGV)"),
    ],
)
def test_a_failing_sample_scores_0_is_counted_once_and_the_other_39_keep_theirs(
    pool: VerifierPool, response: str, message: str
) -> None:
    responses = ["1"] * 40
    responses[3] = response
    result = pool.score(requests(responses))
    assert result.errors == 1
    assert result.timeouts == 0
    assert result.rewards.sum() == 39.0
    assert result.rewards[3] == 0.0
    assert len(result.messages) == 1
    assert "env.obey: sample 3 (prompt 3" in result.messages[0]
    assert message in result.messages[0]


@pytest.mark.parametrize("response", ["hang", "spin"])
def test_a_sample_past_its_limit_of_300_ms_is_killed_within_10_s(pool: VerifierPool, response: str) -> None:
    start = time.monotonic()
    result = pool.score(requests(["1", response, "1"], "brief"))
    took = time.monotonic() - start
    assert 0.3 <= took < 10
    assert result.rewards.tolist() == [1.0, 0.0, 1.0]
    assert (result.errors, result.timeouts) == (0, 1)
    assert "passed env.brief.timeout_s of 0.3 s" in result.messages[0]


def test_the_limit_counts_from_a_samples_start_so_12_times_200_ms_pass_under_a_limit_of_1_5_s() -> None:
    with VerifierPool({"obey": config(num_workers=1, timeout_s=1.5)}) as own:
        start = time.monotonic()
        result = own.score(requests(["sleep 0.2"] * 12))
    assert time.monotonic() - start > 2.4
    assert result.timeouts == 0
    assert result.rewards.tolist() == [1.0] * 12


def test_1000_samples_with_1_percent_crashing_and_1_percent_hanging_are_all_scored_and_counted() -> None:
    responses = ["1"] * 1000
    for i in range(0, 1000, 100):
        responses[i + 17] = "exit"
        responses[i + 58] = "hang"
    with VerifierPool({"obey": config(timeout_s=0.1, num_workers=4)}) as small:
        result = small.score(requests(responses))
    # A loaded machine may pass the tight limit on an innocent sample too: never fewer, and the sums always agree.
    assert result.errors == 10
    assert result.timeouts >= 10
    assert result.rewards.sum() == 1000 - result.errors - result.timeouts
    assert len(result.messages) == 5


def test_on_error_fail_ends_the_call_naming_the_sample_and_the_pool_still_works(pool: VerifierPool) -> None:
    with pytest.raises(VerifierError, match=r"env.strict: sample 2 \(prompt 2, response 'raise no'\).*ValueError: no"):
        pool.score(requests(["1", "1", "raise no", "1"], "strict"))
    with pytest.raises(VerifierError, match=r"sample 0 .*passed env.strict.timeout_s of 2 s"):
        pool.score(requests(["hang"], "strict"))
    assert pool.score(requests(["5"] * 8, "strict")).rewards.tolist() == [5.0] * 8


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("nan", r"nan \(float\)"),
        ("list", r"\[1.0, 0.0\] \(list\)"),
        ("none", r"None \(NoneType\)"),
        ("huge-int", r"10{199}.* \(int\)"),
        ("huge", r"1e\+39 \(float\)"),
    ],
)
def test_a_return_value_that_is_not_one_finite_number_is_an_error_that_names_the_verifier(
    pool: VerifierPool, response: str, found: str
) -> None:
    with pytest.raises(UserError, match=rf"env.obey.verifier: {MODULE}:obey returned {found} for sample 1 "):
        pool.score(requests(["1", response]))
    assert pool.score(requests(["7"])).rewards.tolist() == [7.0]


def test_numpy_scalars_and_booleans_count_as_numbers(pool: VerifierPool) -> None:
    assert pool.score(requests(["numpy", "true"])).rewards.tolist() == [0.25, 1.0]


def test_the_verifier_finds_the_problems_text_in_the_metadata(pool: VerifierPool) -> None:
    assert pool.score(requests(["problem problem 0", "problem other"])).rewards.tolist() == [1.0, 0.0]


def test_verifier_processes_do_not_import_torch(pool: VerifierPool) -> None:
    import torch  # noqa: F401  (the driver has it)

    assert pool.score(requests(["modules"])).rewards.tolist() == [0.0]


def test_eight_threads_may_score_at_the_same_time(pool: VerifierPool) -> None:
    results: dict[int, list[float]] = {}
    threads = [
        threading.Thread(target=lambda n=n: results.update({n: pool.score(requests([str(n)] * 20)).rewards.tolist()}))
        for n in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {n: [float(n)] * 20 for n in range(8)}


def test_workers_outlive_the_thread_that_first_used_them(pool: VerifierPool) -> None:
    pids: list[float] = []
    with VerifierPool({"obey": config(num_workers=1)}) as own:
        thread = threading.Thread(target=lambda: pids.extend(own.score(requests(["pid"])).rewards.tolist()))
        thread.start()
        thread.join(30)
        time.sleep(0.2)
        result = own.score(requests(["pid"]))
        assert result.errors == 0
        assert result.rewards.tolist() == pids


@pytest.mark.parametrize(
    ("verifier", "cause"),
    [
        ("no_such_package.rewards:score", "ModuleNotFoundError: No module named 'no_such_package'"),
        (f"{MODULE}:absent", "AttributeError"),
        (f"{MODULE}:not_a_function", "TypeError: not_a_function .* is a int, expected a function"),
        ("mathverify", "expected math_verify, reasoning_gym or package.module:function"),
    ],
)
def test_a_verifier_that_cannot_be_loaded_is_a_user_error_at_the_start(verifier: str, cause: str) -> None:
    with pytest.raises(UserError, match=rf"env.math.verifier: cannot load .*{cause}"):
        VerifierPool({"math": EnvConfig(verifier=verifier)})


def test_an_unknown_environment_is_named_with_those_there_are(pool: VerifierPool) -> None:
    with pytest.raises(UserError, match=r"no environment 'maths': env defines \['brief', 'obey', 'strict'\]"):
        pool.score(requests(["1"], "maths"))


def test_close_may_be_called_twice_and_leaves_no_process_and_no_scoring() -> None:
    pool = VerifierPool({"obey": config()})
    pid = int(pool.score(requests(["pid"])).rewards[0])
    before = set(children_of(os.getpid()))
    pool.close()
    pool.close()
    assert wait_until(lambda: not Path(f"/proc/{pid}").exists())
    assert set(children_of(os.getpid())) < before
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(requests(["1"]))


def test_what_verifiers_print_is_in_their_log_file_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """At the import, from a worker, its error stream and its child, and from one that is killed at its limit."""
    module = "from tests.unit.environments.sample_verifiers import obey\nprint('loaded')\n"
    (tmp_path / "talkative.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    with VerifierPool({"obey": EnvConfig(verifier="talkative:obey", timeout_s=0.5)}) as own:
        own.log_to(tmp_path / "logs")
        result = own.score(requests(["print hello", "print-and-hang bye"]))
    assert (result.rewards.tolist(), result.timeouts) == ([1.0, 0.0], 1)
    assert (tmp_path / "logs/env-obey.log").read_text().split() == ["loaded", "hello", "hello", "hello", "bye"]
    assert capfd.readouterr() == ("", "")


def test_a_verifier_whose_import_takes_60_s_is_a_timeout_after_its_limit_of_half_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sleepy_verifier.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    started = time.monotonic()
    with pytest.raises(PhaseTimeout, match=r"import of the verifier: no answer .*env\.sleepy within 0\.5 s"):
        VerifierPool({"sleepy": EnvConfig(verifier="sleepy_verifier:verify", start_timeout_s=0.5)})
    assert time.monotonic() - started < 10


def test_closing_does_not_wait_for_a_verifier_whose_import_takes_60_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when the run is interrupted, or another environment's verifier cannot be imported."""
    (tmp_path / "slow_verifier.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    envs = {
        "slow": EnvConfig(verifier="slow_verifier:verify"),
        "wrong": EnvConfig(verifier="no_such_package:verify"),
    }
    started = time.monotonic()
    with pytest.raises(UserError, match="no_such_package"):
        VerifierPool(dict(reversed(envs.items())))
    assert time.monotonic() - started < 10


def test_a_killed_sample_takes_its_own_children_with_it(pool: VerifierPool, tmp_path: Path) -> None:
    note = tmp_path / "pid"
    result = pool.score(requests([f"child {note}"], "brief"))
    assert result.timeouts == 1
    assert wait_until(lambda: not alive(int(note.read_text())))


def test_no_zombies_are_left_by_20_crashes() -> None:
    with VerifierPool({"obey": config()}) as own:
        assert own.score(requests(["exit"] * 20)).errors == 20
        own.score(requests(["1"] * 20))
        [host] = [
            p
            for p in children_of(os.getpid())
            if b"environments.host" in Path(f"/proc/{p}/cmdline").read_bytes()
            and own._envs["obey"].host._process.pid == p
        ]
        assert all(alive(p) for p in children_of(host))
        assert len(children_of(host)) <= 2


def test_workers_busy_or_hung_are_gone_within_10_s_of_the_drivers_sigkill(tmp_path: Path) -> None:
    script = f"""
import sys, threading, time
from nemo_rl_moe.environments.pool import VerifierPool
from tests.unit.environments.test_pool import config, requests
pool = VerifierPool({{"obey": config(num_workers=2, timeout_s=1000.0)}})
print(int(pool._envs["obey"].host._process.pid), flush=True)
pool.score(requests(["child {tmp_path / "a"}", "child {tmp_path / "b"}"]))
"""
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, cwd=REPOSITORY)
    assert driver.stdout is not None
    host = int(driver.stdout.readline())
    assert wait_until(lambda: (tmp_path / "a").exists() and (tmp_path / "b").exists())
    workers = children_of(host)
    assert len(workers) == 2
    driver.send_signal(signal.SIGKILL)
    driver.wait(10)
    assert wait_until(lambda: not any(alive(p) for p in [host, *workers]))


def test_workers_are_gone_within_10_s_of_their_hosts_sigkill_and_the_error_names_the_environment() -> None:
    pool = VerifierPool({"obey": config(num_workers=1)})
    pid = int(pool.score(requests(["pid"])).rewards[0])
    os.kill(pool._envs["obey"].host._process.pid, signal.SIGKILL)
    assert wait_until(lambda: not alive(pid))
    with pytest.raises(RuntimeError, match=r"the verifier host of env.obey is gone"):
        pool.score(requests(["1"]))
    pool.close()


def test_scoring_256_trivial_samples_costs_less_than_50_ms_of_cpu_in_the_driver(pool: VerifierPool) -> None:
    batch = requests(["1"] * 256)
    pool.score(batch)
    best = float("inf")
    for _ in range(5):
        start = time.process_time()
        pool.score(batch)
        best = min(best, time.process_time() - start)
    assert best < 0.05
