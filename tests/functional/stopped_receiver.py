"""The command line with a fault in it: a generation worker stops, without dying, as an update of its weights begins.

python -m tests.functional.stopped_receiver VERSION run RECIPE [OVERRIDE...]
"""

from __future__ import annotations

import signal
import sys

import psutil

from nemo_rl_moe.cli import main
from nemo_rl_moe.generation.generator import Generator
from nemo_rl_moe.refit.offer import WeightOffer


def stop_before_update(version: int) -> None:
    """From now on the last worker's processes stand still from the update to the version on."""
    update = Generator.update_weights

    def stopped(self: Generator, offer: WeightOffer) -> None:
        if offer.version == version:
            worker = psutil.Process(self.workers.pids()[-1])
            for process in (*worker.children(recursive=True), worker):
                process.send_signal(signal.SIGSTOP)
        update(self, offer)

    Generator.update_weights = stopped  # type: ignore[method-assign]


if __name__ == "__main__":
    stop_before_update(int(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
