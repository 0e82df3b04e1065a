"""HTTP/1.1: a client half, which is the hot path, and a server half.

The client, in the order to read it: ``connection`` (a server's address, and the port of five calls), ``sockets`` (the port over
real sockets and TLS), ``reader`` (bytes in, one answer out; no I/O), ``exchange`` (one request and its answer, and the pool of
connections), ``httpx_transport`` (the same connections under an ``httpx`` client).

The server: ``server_reader`` (bytes in, requests out; no I/O), ``server`` (answers as bytes, and one connection). It is imported
from its modules: the engine has no need of it.
"""

from .connection import Address as Address
from .connection import BadResponse as BadResponse
from .connection import Connection as Connection
from .connection import ConnectionBroken as ConnectionBroken
from .connection import Connector as Connector
from .connection import NotConnected as NotConnected
from .connection import parse_url as parse_url
from .exchange import Exchange as Exchange
from .exchange import Pool as Pool
from .exchange import post_head as post_head
from .exchange import post_request as post_request
from .httpx_transport import EVENT_STREAM as EVENT_STREAM
from .httpx_transport import PoolTransport as PoolTransport
from .httpx_transport import carry as carry
from .httpx_transport import library_of as library_of
from .httpx_transport import limits_of as limits_of
from .reader import BODY_LIMIT as BODY_LIMIT
from .reader import Response as Response
from .sockets import socket_connector as socket_connector
