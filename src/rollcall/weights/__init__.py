"""Weights from the learner to engines in other processes: versioned, checked, over several transports.

``open_sender`` and ``open_receiver`` are the two ends; ``protocol`` says what both promise.
"""

from rollcall.errors import MissingPeerError, WeightUpdateError
from rollcall.weights.protocol import (
    Invitation,
    RefusedUpdateError,
    Sent,
    StaleUpdateError,
    TornUpdateError,
    WeightReceiver,
    WeightSender,
)
from rollcall.weights.transports import open_receiver, open_sender

__all__ = [
    "Invitation", "MissingPeerError", "RefusedUpdateError", "Sent", "StaleUpdateError", "TornUpdateError", "WeightReceiver", "WeightSender", "WeightUpdateError", "open_receiver", "open_sender",
]  # fmt: skip
