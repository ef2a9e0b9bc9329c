"""A stream that goes on at another gateway: `python resume.py PROMPT URL [URL ...]`."""

from __future__ import annotations

import asyncio
import sys

from pagestream_client.http import AsyncHttpClient


async def main(prompt: str, gateways: list[str]) -> None:
    """Print the answer as it comes, whichever gateway dies meanwhile."""
    messages = [{"role": "user", "content": prompt}]
    async with AsyncHttpClient(gateways) as client:
        async for chunk in client.generate("demo", messages=messages, max_tokens=400, temperature=0):
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
