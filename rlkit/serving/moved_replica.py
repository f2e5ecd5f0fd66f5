"""What the proxy is told when a replica was started anew at another address (`POST /proxy/replicas`). Pure."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from rlkit.errors import BadInput
from rlkit.refusals import refusals
from rlkit.serving.proxy_config import base_url_in


class Move(BaseModel):
    """`replica` is its place in the proxy's list; `url` its new base URL, `receiver` that of the receiver beside it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    replica: Annotated[int, Field(ge=0)]
    url: Annotated[str, AfterValidator(base_url_in)]
    receiver: Annotated[str, AfterValidator(base_url_in)] | None = None


def parse_move(fields: dict[str, Any], replicas: int, *, needs_receiver: bool) -> Move:
    """A request's fields. Raises BadInput naming the field that does not fit a proxy of so many replicas."""
    try:
        move = Move.model_validate(fields)
    except ValidationError as error:
        raise BadInput("; ".join(f"{field}: {what}" for field, what in refusals(error, Move))) from None
    if move.replica >= replicas:
        raise BadInput(f"replica: {move.replica} of {replicas}, which are counted from 0")
    if needs_receiver and move.receiver is None:
        raise BadInput("receiver: adapters are pushed, so the replica needs one beside it")
    return move
