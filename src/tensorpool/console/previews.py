# SPDX-License-Identifier: Apache-2.0
"""Live pictures: one thread and one consumer for each stream that is watched, however many pages watch it.

The consumer takes the newest frame only, at a steady pace, whether or not a page is ready: a page that stalls changes
nothing that others can see. A picture is made once for all pages with the same look. When the last page leaves, the
consumer is closed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from typing import Any, Final

import msgspec

from tensorpool._core import monotonic_ns
from tensorpool.client import Client, connect
from tensorpool.client.consumer import Consumer
from tensorpool.client.session import State
from tensorpool.console import messages
from tensorpool.console.budget import ConsoleBudget, StreamBudget
from tensorpool.console.drawing import Drawable, answer, draw
from tensorpool.console.messages import FromPage, PixelQuery, ProfileQuery
from tensorpool.console.viewer import FrameKey, Viewer, Wish
from tensorpool.driver.config import DriverConfig
from tensorpool.errors import TensorPoolError
from tensorpool.logs import get_logger
from tensorpool.looks import Look, NotShown

TURN_S: Final = 1 / 15  # the consumer looks at its ring so often
LEAST_S: Final = 0.005  # a turn is never shorter
FRESH_S: Final = 0.02  # how long it waits for a frame that is just being published
ATTACH_S: Final = 2.0
RETRY_S: Final = 1.0
COPY_S: Final = 5.0  # how long a whole frame is waited for
COPIES: Final = 50  # pictures that are drawn from a copy after one was torn
RECENT: Final = 4  # live frames that pixels are read from, for as long as the ring has them
MAX_HELD_BYTES: Final = 1 << 30  # copies for paused pages, of one stream

type Deliver = Callable[[str | bytes], object]


class Page:
    """A viewer with its way back: `deliver` may be called on any thread."""

    def __init__(self, deliver: Deliver) -> None:
        self.viewer: Final = Viewer()
        self.deliver: Final = deliver

    def tell(self, text: str) -> None:
        """A status, once."""
        if self.viewer.new_status(text):
            self.deliver(messages.text("status", text=text))


class Watch:
    """One watched stream. Only its own thread touches the consumer and the viewers."""

    def __init__(
        self,
        stream_id: int,
        client: Callable[[], Client],
        budget: StreamBudget,
        lock: threading.Lock,
        predecessor: threading.Thread | None,
    ) -> None:
        self.stream_id: Final = stream_id
        self.consumer: Consumer | None = None
        self._copies_to_draw = 0  # after a picture of a frame that was overwritten meanwhile
        self._client = client
        self._budget = budget
        self._budget_lock = lock
        self._predecessor = predecessor
        self._inbox: deque[Callable[[], object]] = deque()
        self._wake = threading.Event()
        self._over = threading.Event()
        self._pages: list[Page] = []
        self._newest: Drawable | None = None
        self._recent: deque[Drawable] = deque(maxlen=RECENT)
        self._held: dict[FrameKey, Drawable] = {}
        self._copies: list[Future[Drawable]] = []
        self._log = get_logger("console", stream_id=stream_id)
        self.thread: Final = threading.Thread(target=self._run, name=f"console-{stream_id}", daemon=True)

    # --- for other threads

    def add(self, page: Page) -> None:
        self._order(lambda: self._pages.append(page))

    def remove(self, page: Page) -> None:
        self._order(lambda: self._on_left(page))

    def receive(self, page: Page, message: FromPage) -> None:
        self._order(lambda: self._on_message(page, message))

    def copy(self, seq: int | None) -> Future[Drawable]:
        """A copy of the newest frame, or of the one that a paused page looks at."""
        wanted: Future[Drawable] = Future()
        self._order(lambda: self._on_copy(wanted, seq))
        return wanted

    def close(self) -> None:
        """Soon: the thread closes the consumer and ends."""
        self._over.set()
        self._wake.set()

    def _order(self, act: Callable[[], object]) -> None:
        self._inbox.append(act)
        self._wake.set()

    # --- the thread

    def _run(self) -> None:
        if self._predecessor is not None:
            self._predecessor.join()
            self._predecessor = None
        while not self._over.is_set():
            try:
                consumer = self._client().consumer(self.stream_id, timeout=ATTACH_S, max_outstanding_seq_gap=0)
            except TensorPoolError as error:
                self._rest(RETRY_S)
                for page in self._pages:
                    page.tell(str(error))
                continue
            self.consumer = consumer
            try:
                while not self._over.is_set() and consumer.state is not State.CLOSED:
                    self._turn(consumer)
            except Exception as error:
                self._log.error("preview_failed", exc_info=error)
                self._rest(RETRY_S)
            finally:
                self.consumer = None
                self._forget()
                consumer.close()
        for wanted in self._copies:
            wanted.cancel()

    def _turn(self, consumer: Consumer) -> None:
        self._rest(self._nap_s())
        self._look(consumer)
        is_waiting = any(page.viewer.is_live and page.viewer.number for page in self._pages)
        if is_waiting and self._wait_ns() == 0 and consumer.wait(FRESH_S):
            self._look(consumer)  # a picture that is due is of a frame that has just been published
        self._explain(consumer)
        self._make_copies()
        self._draw_all()

    def _rest(self, seconds: float) -> None:
        """Until the time is over, or a page wants something."""
        self._wake.wait(seconds)
        self._wake.clear()
        while self._inbox:
            try:
                self._inbox.popleft()()
            except Exception as error:
                self._log.error("message_failed", exc_info=error)

    def _nap_s(self) -> float:
        """The consumer's pace; or less, where a page may get a picture earlier."""
        is_moving = self._newest is not None
        is_wanted = any((is_moving and page.viewer.is_live) or page.viewer.picture_of(None) for page in self._pages)
        return min(TURN_S, max(LEAST_S, self._wait_ns() / 1e9)) if is_wanted else TURN_S

    def _wait_ns(self) -> int:
        with self._budget_lock:
            return self._budget.wait_ns(monotonic_ns())

    def _look(self, consumer: Consumer) -> None:
        """Take the newest frame."""
        frame = consumer.latest()
        if frame is None:
            if self._newest is not None and consumer.epoch != self._newest.epoch:
                self._newest = None
                self._recent.clear()  # a view keeps the memory of its epoch
            return
        before = self._newest
        if before is not None and before.key == (frame.epoch, frame.seq):
            return
        if before is not None and before.epoch != frame.epoch:
            self._recent.clear()
        self._newest = Drawable.live(frame, consumer.metadata(frame.meta_version, epoch=frame.epoch))
        self._recent.append(self._newest)

    def _explain(self, consumer: Consumer) -> None:
        """Say why there is no picture."""
        if consumer.state is State.FALLBACK:
            why = "a supervisor sent this consumer to another source: the console shows shared memory only"
        elif consumer.state is not State.ACTIVE:
            why = "waiting for the driver: the lease or the memory of this stream is gone"
        elif self._newest is None:
            why = "nothing published yet in this epoch"
        else:
            return
        for page in self._pages:
            if not page.viewer.is_paused:
                page.tell(why)

    # --- copies

    def _make_copies(self) -> None:
        newest = self._newest
        if newest is None:
            return
        paused = [page for page in self._pages if page.viewer.wants_copy(newest.key)]
        if not paused and not self._copies:
            return
        held_bytes = sum(frame.array.nbytes for frame in self._held.values())
        if paused and held_bytes + newest.array.nbytes > MAX_HELD_BYTES:
            for page in paused:
                page.tell(f"too many paused pages: copies of their frames are limited to {MAX_HELD_BYTES >> 20} MiB")
            paused = []
        copy = newest.copied()
        if copy is None:
            return  # the next frame, then
        for page in paused:
            page.viewer.hold(copy.key)
            self._held[copy.key] = copy
        self._drop_copies()
        copies, self._copies = self._copies, []
        for wanted in copies:
            if not wanted.done():
                wanted.set_result(copy)

    def _on_left(self, page: Page) -> None:
        self._pages.remove(page)
        self._drop_copies()

    def _drop_copies(self) -> None:
        """Those that no page looks at any more."""
        if self._held:
            in_use = {page.viewer.held for page in self._pages}
            self._held = {key: frame for key, frame in self._held.items() if key in in_use}

    def _on_copy(self, wanted: Future[Drawable], seq: int | None) -> None:
        if seq is None:
            self._copies.append(wanted)
            return
        held = [frame for frame in self._held.values() if frame.seq == seq]
        if held:
            wanted.set_result(held[-1])
        else:
            what = f"frame {seq} is not kept: pause at a frame to save it, or leave out seq for the newest"
            wanted.set_exception(NotShown(what))

    # --- pictures

    def _draw_all(self) -> None:
        """Make each picture once for all pages that want it, as many as the budget allows; who waited longest first."""
        newest = None if self._newest is None else self._newest.key
        groups: dict[tuple[FrameKey, Wish], list[Page]] = {}
        for page in sorted(self._pages, key=lambda page: page.viewer.served_ns):
            key, wish = page.viewer.picture_of(newest), page.viewer.wish
            if key is not None and wish is not None:
                groups.setdefault((key, wish), []).append(page)
        for (key, wish), pages in groups.items():
            frame = self._held.get(key) or self._newest
            if frame is None or frame.key != key or self._wait_ns() > 0:
                continue
            self._draw(frame, wish, pages)

    def _draw(self, frame: Drawable, wish: Wish, pages: Collection[Page]) -> None:
        began_s, why, drawn = time.thread_time(), "", None
        # A copy takes less time than a picture, so it succeeds in rings that come round too soon for that.
        source = frame.copied() if self._copies_to_draw else frame
        self._copies_to_draw = max(0, self._copies_to_draw - 1)
        try:
            drawn = None if source is None else draw(source, wish)
        except NotShown as error:
            why = str(error)
        except Exception as error:
            self._log.error("picture_failed", exc_info=error, look=msgspec.to_builtins(wish))
            why = f"this frame cannot be drawn in this way: {type(error).__name__}: {error}"
        with self._budget_lock:
            self._budget.use(time.thread_time() - began_s)
        if source is None or not source.is_intact():
            self._copies_to_draw = COPIES
            return
        for page in pages:
            if drawn is None:
                page.viewer.on_tried(frame.key, wish, monotonic_ns())
                page.tell(why)
                continue
            page.viewer.on_picture(frame.key, wish, monotonic_ns())
            number, skipped = page.viewer.number, page.viewer.skipped
            header = {"number": number, **frame.header(), **drawn.fields, "skipped": skipped}
            page.deliver(messages.pack(header, drawn.body))

    # --- messages

    def _on_message(self, page: Page, message: FromPage) -> None:
        if isinstance(message, PixelQuery | ProfileQuery):
            page.deliver(self._answer(page.viewer, message))
            return
        page.viewer.on_message(message)
        self._drop_copies()

    def _answer(self, viewer: Viewer, query: PixelQuery | ProfileQuery) -> str:
        """From the frame that is shown, or from the newest one where the ring has overwritten that."""
        look = Look() if viewer.wish is None else viewer.wish.look
        shown = [frame for frame in self._recent if frame.key == viewer.shown]
        held = [frame for key, frame in self._held.items() if key == viewer.held]
        for frame in (*held, *shown, *self._newest_first()):
            try:
                found = answer(frame, look, query)
            except NotShown as error:
                return messages.text("error", text=str(error))
            if frame.is_intact():
                return msgspec.json.encode(found).decode()
        return messages.text("error", text="there is no frame to read values from")

    def _newest_first(self) -> Iterator[Drawable]:
        """The frames that were taken lately, and then the one that is in the ring now."""
        yield from reversed(tuple(self._recent))
        if self.consumer is not None:
            self._look(self.consumer)
        if self._newest is not None:
            yield self._newest

    def _forget(self) -> None:
        """Before the consumer is closed: views keep memory mapped."""
        self._newest = None
        self._recent.clear()


class Previews:
    """All watched streams of a console. Its methods may be called on any thread."""

    def __init__(self, config: DriverConfig, aeron_dir: str | None) -> None:
        self._config = config
        self._aeron_dir = aeron_dir
        self._budget = ConsoleBudget()
        self._budget_lock = threading.Lock()
        self._lock = threading.Lock()
        self._client_lock = threading.Lock()  # to connect may take its time
        self._client: Client | None = None
        self._watches: dict[int, tuple[Watch, int]] = {}  # and by how many it is used
        self._ending: dict[int, threading.Thread] = {}
        self._is_closed = False

    def open(self, stream_id: int, page: Page) -> Watch:
        """Begin to watch, or join those who do."""
        watch = self._use(stream_id)
        watch.add(page)
        return watch

    def leave(self, watch: Watch, page: Page) -> None:
        watch.remove(page)
        self._release(watch)

    def copy(self, stream_id: int, seq: int | None) -> Drawable:
        """A whole frame, verified: the newest, or the one that a paused page looks at. Blocks.

        Raises NotShown for a frame that is not kept, and where there is none.
        """
        watch = self._use(stream_id)
        try:
            return watch.copy(seq).result(COPY_S)
        except TimeoutError:
            raise NotShown(f"stream {stream_id} has no frame to save") from None
        finally:
            self._release(watch)

    @property
    def consumer_ids(self) -> frozenset[int]:
        """Of the console's own consumers."""
        with self._lock:
            watches = [watch for watch, _ in self._watches.values()]
        consumers = [watch.consumer for watch in watches]
        return frozenset(consumer.consumer_id for consumer in consumers if consumer is not None)

    def metadata(self, stream_id: int) -> dict[str, Any]:
        """What the producer of a watched stream says about its frames."""
        with self._lock:
            used = self._watches.get(stream_id)
        consumer = None if used is None else used[0].consumer
        found = None if consumer is None else consumer.metadata()
        return {} if found is None else dict(found.attributes)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            threads = [watch.thread for watch, _ in self._watches.values()] + list(self._ending.values())
            for watch, _ in self._watches.values():
                watch.close()
            self._watches.clear()
        for thread in threads:
            thread.join()
        if self._client is not None:
            self._client.close()

    def _use(self, stream_id: int) -> Watch:
        with self._lock:
            used = self._watches.get(stream_id)
            if used is None:
                budget = StreamBudget(self._budget)
                before = self._ending.pop(stream_id, None)
                watch, users = Watch(stream_id, self._connected, budget, self._budget_lock, before), 0
                watch.thread.start()
            else:
                watch, users = used
            self._watches[stream_id] = watch, users + 1
            return watch

    def _release(self, watch: Watch) -> None:
        with self._lock:
            used = self._watches.get(watch.stream_id)
            if used is None or used[0] is not watch:
                return  # the console closes
            if used[1] > 1:
                self._watches[watch.stream_id] = watch, used[1] - 1
                return
            del self._watches[watch.stream_id]
            self._ending = {key: thread for key, thread in self._ending.items() if thread.is_alive()}
            self._ending[watch.stream_id] = watch.thread
        watch.close()

    def _connected(self) -> Client:
        """One client for all streams. Raises TransportError where there is no media driver."""
        with self._client_lock:
            if self._client is None:
                self._client = connect(self._aeron_dir, config=self._config)
            return self._client
