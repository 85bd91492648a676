# SPDX-License-Identifier: Apache-2.0
"""Settings under which calls that name no timeout wait for a minute, as environment variables."""

from __future__ import annotations

from typing import Final

PATIENT: Final = {
    "CLIENT_ATTACH_TIMEOUT_MS": "60000",
    "CLIENT_DISCOVER_TIMEOUT_MS": "60000",
    "CONTROL_COMMAND_TIMEOUT_MS": "60000",
}
