#!/usr/bin/env python3
"""Ports of loopback for servers that are started again and again, held against everybody else.

    ports.py COUNT      prints so many, in a line, and holds them until its standard input ends

A port that was found free is not free for long: while its server is down, or before it is up, another
run of a suite would take it. So the socket that found it stays bound, and never listens. What has to
listen there sets SO_REUSEADDR, as all servers here do, and gets the port beside that socket; who
looks for a free one does not, and is refused. Nor does the kernel give it to an outgoing connection.
To a client the port of a server that is down refuses connections, as ever.
"""

import random
import socket
import sys

# Ports that no connection of another program has now: ip_local_port_range starts at 32768.
PORTS = range(20000, 32000)
# For as long as this process lives.
_held = []


def held_port():
    """A free port, which no other caller gets."""
    while True:
        port = random.choice(PORTS)
        if _hold(port):
            return port


def _hold(port):
    """Whether the port is this process's now."""
    holder = socket.socket()
    try:
        holder.bind(("127.0.0.1", port))
    except OSError:
        holder.close()
        return False
    # After the bind, which fails if the port is in use.
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _held.append(holder)
    return True


if __name__ == "__main__":
    print(*(held_port() for _ in range(int(sys.argv[1]))), flush=True)
    sys.stdin.read()
