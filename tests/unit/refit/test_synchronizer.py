"""What the hand-over of weights refuses. Sender and receiver are fakes that fail on purpose."""

from __future__ import annotations

import contextlib

import pytest
import torch

from nemo_rl_moe.refit.digest import check_digest
from nemo_rl_moe.refit.layout import WeightLayout
from nemo_rl_moe.refit.offer import WeightOffer
from nemo_rl_moe.refit.shared_memory import SharedBuffer
from nemo_rl_moe.refit.synchronizer import WeightSynchronizer

LAYOUT = WeightLayout.build([("a.weight", "float32", (3, 5)), ("b.weight", "bfloat16", (7,))])


class FakeSender:
    """Writes ones into all tensors but those left out."""

    def __init__(self, left_out: str | None = None) -> None:
        self.left_out = left_out

    def weight_layout(self) -> WeightLayout:
        """Two small tensors."""
        return LAYOUT

    def export_weights(self, buffer_path: str) -> int:
        """Returns the elements that it wrote."""
        written = 0
        with SharedBuffer.attach(buffer_path, LAYOUT.nbytes) as buffer:
            for name, view in LAYOUT.views(buffer.tensor).items():
                if name != self.left_out:
                    view.fill_(1)
                    written += view.numel()
        return written


class FakeReceiver:
    """Two engines, of which the second may stay behind."""

    def __init__(self, lag: int = 0) -> None:
        self.lag = lag
        self.loaded: list[torch.Tensor] = []
        self.version = 0

    def weights_held(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def update_weights(self, offer: WeightOffer) -> None:
        """Checks the digest, as engines do."""
        with offer.served_to(0) as update, SharedBuffer.attach(update["path"], LAYOUT.nbytes) as buffer:
            views = WeightLayout.from_plain(update["layout"]).views(buffer.tensor)
            check_digest(views, update["digest"])
            self.loaded = [view.clone() for view in views.values()]
        self.version = offer.version

    def weight_versions(self) -> list[int]:
        """The second is late by `lag`."""
        return [self.version, self.version - self.lag]


def test_whole_weights_arrive_with_their_version() -> None:
    receiver = FakeReceiver()
    synchronizer = WeightSynchronizer(FakeSender(), receiver)
    try:
        assert synchronizer.sync(4).version == 4
    finally:
        synchronizer.close()
    assert [t.float().sum().item() for t in receiver.loaded] == [15, 7]


@pytest.mark.parametrize(
    ("sender", "receiver", "message", "loaded"),
    [
        (FakeSender("b.weight"), FakeReceiver(), "version 4: the trainer wrote 15 of 22 elements", 0),
        (FakeSender(), FakeReceiver(lag=1), r"version 4: the generation workers report versions \[4, 3\]", 2),
    ],
    ids=["a tensor is left out", "an engine stays behind"],
)
def test_a_hand_over_that_is_not_whole_fails(
    sender: FakeSender, receiver: FakeReceiver, message: str, loaded: int
) -> None:
    synchronizer = WeightSynchronizer(sender, receiver)
    try:
        with pytest.raises(RuntimeError, match=message):
            synchronizer.sync(4)
    finally:
        synchronizer.close()
    assert len(receiver.loaded) == loaded
