"""Whether other agents can be reached from here: tried just before a world forms, and before a newcomer counts.

Does not import torch.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from elastic.wire import Reached, connect_any

__all__ = ["unreached"]

logger = logging.getLogger(__name__)


async def unreached(
    peers: Sequence[Mapping[str, Any]], *, token: str, me: str, limit_s: float
) -> list[str]:
    """Try to reach agents, all at once; return the ids of those that did not answer with the token in time."""

    async def fails(peer: Mapping[str, Any]) -> bool:
        found = await connect_any(
            peer["addresses"], int(peer["port"]), token=token, me=me, them=peer["id"], purpose="probe",
            limit_s=limit_s,
        )  # fmt: skip
        if isinstance(found, Reached):
            found.line.close()
            return False
        logger.warning("rendezvous: another node cannot be reached: %s", found.trouble)
        return True

    others = [peer for peer in peers if peer["id"] != me]
    results = await asyncio.gather(*map(fails, others))
    return [str(peer["id"]) for peer, bad in zip(others, results, strict=True) if bad]
