"""How peers reach each other: calls (`transport`, over `p2p` or `memory`), the directory (`dht`), p2pd, the event loop.

The one room that imports hivemind and sockets. Everything else sees `transport.Transport` and `transport.Directory`.
"""
