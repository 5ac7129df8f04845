"""A rank of the other engine of a split, all of whose messages come from the test."""

from __future__ import annotations

import threading

import zmq

from rollout.split.control import Hello, Message, curve_keys, decode, encode


class Far:
    """One end of a control socket that connects or listens, and sends `hello` first."""

    def __init__(
        self, address: str, key: bytes, hello: Hello | None, *, listens: bool = False
    ) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
        public, secret = curve_keys(key)
        options = {zmq.PROBE_ROUTER: 1, zmq.LINGER: 0, zmq.RCVTIMEO: 5000}
        options |= {zmq.CURVE_PUBLICKEY: public, zmq.CURVE_SECRETKEY: secret}
        options |= {zmq.CURVE_SERVER: 1} if listens else {zmq.CURVE_SERVERKEY: public}
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        if listens:
            self._socket.bind(address)
        else:
            self._socket.connect(address)
        if hello is not None:  # a listening end cannot send before a peer connects
            threading.Thread(target=self.send, args=[hello], daemon=True).start()

    def send(self, message: Message | bytes) -> None:
        self._socket.send(message if isinstance(message, bytes) else encode(message))

    def recv(self) -> Message:
        while not (data := self._socket.recv()):  # signs of life are empty
            pass
        return decode(data)

    def close(self) -> None:
        self._socket.context.destroy()
