# SPDX-License-Identifier: Apache-2.0
"""`python -m tensorpool` is the `tensorpool` command."""

from tensorpool.cli.main import main

main()
