"""The hot path: one HTTP/1.1 POST and its answer over a keep-alive connection, with nothing in between.

Read in this order: ``_address`` (what a URL means), ``_connection`` (the port of five calls), ``_sockets`` and ``_tls``
(its production versions), ``_reader`` (bytes to answer, no I/O), ``_exchange`` (one request and its answer), ``_pool`` (idle
connections), ``_httpx`` (the same connections under an ``httpx`` client).
"""

from .address import Address as Address
from .address import parse_url as parse_url
from .connection import BadResponse as BadResponse
from .connection import Connection as Connection
from .connection import ConnectionBroken as ConnectionBroken
from .connection import Connector as Connector
from .connection import NotConnected as NotConnected
from .exchange import Exchange as Exchange
from .exchange import post_head as post_head
from .exchange import post_request as post_request
from .httpx_transport import EVENT_STREAM as EVENT_STREAM
from .httpx_transport import PoolTransport as PoolTransport
from .httpx_transport import carry as carry
from .httpx_transport import library_of as library_of
from .httpx_transport import limits_of as limits_of
from .pool import Pool as Pool
from .reader import Response as Response
from .tls import socket_connector as socket_connector
