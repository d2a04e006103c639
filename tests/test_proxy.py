"""The standalone proxy: a wire of known delay, bandwidth and patience in front of any TCP peer."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from meshpipe.wire.proxy import main


@contextmanager
def echo() -> Iterator[int]:
    """A peer that sends back what it gets, connection by connection; its port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer(peer: socket.socket) -> None:
            with peer:
                try:
                    while data := peer.recv(1 << 16):
                        peer.sendall(data)
                except OSError:
                    return  # cut

        def accept() -> None:
            while True:
                try:
                    peer, _ = listener.accept()
                except OSError:
                    return
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=answer, args=(peer,), daemon=True).start()

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(5)


@contextmanager
def behind(*arguments: str, to: int | None = None) -> Iterator[socket.socket]:
    """A connection through a proxy to an echo peer."""
    with echo() as port:
        command = [
            sys.executable,
            "-m",
            "meshpipe.wire.proxy",
            "--until-eof",
            "--to",
            f"127.0.0.1:{to or port}",
        ]
        with subprocess.Popen(
            [*command, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            assert process.stdin is not None
            port = int(process.stdout.readline())
            with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                yield connection
            process.stdin.close()
            assert process.wait(10) == 0


def receive(connection: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count and (more := connection.recv(count - len(data))):
        data += more
    return bytes(data)


def test_delay_is_precise_and_does_not_limit_what_is_under_way() -> None:
    with behind("--delay-ms", "20") as connection:
        trips: list[float] = []
        while len(trips) < 30 or (min(trips) >= 41 and len(trips) < 300):  # a busy machine has a quiet moment
            began = time.perf_counter()
            connection.sendall(b"x" * 100)
            receive(connection, 100)
            trips.append((time.perf_counter() - began) * 1e3)
        assert min(trips) >= 40
        assert min(trips) < 41, "late by less than a millisecond over two ways"

        began = time.perf_counter()
        for n in range(50):  # 50 messages, 1 ms apart, are under way at once
            connection.sendall(bytes([n]) * 100)
            time.sleep(0.001)
        assert receive(connection, 5000) == b"".join(bytes([n]) * 100 for n in range(50))
        assert time.perf_counter() - began < 50 * 0.04, "not one round trip after the other"


def test_bandwidth_is_what_was_asked_for() -> None:
    with behind("--bandwidth-mbit", "80") as connection:  # 10 bytes a microsecond
        data = bytes(range(256)) * 8000  # 2 MB: 0.2 s
        sender = threading.Thread(target=connection.sendall, args=(data,))
        began = time.perf_counter()
        sender.start()
        assert receive(connection, len(data)) == data
        assert 0.2 <= time.perf_counter() - began < 0.6
        sender.join()


def test_ends_pass_through() -> None:
    with behind("--delay-ms", "5") as connection:
        connection.sendall(b"last words")
        connection.shutdown(socket.SHUT_WR)
        assert receive(connection, 100) == b"last words"


def test_a_cut_wire_is_a_lost_connection() -> None:
    with behind("--cut-after", "0.2") as connection:
        connection.sendall(b"x")
        assert receive(connection, 1) == b"x"
        began = time.perf_counter()
        with pytest.raises(ConnectionResetError):
            receive(connection, 1)
        assert time.perf_counter() - began < 1


def test_nobody_behind_it_is_a_lost_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(ConnectionResetError), behind(to=port) as connection:  # perhaps before the first call
        receive(connection, 1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--to", "nowhere"], "expected an address like"),
        (["--to", "127.0.0.1:1", "--delay-ms", "-5"], "link condition delay is -0.005"),
    ],
)
def test_wrong_arguments_are_named(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
