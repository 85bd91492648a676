# SPDX-License-Identifier: Apache-2.0
"""The UDP bridge: the frames of a stream in another host's shared memory.

A sender reads a local stream as a consumer and publishes its frames in chunks; a receiver assembles them and publishes
them as the producer of a local stream. One `Bridge` hosts mappings of both directions.
"""
