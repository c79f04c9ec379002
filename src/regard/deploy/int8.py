"""Dynamic quantisation of an ONNX file to 8 bits, by ONNX Runtime."""

from pathlib import Path
from typing import Any

from regard.deploy.facts import FileFacts
from regard.deploy.writers import quiet, rewrite_metadata
from regard.errors import MissingExtraError


def quantise(source: Path, out: Path, facts: FileFacts) -> None:
    """Write `source` with int8 weights, one scale a channel; activations are rounded as they come.

    Only products with a weight are quantised: those between queries, keys and values stay in
    float32. Weights keep 7 bits where the processor has no 8-bit dot product: without it, pairs
    of 8-bit products are added in 16 bits and saturate.
    """
    with quiet():
        quantize_dynamic, kind = quantiser()
        quantize_dynamic(
            str(source),
            str(out),
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            reduce_range=True,
            weight_type=kind.QInt8,
            extra_options={"MatMulConstBOnly": True},
        )
    rewrite_metadata(out, facts)


def quantiser() -> tuple[Any, Any]:
    """ONNX Runtime's function and its types, or which extra to install."""
    try:
        from onnxruntime.quantization import QuantType, quantize_dynamic
    except ImportError:
        raise MissingExtraError("onnxruntime", "export", "quantising to int8") from None
    return quantize_dynamic, QuantType
