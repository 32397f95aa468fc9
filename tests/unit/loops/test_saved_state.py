"""Risk guarded: a checkpoint that the disk has spoiled is trained on as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_rl_moe.errors import UserError
from nemo_rl_moe.loops import saved_state
from nemo_rl_moe.loops.saved_state import STATE_FILE, read_state, saved_metrics, write_state


def save(folder: Path) -> Path:
    (folder / "policy/part").mkdir(parents=True)
    (folder / "policy/weights").write_bytes(bytes(range(256)) * 40)
    (folder / "policy/part/common").write_bytes(b"common")
    (folder / "hf").mkdir()
    write_state(folder, step=4, weight_version=5, loader={"epoch": 1}, metrics={"train/reward": 0.5})
    return folder


def zeros_in_the_middle(folder: Path) -> None:
    with (folder / "policy/weights").open("r+b") as file:
        file.seek(5000)
        file.write(bytes(16))


def test_what_was_saved_is_read_back_with_size_and_crc_of_both_files(tmp_path: Path) -> None:
    state = read_state(save(tmp_path), 4)
    assert (state.step, state.weight_version, state.loader) == (4, 5, {"epoch": 1})
    assert state.metrics == saved_metrics(tmp_path) == {"train/reward": 0.5}
    # CRC-32 of `common` as gzip and zlib.crc32 have it.
    assert state.files["policy/part/common"] == [6, "e5ec7051"]
    assert state.files["policy/weights"][0] == 10240


@pytest.mark.parametrize(
    ("spoil", "what"),
    [
        (lambda f: (f / "policy/part/common").unlink(), "policy/part/common is missing"),
        (lambda f: (f / "policy/weights").write_bytes(b"123"), "policy/weights has 3 bytes, expected 10240"),
        (zeros_in_the_middle, "policy/weights is not what was written"),
        (lambda f: (f / STATE_FILE).write_text('{"step": 4,'), f"{STATE_FILE} is not a checkpoint's"),
        (lambda f: (f / STATE_FILE).write_text("{}"), f"{STATE_FILE} is not a checkpoint's"),
        (lambda f: (f / STATE_FILE).write_text("[]"), f"{STATE_FILE} is not a checkpoint's"),
    ],
)
def test_a_spoiled_checkpoint_is_refused_naming_the_file(
    tmp_path: Path, spoil: Callable[[Path], object], what: str
) -> None:
    spoil(save(tmp_path / "step_4"))
    with pytest.raises(UserError) as caught:
        read_state(tmp_path / "step_4", 4)
    assert str(caught.value).startswith(f"{tmp_path}/step_4: the checkpoint is damaged: {what}")


def test_a_folder_renamed_to_another_step_is_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="says step 4, expected 9"):
        read_state(save(tmp_path), 9)


def test_metrics_of_a_state_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    (save(tmp_path) / STATE_FILE).write_text("[]")
    assert saved_metrics(tmp_path) == {}


def test_a_file_of_3000_bytes_read_in_16_stretches_of_100_shows_damage_of_200_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_state, "_STRETCH_BYTES", 100)
    path, content = tmp_path / "weights", bytes(range(1, 251)) * 12
    path.write_bytes(content)
    whole = saved_state._fingerprint(path)
    for start in range(0, 2800, 50):
        path.write_bytes(content[:start] + bytes(200) + content[start + 200 :])
        size, crc = saved_state._fingerprint(path)
        assert size == whole[0] == 3000 and crc != whole[1]
