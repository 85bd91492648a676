# SPDX-License-Identifier: Apache-2.0
"""What is wrong, and how to mend it: the facts behind `tensorpool inspect` and `tensorpool doctor`.

    inspection   one stream seen from outside       regions   its files and superblocks
    streams      which one is meant                 slots     what its ring holds
    listening    what a bystander hears

Only looks: nothing is mapped, created, leased or written.
"""
