# SPDX-License-Identifier: Apache-2.0
"""Modes: what directories need so that files of a mode can be reached."""

from __future__ import annotations

import pytest

from tensorpool.errors import ConfigError
from tensorpool.file_access import directory_mode, group_name, user_name
from tensorpool.shm.permission import check_file_mode


@pytest.mark.parametrize(
    ("file_mode", "expected"),
    [(0o600, 0o700), (0o640, 0o2750), (0o660, 0o2750), (0o620, 0o2710)],
)
def test_a_group_may_search_directories_and_never_write_them(file_mode: int, expected: int) -> None:
    """x wherever there is r or w, and setgid: what is made inside is the group's. Only the owner replaces files."""
    assert directory_mode(file_mode) == expected


@pytest.mark.parametrize("mode", [0o400, 0o060, 0o770, 0o4660, 0o10660])
def test_modes_that_regions_cannot_have_are_refused(mode: int) -> None:
    """The owner must read and write, and no account executes a region."""
    with pytest.raises(ConfigError, match=r"shm.permissions_mode = .* accepted: 600, 640, 660"):
        check_file_mode(mode)


@pytest.mark.parametrize("mode", [0o661, 0o662, 0o664, 0o666, 0o607, 0o777, -1])
def test_modes_with_access_for_others_are_refused_with_the_remedy(mode: int) -> None:
    """Users who are to share regions share a group; no mode opens them to every account of the host."""
    with pytest.raises(
        ConfigError, match="accepted: no access for others: 660, with the users who attach in one group"
    ):
        check_file_mode(mode)


def test_ids_without_a_name_are_numbers() -> None:
    """In a container the other side's ids often have none."""
    assert (user_name(0), group_name(0)) == ("root", "root")
    assert (user_name(123456789), group_name(123456789)) == ("123456789", "123456789")
