"""Errors, in OpenAI's and in Anthropic's form."""

from typing import Literal

from pydantic import BaseModel, Field


class ErrorDetail(BaseModel):
    """What is wrong."""

    message: str
    type: str
    param: str | None = Field(description="The part of the request that is wrong.")
    code: str | None = Field(description="A stable word for the error.")


class ErrorAnswer(BaseModel):
    """OpenAI's form of an error."""

    error: ErrorDetail


class ErrorEvent(ErrorAnswer):
    """The data of the event with which a stream ends that could not go on here."""

    stream_position: str = Field(description="The Last-Event-ID with which a reader goes on, on any gateway.")


class MessageErrorDetail(BaseModel):
    """What is wrong."""

    type: str
    message: str
    details: dict[str, str] | None = Field(None, description="error_code: a word for errors that clients act on.")


class MessageError(BaseModel):
    """Anthropic's form of an error."""

    type: Literal["error"]
    error: MessageErrorDetail
    request_id: str | None = Field(description="null before the request is accepted.")
