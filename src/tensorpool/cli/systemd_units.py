# SPDX-License-Identifier: Apache-2.0
"""systemd units for the services, as text: what `tensorpool service install` writes. Does no IO.

One unit for each service, named tensorpool[-NAME]-SERVICE.service, and one file for systemd-tmpfiles. A unit reports
readiness and signs of life itself (Type=notify), ends in order (KillMode=mixed: SIGTERM to the service, SIGKILL to what
is left), and may do what it needs and no more.
"""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Final

import msgspec

MARK: Final = "# Written by `tensorpool service install`; `tensorpool service uninstall` removes it."
# Each service and where its metrics are, counted from the first port; the supervisor's HTTP is the first.
PORTS: Final = {
    "supervisor": 0,
    "driver": 1,
    "media-driver": 2,
    "bridge": 3,
    "recorder": 4,
    "registry": 5,
    "console": 6,
}
SERVICES: Final = ("media-driver", "driver", "registry", "supervisor", "bridge", "recorder", "console")
DESCRIPTIONS: Final = {
    "media-driver": "Aeron media driver",
    "driver": "SHM driver",
    "registry": "registry of streams",
    "supervisor": "supervisor",
    "bridge": "bridge to other hosts",
    "recorder": "recorder",
    "console": "console",
}
CONFIGURED: Final = {
    "media-driver": "driver.toml",
    "driver": "driver.toml",
    "registry": "registry.toml",
    "supervisor": "supervisor.toml",
    "bridge": "bridge.toml",
    "recorder": "driver.toml",
    "console": "driver.toml",
}
RELOADABLE: Final = ("driver", "registry")
FIRST_PORT: Final = 9464

# Of every system unit. RestrictSUIDSGID is not among them for those that share directories with a group: their
# directories carry the set-group-ID bit. /dev/shm stays writable below ProtectSystem=strict and PrivateDevices.
HARDENING: Final = """\
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=yes
PrivateDevices=yes
ProtectClock=yes
ProtectControlGroups=yes
ProtectHostname=yes
ProtectKernelLogs=yes
ProtectKernelModules=yes
ProtectKernelTunables=yes
LockPersonality=yes
RestrictNamespaces=yes
RestrictRealtime=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
"""


class Installation(msgspec.Struct, frozen=True, kw_only=True):
    """What is installed, for whom."""

    services: tuple[str, ...]
    is_user: bool
    command: tuple[str, ...]  # that runs tensorpool
    config_dir: str
    name: str = ""  # of this installation among others on the host
    account: str = ""  # of system units
    group: str = ""
    first_port: int = FIRST_PORT
    record: tuple[str, ...] = ()  # arguments of `tensorpool record`
    lake: str = ""
    token_file: str = ""  # of the console
    memory: tuple[str, ...] = ()  # folders of regions and of the media driver, as far as they are known

    def unit_name(self, service: str) -> str:
        return unit_name(self.name, service)

    def port(self, service: str) -> int:
        return self.first_port + PORTS[service]


def unit_name(name: str, service: str) -> str:
    return "-".join(filter(None, ("tensorpool", name, service))) + ".service"


def tmpfiles_name(name: str) -> str:
    return "-".join(filter(None, ("tensorpool", name))) + ".conf"


def arguments(it: Installation, service: str) -> list[str]:
    """The command line of a service, after `tensorpool`."""
    words = {"registry": ["discovery"], "recorder": ["record", *it.record]}.get(service, [service])
    words += ["--config", f"{it.config_dir}/{CONFIGURED[service]}"]
    if service == "supervisor":
        return [*words, "--http", f"127.0.0.1:{it.port(service)}"]
    if service == "console" and it.token_file:
        words += ["--token-file", it.token_file]
    return [*words, "--metrics", f"127.0.0.1:{it.port(service)}"]


def unit(it: Installation, service: str) -> str:
    """The text of one unit."""
    before = [it.unit_name(other) for other in ("media-driver", "driver") if other in it.services and other != service]
    if service == "media-driver":
        before = []
    after = " ".join(["network.target", *before])
    of = f" ({it.name})" if it.name else ""
    command = " ".join(map(_quoted, [*it.command, *arguments(it, service)]))
    lines = [
        MARK,
        "[Unit]",
        f"Description=tensorpool {DESCRIPTIONS[service]}{of}",
        f"After={after}",
        *([f"Wants={' '.join(before)}"] if before else []),
        "StartLimitIntervalSec=60",
        "StartLimitBurst=10",
        "",
        "[Service]",
        "Type=notify",
        "NotifyAccess=main",
        f"ExecStart={command}",
        *(["ExecReload=/bin/kill -HUP $MAINPID"] if service in RELOADABLE else []),
        "Restart=on-failure",
        "RestartSec=1",
        "WatchdogSec=30",
        "TimeoutStartSec=300",  # a recorder waits for its streams
        "TimeoutStopSec=60",
        "KillMode=mixed",
        "LimitMEMLOCK=infinity",
        "LimitNOFILE=65536",
        "Environment=PYTHONUNBUFFERED=1",
    ]
    if not it.is_user:
        lines += [f"User={it.account}", *([f"Group={it.group}"] if it.group else []), *HARDENING.splitlines()]
        if service not in ("driver", "media-driver", "registry"):
            lines.append("RestrictSUIDSGID=yes")
        written = {str(PurePosixPath(path).parent) for path in it.memory if not path.startswith("/dev/")}
        if it.lake and service in ("recorder", "console"):
            written.add(it.lake)
        lines += [f"ReadWritePaths={' '.join(map(_quoted, sorted(written)))}"] if written else []
    lines += ["", "[Install]", f"WantedBy={'default.target' if it.is_user else 'multi-user.target'}", ""]
    return "\n".join(lines)


def tmpfiles(it: Installation) -> str:
    """Lines for systemd-tmpfiles: the lake's folder exists, and no cleaning by age touches what services map."""
    lines = [MARK]
    if it.lake and not it.is_user:
        lines.append(f"d {_escaped(it.lake)} 0750 {it.account} {it.group or '-'} -")
    lines += [f"x {_escaped(path)}*" for path in it.memory]
    return "\n".join([*lines, ""])


def _quoted(word: str) -> str:
    """As ExecStart takes it: no specifier, no variable, no space that splits it."""
    plain = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{plain}"' if not plain or any(sign in plain for sign in " \t'\"\\;") else plain


def _escaped(path: str) -> str:
    """As tmpfiles.d takes it."""
    return path.replace("\\", "\\\\").replace(" ", "\\x20").replace("%", "%%")
