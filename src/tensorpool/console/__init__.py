# SPDX-License-Identifier: Apache-2.0
"""The console: a page in the browser that shows streams, live pictures, recordings, services and this host.

access            who may ask: token, cookie, host and origin, without IO
state             the supervisor's view, read once a second and sent to all pages; history: its last ten minutes
previews          live pictures: one consumer and one thread for each watched stream
viewer, budget    what to send to a page, and how much of the machine pictures may take, without IO
drawing           a frame and a look, as the bytes of a preview
messages          what pages and the console send each other
stream_details    slots and metadata of a stream, memory by stream and epoch
lakes, timeline   recordings: what there is of which time, frames of it; recorder_process: a recording as a child
services          commands to services
app, sockets      HTTP and WebSockets
server            all of it on a thread

Producers and consumers do not wait for it: it observes untethered, and reads pictures with `latest()`.
"""

from tensorpool import extras

extras.require("the console", "console", "starlette", "uvicorn", "websockets", "PIL")
