# SPDX-License-Identifier: Apache-2.0
"""Node ids: which client makes a trace id."""

from __future__ import annotations

import pytest

from tests.client.attachment.conftest import Bench


@pytest.mark.parametrize(("client_id", "node_id"), [(41, 41), (0xFFFF, 0xFFFF), (0x10000, 1), (0x12345678, 0x444C)])
def test_a_client_without_a_node_id_derives_one_from_its_client_id(bench: Bench, client_id: int, node_id: int) -> None:
    """Its two halves in 16 bits, and marked as derived."""
    bench.client_ids = iter([client_id])
    bench.attach()
    assert bench.attachment.client_id == client_id
    assert (bench.attachment.node_id, bench.attachment.is_node_id_derived) == (node_id, True)
