# SPDX-License-Identifier: Apache-2.0
"""What a service reports to operators: metrics and health over HTTP, readiness and its watchdog to systemd."""
