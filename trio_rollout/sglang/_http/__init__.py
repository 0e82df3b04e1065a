"""The hot path: one HTTP/1.1 POST and its answer over a keep-alive connection, with nothing in between.

Read in this order: ``_address`` (what a URL means), ``_connection`` (the port of five calls), ``_sockets`` and ``_tls``
(its production versions), ``_reader`` (bytes to answer, no I/O), ``_exchange`` (one request and its answer), ``_pool`` (idle
connections), ``_httpx`` (the same connections under an ``httpx`` client).
"""

from ._address import Address as Address
from ._address import parse_url as parse_url
from ._connection import (
    BadResponse as BadResponse,
)
from ._connection import (
    Connection as Connection,
)
from ._connection import (
    ConnectionBroken as ConnectionBroken,
)
from ._connection import (
    Connector as Connector,
)
from ._connection import (
    NotConnected as NotConnected,
)
from ._exchange import Exchange as Exchange
from ._exchange import post_head as post_head
from ._exchange import post_request as post_request
from ._httpx import EVENT_STREAM as EVENT_STREAM
from ._httpx import PoolTransport as PoolTransport
from ._httpx import carry as carry
from ._httpx import library_of as library_of
from ._httpx import limits_of as limits_of
from ._pool import Pool as Pool
from ._reader import Response as Response
from ._tls import socket_connector as socket_connector
