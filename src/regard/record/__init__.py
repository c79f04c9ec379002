"""Attention weights on demand, from any model, while the fast kernels run."""

from regard.record.health import attention_health
from regard.record.recorder import record
from regard.record.recording import Attention, Recording
from regard.record.relevance import Relevance, class_relevance
from regard.record.tokens import Tokens

__all__ = [
    "Attention",
    "Recording",
    "Relevance",
    "Tokens",
    "attention_health",
    "class_relevance",
    "record",
]
