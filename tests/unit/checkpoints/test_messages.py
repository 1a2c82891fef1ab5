"""Messages between two processes: framed, with descriptors, over paths of any length."""

import os
import threading
from pathlib import Path

import pytest

from checkpoints.messages import Connection, LostError, connect, listen, pair
from checkpoints.segments import Segment


def test_messages_and_descriptors_arrive_in_order() -> None:
    ours, sock = pair()
    theirs = Connection(sock)
    one, two = Segment.make(4096), Segment.make(8192)
    ours.send({"op": "slots"}, [one.fd, two.fd])
    ours.send({"op": "end"})
    message, descriptors = theirs.receive(5) or ({}, [])
    assert message == {"op": "slots"}
    assert [os.fstat(fd).st_size for fd in descriptors] == [4096, 8192]
    assert theirs.receive(5) == ({"op": "end"}, [])
    assert theirs.receive(0) is None
    for fd in descriptors:
        os.close(fd)
    ours.close()
    with pytest.raises(LostError):
        theirs.receive(5)
    with pytest.raises(LostError):
        theirs.send({"op": "late"})
    theirs.close()


def test_a_message_larger_than_the_sockets_buffer_arrives() -> None:
    ours, sock = pair()
    theirs = Connection(sock)
    text = "x" * 3_000_000
    sender = threading.Thread(target=ours.send, args=({"op": text},))
    sender.start()
    message, _ = theirs.receive(20) or ({}, [])
    sender.join()
    assert message == {"op": text}
    ours.close()
    theirs.close()


def test_a_socket_is_found_under_a_path_longer_than_an_address(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    assert connect(folder, "writer-1.sock", 1) is None
    listener = listen(folder, "writer-1.sock")
    found = connect(folder, "writer-1.sock", 1)
    assert found is not None
    accepted, _ = listener.accept()
    found.send({"op": "hello"})
    assert Connection(accepted).receive(5) == ({"op": "hello"}, [])
    found.close()
    accepted.close()
    listener.close()
    again = listen(folder, "writer-1.sock")
    again.close()
