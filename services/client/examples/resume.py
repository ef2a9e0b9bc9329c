"""A stream that goes on at another gateway: `python resume.py PROMPT URL [URL ...]`."""

from __future__ import annotations

import asyncio
import sys

import httpx2
import openai
import pagestream_client.openai


async def main(prompt: str, gateways: list[str]) -> None:
    """Print the answer as it comes, whichever gateway dies meanwhile."""
    http = httpx2.AsyncClient(transport=pagestream_client.openai.transport(gateways))
    async with openai.AsyncOpenAI(base_url=f"{gateways[0]}/v1", api_key="none", http_client=http) as client:
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": prompt}],
            max_tokens=400,
            temperature=0,
            stream=True,
        )
        async for chunk in stream:
            sys.stdout.write("".join(choice.delta.content or "" for choice in chunk.choices))
            sys.stdout.flush()
    sys.stdout.write("\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
