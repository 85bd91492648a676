# SPDX-License-Identifier: Apache-2.0
"""Figures of this machine, as ratios to memcpy and to peers, measured in one run. `make bench` prints them."""
