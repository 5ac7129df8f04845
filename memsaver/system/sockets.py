"""Questions to the kernel about the other end of a local socket."""

import socket
import struct


def credentials(connection: socket.socket) -> tuple[int, int]:
    """Return the process id and the user id of the peer.

    For a connecting socket, these are the ids of the process that listens.
    """
    pid, uid, _ = struct.unpack(
        "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    )
    return pid, uid
