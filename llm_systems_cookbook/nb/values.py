"""Values of numpy, torch and Python as plain numbers and strict JSON."""

import json
import math
import numbers
import sys
from decimal import Decimal

import numpy as np


def is_tensor(value: object) -> bool:
    """Tell whether a value is a torch tensor, without importing torch."""
    # Nothing is a tensor in a process that has not imported torch.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def tensor_to_numpy(tensor: object) -> np.ndarray:
    """Return a tensor's values, of any dtype and device, as an array."""
    tensor = tensor.detach().cpu()
    if tensor.is_floating_point():
        # numpy lacks bfloat16 and the 8-bit floats; float64 holds them all.
        tensor = tensor.double()
    return tensor.resolve_conj().resolve_neg().numpy()


def plain_value(value: object) -> object:
    """Return numbers, strings, None, lists and dicts of Python's own."""
    if value is None:
        return None
    if isinstance(value, bool | np.bool_):
        return bool(value)
    if isinstance(value, str):
        return str(value)
    if is_tensor(value):
        return plain_value(tensor_to_numpy(value))
    if isinstance(value, np.ndarray) and value.dtype.kind not in "mM":
        return plain_value(value.tolist())
    if isinstance(value, list | tuple):
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        return {
            _plain_key(key): plain_value(item) for key, item in value.items()
        }
    return _plain_number(value)


def _plain_number(value: object) -> int | float:
    # A numpy duration calls itself an integer, and would lose its unit.
    if not isinstance(value, np.timedelta64):
        if isinstance(value, numbers.Integral):
            return int(value)
        if isinstance(value, numbers.Real | Decimal):
            return float(value)
    raise TypeError(
        f"cannot record a {type(value).__name__}: use a number, bool, str, "
        "None, list, tuple, dict, or a numpy or torch value"
    )


def _plain_key(key: object) -> str | int | float:
    return str(key) if isinstance(key, str) else _plain_number(key)


def measurement(name: str, value: object, unit: str, context: object) -> dict:
    """Return a measure as strict JSON, with a flag for what JSON lacks."""
    non_finite: dict[str, str] = {}
    record: dict[str, object] = {
        "name": name,
        "value": _strict(value, "value", non_finite),
        "unit": unit,
        "context": _strict(context, "context", non_finite),
    }
    if non_finite:
        record["non_finite"] = non_finite
    # Whatever JSON refuses is refused here, not when the record is saved.
    json.dumps(record, allow_nan=False)
    return record


def _strict(value: object, path: str, non_finite: dict[str, str]) -> object:
    """Return the value without NaN and infinities, noted by their path."""
    if isinstance(value, float) and not math.isfinite(value):
        non_finite[path] = str(value)
        return None
    if isinstance(value, list):
        return [
            _strict(item, f"{path}[{i}]", non_finite)
            for i, item in enumerate(value)
        ]
    if isinstance(value, dict):
        strict = {
            str(key): _strict(item, f"{path}.{key}", non_finite)
            for key, item in value.items()
        }
        if len(strict) < len(value):
            raise ValueError(
                f"two keys of {path} read the same in JSON: {list(value)}"
            )
        return strict
    return value


def shown_measure(record: dict) -> str:
    """Return a measure's value, unit and, where it was given, its spread."""
    value = (record.get("non_finite") or {}).get("value", record.get("value"))
    shown = f"{shown_value(value)} {record.get('unit', '')}".rstrip()
    context = record.get("context") or {}
    if "lowest" in context and "highest" in context:
        low, high = context["lowest"], context["highest"]
        shown += f" ({shown_value(low)} to {shown_value(high)})"
    if "(generated" in str(context.get("trace")):
        shown += f", {context['trace']}"
    return shown


def shown_value(value: object) -> str:
    """Return a value for reading: thousands apart, four digits that count."""
    if isinstance(value, dict):
        items = value.items()
        return ", ".join(f"{key}: {shown_value(v)}" for key, v in items)
    if isinstance(value, list):
        return ", ".join(map(shown_value, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if 1_000 <= abs(value) < 1e15:
        return f"{value:,.1f}"
    return f"{value:.4g}"
