# SPDX-License-Identifier: Apache-2.0
"""The `tensorpool` command: one module per command group, imported only when it runs."""
