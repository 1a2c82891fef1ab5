"""The greeting and the framing, over real connections on loopback."""

import asyncio
import json
from collections.abc import Awaitable, Callable

import pytest

from elastic.wire import Line, Reached, StrangerError, Unreached, connect_any, listen, welcome

TOKEN = "a1b2"  # noqa: S105 - a test's
Serve = Callable[[Line], Awaitable[None]]


async def serving(serve: Serve) -> tuple[asyncio.Server, int]:
    """A server for each connection."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = Line(reader, writer)
        try:
            await serve(line)
        finally:
            line.drop()

    sock = listen()
    return await asyncio.start_server(accept, sock=sock), int(sock.getsockname()[1])


async def call(
    port: int, token: str = TOKEN, them: str = "b", limit_s: float = 2.0
) -> Reached | Unreached:
    return await connect_any(
        ["127.0.0.1"], port, token=token, me="a", them=them, purpose="join", limit_s=limit_s
    )


def test_both_sides_prove_the_token_and_talk() -> None:
    met: list[tuple[str, str]] = []

    async def serve(line: Line) -> None:
        met.append(await welcome(line, TOKEN, "b"))
        line.send({"echo": (await line.receive())["say"]})
        await line.drain()
        await asyncio.sleep(0.1)

    async def main() -> None:
        server, port = await serving(serve)
        async with server:
            found = await call(port)
            assert isinstance(found, Reached)
            found.line.send({"say": "ü" * 1000})
            assert await found.line.receive() == {"echo": "ü" * 1000}
            found.line.drop()

    asyncio.run(main())
    assert met == [("a", "join")]


@pytest.mark.parametrize(("ours", "theirs"), [("x", TOKEN), ("", TOKEN), (TOKEN, ""), ("", "")])
def test_whoever_has_not_the_token_is_cut_off_and_told_nothing(ours: str, theirs: str) -> None:
    refused: list[BaseException] = []

    async def serve(line: Line) -> None:
        try:
            await welcome(line, theirs, "b")
        except ConnectionError as error:
            refused.append(error)

    async def main() -> Reached | Unreached:
        server, port = await serving(serve)
        async with server:
            return await call(port, ours)

    assert isinstance(asyncio.run(main()), Unreached)
    assert isinstance(refused[0], StrangerError)


def test_token_never_crosses_the_network_even_to_a_stranger() -> None:
    heard: list[bytes] = []

    async def main() -> Reached | Unreached:
        async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(json.dumps({"challenge": "0" * 32}).encode() + b"\n")
            heard.append(await reader.readline())
            writer.write(json.dumps({"id": "b", "proof": "0" * 64}).encode() + b"\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(stranger, "127.0.0.1", 0)
        async with server:
            return await call(server.sockets[0].getsockname()[1])

    assert isinstance(asyncio.run(main()), Unreached)
    assert heard
    assert TOKEN.encode() not in heard[0]


def test_closed_port_is_refused_another_agent_is_not_the_one_and_silence_ends_in_time() -> None:
    async def serve(line: Line) -> None:
        await welcome(line, TOKEN, "another")

    async def silent(line: Line) -> None:
        await line.receive()

    async def main() -> None:
        sock = listen()
        free = int(sock.getsockname()[1])
        sock.close()
        found = await call(free)
        assert isinstance(found, Unreached)
        assert found.refused == ("127.0.0.1",)
        for wrong in (serve, silent):
            server, port = await serving(wrong)
            async with server:
                found = await call(port, limit_s=0.5)
                assert isinstance(found, Unreached)
                assert found.refused == ()

    asyncio.run(asyncio.wait_for(main(), 20))


@pytest.mark.parametrize("said", [b"nonsense\n", b"[1]\n", b"{}\n", b"x" * 400_000, b""])
def test_nonsense_is_a_connection_that_ended(said: bytes) -> None:
    async def main() -> Reached | Unreached:
        async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            del reader
            writer.write(said)
            writer.close()

        server = await asyncio.start_server(talk, "127.0.0.1", 0)
        async with server:
            return await call(server.sockets[0].getsockname()[1])

    assert isinstance(asyncio.run(main()), Unreached)
