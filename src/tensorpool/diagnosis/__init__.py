# SPDX-License-Identifier: Apache-2.0
"""The facts behind `tensorpool inspect` and `tensorpool doctor`: what is wrong, and how to fix it.

    inspection          one stream seen from outside      regions      its files and superblocks
    streams             resolves an id or a name          slots        the contents of its ring
    announced_streams   observes for a moment             all_checks   every check of the doctor

Reads only: nothing is mapped, created, leased or written.
"""
