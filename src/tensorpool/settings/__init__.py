# SPDX-License-Identifier: Apache-2.0
"""Settings: `values` are their types, `schema` is what a settings struct accepts, `loader` reads them,
`difference` compares them.

    class Relay(msgspec.Struct, frozen=True, kw_only=True):
        port: Annotated[int, Meta(ge=1, le=65535)] = 4000
        \"\"\"Where it listens.\"\"\"

Every key is declared once, with its type, its range, its default or how it is derived, and its meaning: TOML,
variables, flags, errors and `docs/configuration.md` follow from that.
"""

from tensorpool.settings.difference import ReloadRefused as ReloadRefused
from tensorpool.settings.difference import differences as differences
from tensorpool.settings.difference import fixed as fixed
from tensorpool.settings.loader import Configuration as Configuration
from tensorpool.settings.loader import check as check
from tensorpool.settings.loader import dump as dump
from tensorpool.settings.loader import env_name as env_name
from tensorpool.settings.loader import known_keys as known_keys
from tensorpool.settings.loader import load as load
from tensorpool.settings.loader import lookalikes as lookalikes
from tensorpool.settings.schema import HIDDEN as HIDDEN
from tensorpool.settings.schema import Derived as Derived
from tensorpool.settings.schema import Key as Key
from tensorpool.settings.schema import describe as describe
from tensorpool.settings.values import IPC as IPC
from tensorpool.settings.values import MS as MS
from tensorpool.settings.values import U32 as U32
from tensorpool.settings.values import AeronStreamId as AeronStreamId
from tensorpool.settings.values import AeronStreamIdRange as AeronStreamIdRange
from tensorpool.settings.values import Channel as Channel
from tensorpool.settings.values import EndpointOf as EndpointOf
from tensorpool.settings.values import Name as Name
from tensorpool.settings.values import OptionalChannel as OptionalChannel
from tensorpool.settings.values import OptionalEndpointOf as OptionalEndpointOf
from tensorpool.settings.values import PositiveU32 as PositiveU32
from tensorpool.settings.values import PublishableChannel as PublishableChannel
from tensorpool.settings.values import Range as Range
from tensorpool.settings.values import Secret as Secret
from tensorpool.settings.values import StreamId as StreamId
from tensorpool.settings.values import StreamIdRange as StreamIdRange
