"""How long files are kept, as OpenAI's `expires_after` says it."""

from typing import Literal

from pydantic import Field

from pagestream_gateway.api.openai.strict_body import Body

LEAST_S, MOST_S = 3600, 30 * 24 * 3600


class ExpiresAfter(Body):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=LEAST_S, le=MOST_S, description="From its creation: an hour to 30 days.")
