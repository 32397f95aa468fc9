"""Risk guarded: tokens of a sample that spans an update are credited to weights that did not sample them."""

from __future__ import annotations

from nemo_rl_moe.generation.token_versions import TokenVersions


def test_12_tokens_over_two_updates_are_5_of_version_3_then_4_of_4_then_3_of_5() -> None:
    versions = TokenVersions()
    versions.begin("a", 3)
    versions.update({"a": 5}, 4)
    versions.begin("b", 4)
    versions.update({"a": 9, "b": 0}, 5)
    assert versions.end("a", 12) == [(3, 5), (4, 4), (5, 3)]
    # Nothing of it came under version 4, so its first token is of version 5.
    assert versions.end("b", 2) == [(5, 2)]


def test_a_response_that_ended_before_an_update_is_whole_of_its_version() -> None:
    versions = TokenVersions()
    versions.begin("a", 1)
    versions.update({"other": 3}, 2)
    assert versions.end("a", 7) == [(1, 7)]


def test_a_response_cut_behind_a_stop_string_to_6_tokens_loses_those_of_the_last_version_first() -> None:
    versions = TokenVersions()
    versions.begin("a", 1)
    versions.update({"a": 4}, 2)
    versions.update({"a": 8}, 3)
    assert versions.end("a", 6) == [(1, 4), (2, 2)]
    versions.begin("a", 3)
    assert versions.end("a", 0) == []
