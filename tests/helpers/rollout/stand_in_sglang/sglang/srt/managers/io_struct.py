from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any


@dataclass
class RpcReqInput:
    method: str
    parameters: dict[str, Any] | None = None


@dataclass
class RpcReqOutput:
    success: bool
    message: str


class Socket:
    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def poll(self, timeout: int) -> bool:
        return self.connection.poll(timeout / 1000)

    def close(self, linger: int | None = None) -> None:
        self.connection.close()


def sock_send(socket: Socket, obj: Any, flags: int = 0) -> None:
    socket.connection.send(obj)


def sock_recv(socket: Socket, flags: int = 0) -> Any:
    return socket.connection.recv()
