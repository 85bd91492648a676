# SPDX-License-Identifier: Apache-2.0
"""The supervisor as one object: an observer with a policy on a thread, a service of the control plane, and HTTP.

No stream needs it: frames flow on without it. Beside ping, status, log-level and drain its service
answers `view` (a summary in a few numbers) and `shutdown-driver`, which asks the SHM driver to end with the token
that both were configured with. Wire §10.1.3, §10.5; Driver Model §4.13; Service Control §4.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Literal

from tensorpool import aeron
from tensorpool.clock import Clock, SystemClock
from tensorpool.closing import ClosesOnExit
from tensorpool.control import AgentWithService, Service, ServiceAgent, add_common_commands
from tensorpool.discovery.provider import ThriftyIdle
from tensorpool.errors import Closed, LocalProtocolError, TransportError
from tensorpool.logs import get_logger
from tensorpool.supervisor.config import SupervisorConfig
from tensorpool.supervisor.observer import LONGEST_NS, SHARE, SHORTEST_NS, Observer
from tensorpool.supervisor.policy import Policy
from tensorpool.supervisor.snapshot import Change
from tensorpool.telemetry.addresses import parse_address
from tensorpool.wire import Message
from tensorpool.wire.driver import ShmDriverShutdownRequest, ShutdownReason

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from tensorpool.telemetry.http import HttpServer

DECIDE_EVERY_NS: Final = 250_000_000
NO_TOKEN: Final = "policies.shutdown_token is not configured here; a driver ignores requests without its token"
PATIENCE_PERIODS: Final = 3  # until a consumer reports that it obeyed


class SupervisorAgent:
    """Observes, decides, and sends overrides. `on_change` is called with every change, on this agent's thread."""

    role_name = "tensorpool-supervisor"

    def __init__(
        self,
        config: SupervisorConfig,
        observer: Observer,
        clock: Clock,
        on_change: Callable[[Change, int], object] | None = None,
    ) -> None:
        self._config = config
        self._clock = clock
        self._on_change = on_change
        self.observer: Final = observer
        self.policy: Final = Policy(config.supervisor.rules, patience_ns=PATIENCE_PERIODS * config.announce_period_ns)
        self.unsent = 0
        self._log = get_logger("supervisor", instance_id=config.supervisor.instance_id)
        self._publication: tuple[aeron.Client, aeron.Publication] | None = None
        self._decide_ns = 0
        self._last_change = 0  # the number of the last change that was handed on

    def on_start(self) -> None:
        self.observer.on_start()
        self._log.info(
            "supervisor_started", aeron_dir=self.observer.aeron_dir, rules=len(self._config.supervisor.rules)
        )

    def do_work(self) -> int:
        work = self.observer.do_work()
        now_ns = self._clock.monotonic_ns()
        if now_ns >= self._decide_ns:
            self._decide_ns = now_ns + DECIDE_EVERY_NS
            work += self._decide(now_ns)
            self._hand_on(now_ns)
        return work

    def on_close(self) -> None:
        self._publication = None
        self.observer.on_close()
        self._log.info("supervisor_stopped")

    def send(self, message: Message) -> bool:
        """Publish on the driver's control stream; whether there was room and a subscriber.

        From the agent's own thread.
        """
        client = self.observer.client
        if client is None:
            return False
        try:
            if self._publication is None or self._publication[0] is not client:
                self._publication = client, aeron.publish(client, self._config.driver.control)
            return bool(self._publication[1].offer(message.encode()))
        except (TransportError, Closed) as error:
            self._publication = None
            self._log.warning("not_sent", message=type(message).__name__, error=str(error))
            return False

    def _decide(self, now_ns: int) -> int:
        with self.observer.lock:
            decisions = self.policy.decide(self.observer.view, now_ns)
            for decision in decisions:
                self.observer.view.on_decision(decision.stream_id, decision.consumer_id, decision.reason, now_ns)
        for decision in decisions:
            self._log.info(
                "policy_decided", stream_id=decision.stream_id, consumer_id=decision.consumer_id, reason=decision.reason
            )
            if decision.message is not None and not self.send(decision.message):
                self.unsent += 1  # it is sent again if the consumer does not obey
        return len(decisions)

    def _hand_on(self, now_ns: int) -> None:
        with self.observer.lock:
            changes = [change for change in self.observer.view.history.changes if change.number > self._last_change]
        if not changes:
            return
        self._last_change = changes[-1].number
        wall_ns = self._clock.realtime_ns()
        for change in changes:
            self._log.debug("change", kind=str(change.kind), text=change.text)
            if self._on_change is not None:
                self._on_change(change, wall_ns - now_ns + change.at_ns)


class Supervisor(ClosesOnExit):
    """A running supervisor inside this process.

    >>> with Supervisor(SupervisorConfig.load("supervisor.toml")) as supervisor:      # doctest: +SKIP
    ...     print(supervisor.http_address)

    Waits for a media driver that is not running. Raises `ConfigError` when the HTTP address cannot be bound.
    """

    def __init__(
        self,
        config: SupervisorConfig,
        *,
        aeron_dir: str | None = None,
        clock: Clock | None = None,
        on_change: Callable[[Change, int], object] | None = None,
    ) -> None:
        self.config: Final = config
        clock = clock or SystemClock()
        self.observer: Final = Observer(aeron_dir, config, clock=clock, is_patient=True)
        self.agent: Final = SupervisorAgent(config, self.observer, clock, on_change)
        self._http = self._serve()
        try:
            idle = ThriftyIdle(share=SHARE, shortest_ns=SHORTEST_NS, longest_ns=LONGEST_NS)
            self._runner = aeron.AgentRunner(self._hosted(), idle, on_error=self._log_failed_turn).start()
        except BaseException:
            if self._http is not None:
                self._http.close()
            raise

    @property
    def is_running(self) -> bool:
        return self._runner.is_running

    @property
    def http_address(self) -> str | None:
        """Where it serves HTTP; None: nowhere."""
        return None if self._http is None else self._http.address

    def close(self) -> None:
        """Stop serving, then stop observing."""
        try:
            if self._http is not None:
                self._http.close()
        finally:
            self._runner.close()

    # --- inside

    def _serve(self) -> HttpServer | None:
        section = self.config.supervisor
        if not section.http:
            return None
        from tensorpool.supervisor.exports import Exports
        from tensorpool.telemetry.http import HttpServer

        host, port = parse_address("supervisor.http", section.http)
        exports = Exports(self.observer, self._metrics)
        return HttpServer(host, port, exports.routes, key="supervisor.http")

    def _hosted(self) -> aeron.Agent:
        """The agent, and beside it the service that receives commands."""
        if not self.config.control.enabled:
            return self.agent
        service = Service("supervisor", self.config.supervisor.instance_id, config=self.config.control)
        add_common_commands(service, status=self._figures, drain=_end)
        service.command("view", is_query=True)(self._figures)
        service.command("shutdown-driver", refuse=self._refuse_shutdown)(self.shut_down_driver)
        return AgentWithService(self.agent, ServiceAgent(service, self.observer.aeron_dir))

    def _figures(self) -> dict[str, object]:
        snapshot = self.observer.snapshot()
        return {
            "streams": len(snapshot.streams),
            "consumers": len(snapshot.consumers),
            "services": len(snapshot.services),
            "stream_states": Counter(str(stream.state) for stream in snapshot.streams),
            "consumer_states": Counter(str(consumer.state) for consumer in snapshot.consumers),
            "overrides": self.agent.policy.overrides,
            "released": self.agent.policy.released,
            "given_up": self.agent.policy.given_up,
        }

    def _refuse_shutdown(self) -> str | None:
        if self.config.control.drain == "never":
            return "a driver is not shut down from there: control.drain is 'never'"
        return None if self.config.policies.shutdown_token else NO_TOKEN

    def shut_down_driver(self, reason: Literal["NORMAL", "ADMIN", "ERROR"] | None = None) -> str:
        """Ask the SHM driver to end (§4.13). From the agent's own thread. Raises LocalProtocolError."""
        token = self.config.policies.shutdown_token
        if not token:
            raise LocalProtocolError(NO_TOKEN)
        request = ShmDriverShutdownRequest(
            correlation_id=secrets.randbits(62),
            reason=ShutdownReason[reason or "ADMIN"],
            token=token.encode().decode(),
            error_message=f"asked by {self.config.supervisor.instance_id}",
        )
        if not self.agent.send(request):
            raise LocalProtocolError("the request was not sent: no driver listens on the control stream")
        return "asked"

    def _metrics(self) -> Iterable[Metric]:
        from tensorpool.telemetry.metrics import counter

        policy = self.agent.policy
        yield counter("tensorpool_supervisor_overrides", "Times that a rule acted on a consumer.", policy.overrides)
        yield counter("tensorpool_supervisor_released", "Overrides that were lifted.", policy.released)
        yield counter("tensorpool_supervisor_given_up", "Consumers that did not obey.", policy.given_up)
        if self._http is not None:
            refused = self._http.counts["refused"]
            yield counter("tensorpool_supervisor_http_refused", "Requests beyond the limit at once.", refused)

    def _log_failed_turn(self, error: Exception) -> None:
        get_logger("supervisor").error("turn_failed", exc_info=error)


def _end() -> None:
    raise aeron.AgentTerminated
